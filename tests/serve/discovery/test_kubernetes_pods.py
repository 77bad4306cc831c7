"""The source `discovery.kubernetes` against an API server: engines, log lines, metrics, and refusals at the start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.kube.kubeconfigs import kubeconfig
from tests.serve.discovery.kubernetes_rig import PODS, Rig, play
from tests.serve.rig import RunningGateway
from tests.waiting import HANGS_S, until

from kvroute.serve.assembly import Deployment, Gateway
from kvroute.serve.discovery.kubernetes_pods import KubernetesPods
from kvroute.serve.discovery.sources import check_source, source_of
from kvroute.topology.schema import Discovery, KubernetesEntry, LevelsEntry
from kvroute.types import InputError

CLUSTER = """
name: live
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
discovery:
  kubernetes: {kubeconfig: kubeconfig}
  node: {gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
gateway:
  listen: {port: 0}
  admin: {port: 0}
"""


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, str]]:
    """Return the fields of each log line of an event."""
    return [record.__dict__["fields"] for record in caplog.records if record.message == event]


@asynccontextmanager
async def followed(rig: Rig, section: KubernetesEntry) -> AsyncIterator[KubernetesPods]:
    """Run the source."""
    source = source_of(Discovery(kubernetes=section), rig.folder)
    assert isinstance(source, KubernetesPods)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(source.run(rig.report))
        yield source
        task.cancel()


def test_the_section_says_what_is_followed(tmp_path: Path) -> None:
    """Namespace, selector, labels of a level, and a kubeconfig beside the cluster file."""

    async def scenario(rig: Rig) -> None:
        await rig.put("a", labels={"kvroute.io/role": "prefill", "app": "x"}, podIP="10.0.0.1")
        await rig.put("b", labels={"kvroute.io/role": "decode", "app": "y"}, podIP="10.0.0.2")
        levels = LevelsEntry(rack=["example.com/row"])
        section = KubernetesEntry(namespace="llm", selector="app in (x, z)", levels=levels, kubeconfig="kubeconfig")
        async with followed(rig, section):
            await until(lambda: rig.names == ["llm.a"])
            assert rig.reports[-1][0].place.rack == "r1"
        async with followed(rig, KubernetesEntry(namespace="*", kubeconfig="kubeconfig")):
            await until(lambda: rig.names == ["llm.a", "llm.b"])
        async with followed(rig, KubernetesEntry(namespace="default", kubeconfig="kubeconfig")):
            await until(lambda: rig.names == [])

    play(scenario, tmp_path)


def test_findings_are_logged_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pod that is left out is one line, however often it changes; one that waits for its address is counted only."""
    caplog.set_level("INFO", "kvroute")

    async def scenario(rig: Rig) -> None:
        async with followed(rig, KubernetesEntry(kubeconfig="kubeconfig")) as source:
            await until(lambda: rig.reports == [()])
            assert source.findings == {"left out": 0, "warning": 0, "waiting": 0}
            await rig.put("wrong", labels={"kvroute.io/role": "prefil"}, podIP="10.0.0.1")
            await until(lambda: source.findings["left out"] == 1)
            media = "application/merge-patch+json"
            await rig.client.must("PATCH", f"{PODS}/wrong", {"metadata": {"labels": {"a": "b"}}}, media)
            await rig.put("early", podIP="")
            await until(lambda: source.findings["waiting"] == 1)
            await rig.client.must("PATCH", f"{PODS}/early/status", {"status": {"podIP": "10.0.0.2"}}, media)
            await until(lambda: rig.names == ["llm.early"])
            assert source.findings == {"left out": 1, "warning": 0, "waiting": 0}

    play(scenario, tmp_path)
    reasons = [(line["kind"], line["reason"].partition(";")[0]) for line in fields_of(caplog, "discovery_finding")]
    assert reasons == [("left out", "llm/wrong: kvroute.io/role: unknown role 'prefil'")]


def test_an_outage_is_visible(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log line when pods and nodes begin to fail, metrics meanwhile, and a line when they are back; the engines
    stay."""
    caplog.set_level("INFO", "kvroute")

    async def scenario(rig: Rig) -> None:
        await rig.put("a")
        await rig.put("wrong", labels={"kvroute.io/role": "prefil"}, podIP="10.0.0.3")
        gateway = Gateway(Deployment.of(CLUSTER, str(rig.folder / "cluster.yaml")), seed=1)
        try:
            await gateway.start()
            async with aiohttp.ClientSession() as session:
                gate = RunningGateway(gateway, session)
                await until(lambda: "llm.a" in gateway.runtime.engines)
                page = await gate.metrics()
                assert "kvroute_discovery_failing 0\n" in page
                assert 'kvroute_discovery_findings{effect="left_out"} 1\n' in page
                fault = {"verbs": ["watch", "list"], "code": 503, "count": 1000}
                await rig.client.must("POST", "/_control/faults", fault)
                await rig.client.must("POST", "/_control/drop-watches", {})
                await until(lambda: len(fields_of(caplog, "discovery_failing")) == 2)
                assert "kvroute_discovery_failing 2\n" in await gate.metrics()
                assert "llm.a" in gateway.runtime.engines
                await rig.client.must("POST", "/_control/clear", {})
                await until(lambda: len(fields_of(caplog, "discovery_recovered")) == 2)
                assert "kvroute_discovery_failing 0\n" in await gate.metrics()
        finally:
            await gateway.close()

    play(scenario, tmp_path)
    assert sorted(line["reason"].partition(":")[0] for line in fields_of(caplog, "discovery_failing")) == [
        "nodes",
        "pods",
    ]


@pytest.mark.parametrize(
    ("section", "token", "what"),
    [
        (KubernetesEntry(kubeconfig="kubeconfig"), "admin", ""),
        (KubernetesEntry(namespace="*", kubeconfig="kubeconfig"), "admin", ""),
        (KubernetesEntry(namespace="lmm", kubeconfig="kubeconfig"), "admin", "there is no namespace 'lmm'; create it"),
        (KubernetesEntry(kubeconfig="kubeconfig"), "stranger", 'User "stranger" cannot list resource "pods"'),
        (KubernetesEntry(kubeconfig="kubeconfig"), "nobody", "refuses to list pods: 401: Unauthorized"),
        (KubernetesEntry(kubeconfig="missing"), "admin", "missing: "),
        (KubernetesEntry(kubeconfig="kubeconfig", context="other"), "admin", "other"),
    ],
)
def test_what_is_refused_at_the_start(tmp_path: Path, section: KubernetesEntry, token: str, what: str) -> None:
    """One sentence each; a usable section has none."""

    async def scenario(rig: Rig) -> None:
        kubeconfig(rig.folder, rig.server.url, {"token": token})
        try:
            await asyncio.to_thread(check_source, Discovery(kubernetes=section), rig.folder)
            said = ""
        except InputError as error:
            said = str(error)
        assert what in said
        assert bool(said) == bool(what)
        assert "\n" not in said

    play(scenario, tmp_path)


def test_a_server_that_does_not_answer_is_no_fault_at_the_start(tmp_path: Path) -> None:
    """The gateway starts without engines and goes on trying."""
    kubeconfig(tmp_path, "http://127.0.0.1:1")
    check_source(Discovery(kubernetes=KubernetesEntry(kubeconfig="kubeconfig")), tmp_path)
    check_source(Discovery(file="engines.yaml"), tmp_path)


def test_without_the_extra_one_sentence_says_so() -> None:
    """And the gateway itself loads no Kubernetes client."""
    script = """
import sys
import kvroute.cli.serve.command, kvroute.serve.assembly
from pathlib import Path
from kvroute.serve.discovery.sources import check_source, source_of
from kvroute.topology.schema import Discovery, KubernetesEntry
from kvroute.types import InputError
assert not [name for name in sys.modules if name.startswith(("lightkube", "kvroute.kube"))]
sys.modules["lightkube"] = None
for use in (source_of, check_source):
    try:
        use(Discovery(kubernetes=KubernetesEntry()), Path("."))
    except InputError as error:
        print(error)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    lines = out.splitlines()
    assert len(lines) == 2
    assert all("is not installed; pip install 'kvroute[kube]'" in line for line in lines)


def test_a_source_that_cannot_start_is_visible(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kubeconfig that has gone after the check is a log line and a metric."""

    async def scenario() -> None:
        gateway = Gateway(Deployment.of(CLUSTER, str(tmp_path / "cluster.yaml")), seed=1)
        try:
            await gateway.start()
            async with aiohttp.ClientSession() as session:
                await until(lambda: bool(fields_of(caplog, "discovery_failed")))
                assert "kvroute_discovery_failing 1\n" in await RunningGateway(gateway, session).metrics()
        finally:
            await gateway.close()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))
    assert all("--kubeconfig" in line["reason"] for line in fields_of(caplog, "discovery_failed"))


def test_the_section_survives_its_own_text() -> None:
    """Writing and reading the entry gives an equal one."""
    section = KubernetesEntry(namespace="llm", selector="a=b", levels=LevelsEntry(rack=["x/y"]), context="c")
    assert msgspec.convert(msgspec.to_builtins(section), KubernetesEntry) == section
