"""The source `discovery.kubernetes` with an InferencePool, against an API server: pods and the pool itself change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kube.client import MERGE
from tests.kube.inference_pool import DEFINITIONS, NAME, POOLS, install, pool_document
from tests.serve.discovery.kubernetes_rig import PODS, Rig, play
from tests.waiting import until

from kvroute.kube.api.client import Access
from kvroute.kube.discovery.engines import DiscoverySpec
from kvroute.kube.discovery.pool_discovery import PoolDiscovery
from kvroute.serve.discovery.kubernetes_pods import KubernetesPods
from kvroute.serve.discovery.sources import check_source
from kvroute.topology.schema import Discovery, KubernetesEntry
from kvroute.types import InputError, OwnPicker

SECTION = KubernetesEntry(pool="a", kubeconfig="kubeconfig")
REFERENCE = {"name": "epp", "port": {"number": 9002}}
SERVICES = "/api/v1/namespaces/llm/services"


async def pods(rig: Rig, *names: str) -> None:
    """Create pods whose label `app` is the first letter of their name, each with an address of its own."""
    for name in names:
        labels = {"kvroute.io/role": "decode", "app": name[0]}
        await rig.put(name, labels=labels, podIP=f"10.0.{ord(name[0])}.{name[1:]}")


async def change(rig: Rig, **spec: Any) -> None:
    """Change the pool's specification."""
    await rig.client.must("PATCH", f"{POOLS}/a", {"spec": spec}, MERGE)


@asynccontextmanager
async def followed(rig: Rig, own: OwnPicker | None = None) -> AsyncIterator[KubernetesPods]:
    """Follow the pool."""
    source = KubernetesPods(SECTION, rig.folder, own)
    async with running(rig, source):
        yield source


@asynccontextmanager
async def running(rig: Rig, source: KubernetesPods | PoolDiscovery) -> AsyncIterator[None]:
    """Run a source."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(source.run(rig.report))
        try:
            yield
        finally:
            task.cancel()


def urls(rig: Rig) -> list[str]:
    """Return the addresses of the last report."""
    return [engine.endpoint.url for engine in rig.reports[-1]] if rig.reports else []


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, str]]:
    """Return the fields of each log line of an event."""
    return [record.__dict__["fields"] for record in caplog.records if record.message == event]


def test_pods_of_the_pool_join_and_leave(tmp_path: Path) -> None:
    """Only those with its labels, on its port."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, (8100,)))
        await rig.client.must("POST", POOLS, pool_document("other", {"app": "y"}))
        await pods(rig, "x1", "y1")
        async with followed(rig):
            await until(lambda: rig.names == ["llm.x1"])
            await pods(rig, "x2", "y2")
            await until(lambda: rig.names == ["llm.x1", "llm.x2"])
            assert urls(rig) == ["http://10.0.120.1:8100", "http://10.0.120.2:8100"]
            await rig.client.must("DELETE", f"{PODS}/x1", {"gracePeriodSeconds": 0})
            await until(lambda: rig.names == ["llm.x2"])

    play(scenario, tmp_path)


def test_a_changed_pool_takes_effect_at_once_and_as_a_whole(tmp_path: Path) -> None:
    """The former pods serve on until the new ones have had time to join. No pod is reported with the ports of another
    selector, and no report is empty in between."""

    async def scenario(rig: Rig) -> None:
        options = DiscoverySpec("llm", handover_s=0.1)
        source = PoolDiscovery(Access(rig.folder / "kubeconfig"), options, "a")
        await install(rig.client)
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, (8000,)))
        await pods(rig, "x1", "y1")
        async with running(rig, source):
            await until(lambda: rig.names == ["llm.x1"])
            await change(rig, selector={"matchLabels": {"app": "y"}}, targetPorts=[{"number": 9000}])
            await until(lambda: rig.names == ["llm.y1"])
            await change(rig, targetPorts=[{"number": 9000}, {"number": 9001}])
            await until(lambda: rig.names == ["llm.y1_9000", "llm.y1_9001"])
            seen = [tuple(engine.endpoint.url for engine in report) for report in rig.reports]
            before, after = "http://10.0.120.1:8000", ("http://10.0.121.1:9000", "http://10.0.121.1:9001")
            assert seen[:4] == [(before,), (before, after[0]), after[:1], after]
            await pods(rig, "x2", "y2")
            await until(lambda: len(rig.names) == 4)
            assert {engine.name[:6] for engine in rig.reports[-1]} == {"llm.y1", "llm.y2"}

    play(scenario, tmp_path)


def test_a_pod_that_ends_during_the_handover_leaves_at_once(tmp_path: Path) -> None:
    """The former pods are followed until its end, and nothing of them is left if the pool goes."""

    async def scenario(rig: Rig) -> None:
        options = DiscoverySpec("llm", handover_s=3600.0)
        source = PoolDiscovery(Access(rig.folder / "kubeconfig"), options, "a")
        await install(rig.client)
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}))
        await pods(rig, "x1", "x2", "y1")
        async with running(rig, source):
            await until(lambda: rig.names == ["llm.x1", "llm.x2"])
            await change(rig, selector={"matchLabels": {"app": "y"}})
            await until(lambda: rig.names == ["llm.x1", "llm.x2", "llm.y1"])
            await rig.client.must("DELETE", f"{PODS}/x1", {"gracePeriodSeconds": 0})
            await until(lambda: rig.names == ["llm.x2", "llm.y1"])
            await rig.client.must("DELETE", f"{POOLS}/a", {})
            await until(lambda: rig.reports[-1] == ())

    play(scenario, tmp_path)


def test_what_does_not_concern_pods_lists_nothing_again(tmp_path: Path) -> None:
    """Such as a changed reference to the picker."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}))
        await pods(rig, "x1")
        async with followed(rig, OwnPicker(9002)) as source:
            await until(lambda: rig.names == ["llm.x1"])
            await rig.client.must("POST", "/_control/clear-audit", {})
            await change(rig, endpointPickerRef={"name": "epp", "port": {"number": 1}})
            await until(lambda: source.findings["warning"] == 1)
            audit = (await rig.client.must("GET", "/_control/audit"))["requests"]
            assert not [call for call in audit if call["verb"] == "list"]

    play(scenario, tmp_path)


def test_a_deleted_pool_has_no_engines_until_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One log line says so. The same holds for a pool that is there and cannot be used."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}))
        await pods(rig, "x1")
        async with followed(rig) as source:
            await until(lambda: rig.names == ["llm.x1"])
            await rig.client.must("DELETE", f"{POOLS}/a", {})
            await until(lambda: rig.reports[-1] == ())
            await until(lambda: source.findings["left out"] == 1)
            await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, appProtocol="kubernetes.io/h2c"))
            await until(lambda: len(fields_of(caplog, "discovery_finding")) == 2)
            assert rig.reports[-1] == ()
            await change(rig, appProtocol="http")
            await until(lambda: rig.names == ["llm.x1"])
            await until(lambda: source.findings["left out"] == 0)
            assert source.failures == ()

    play(scenario, tmp_path)
    reasons = [line["reason"] for line in fields_of(caplog, "discovery_finding")]
    assert reasons == [
        "InferencePool llm/a: metadata.name: it does not exist; create it",
        "InferencePool llm/a: spec.appProtocol: kvroute does not speak kubernetes.io/h2c with engines; "
        "use http, which is HTTP/1.1",
    ]


def test_a_pool_that_appears_later_is_followed_then(tmp_path: Path) -> None:
    """Also if its kind is not known at the start: the sentence says what to install."""

    async def scenario(rig: Rig) -> None:
        await pods(rig, "x1")
        async with followed(rig) as source:
            await until(lambda: bool(source.failures))
            [failure] = source.failures
            assert failure.startswith("inferencepools: the API server has no InferencePool of inference.networking")
            assert rig.reports == []
            await install(rig.client)
            await until(lambda: rig.reports == [()])
            assert source.failures == ()
            await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}))
            await until(lambda: rig.names == ["llm.x1"])

    play(scenario, tmp_path)


def test_an_outage_keeps_the_engines_of_the_last_pool(tmp_path: Path) -> None:
    """A change that is made meanwhile takes effect when the server is back."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}))
        await pods(rig, "x1", "y1")
        async with followed(rig) as source:
            await until(lambda: rig.names == ["llm.x1"])
            fault = {"verbs": ["watch", "list"], "code": 503, "count": 1000}
            await rig.client.must("POST", "/_control/faults", fault)
            await rig.client.must("POST", "/_control/drop-watches", {})
            await until(lambda: len(source.failures) == 3)
            await change(rig, selector={"matchLabels": {"app": "y"}})
            assert rig.names == ["llm.x1"]
            await rig.client.must("POST", "/_control/clear", {})
            await until(lambda: rig.names == ["llm.y1"])
            await until(lambda: source.failures == ())

    play(scenario, tmp_path)


def test_the_reference_to_the_picker_is_checked_as_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A Service that leads to another port is a warning; the engines serve nevertheless."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        document = {"metadata": {"name": "epp"}, "spec": {"ports": [{"port": 9002, "targetPort": 9003}]}}
        await rig.client.must("POST", SERVICES, document)
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, endpointPickerRef=REFERENCE))
        await pods(rig, "x1")
        async with followed(rig, OwnPicker(9002)) as source:
            await until(lambda: source.findings["warning"] == 1 and rig.names == ["llm.x1"])
            await change(rig, endpointPickerRef=REFERENCE | {"name": "none"})
            await until(lambda: len(fields_of(caplog, "discovery_finding")) == 2)
            await change(rig, endpointPickerRef=None)
            await until(lambda: source.findings["warning"] == 0)
        async with followed(rig) as source:
            await until(lambda: source.findings["warning"] == 0 and rig.names == ["llm.x1"])

    play(scenario, tmp_path)
    reasons = [line["reason"].partition(": ")[2] for line in fields_of(caplog, "discovery_finding")]
    assert reasons == [
        "spec.endpointPickerRef.port: port 9002 of the Service epp leads to port 9003, and this picker listens on "
        "9002; use --port 9003, or change its targetPort",
        "spec.endpointPickerRef.name: there is no Service 'none'; create it",
    ]


def test_what_is_refused_at_the_start(tmp_path: Path) -> None:
    """One sentence each: the kind, the right, the pool, what it selects; a usable pool has none."""

    async def said(rig: Rig) -> str:
        try:
            await asyncio.to_thread(check_source, Discovery(kubernetes=SECTION), rig.folder)
        except InputError as error:
            return str(error).partition(": ")[2]
        return ""

    async def scenario(rig: Rig) -> None:
        kind = "the API server has no InferencePool of inference.networking.k8s.io/v1; install the definitions of"
        assert (await said(rig)).startswith(kind)
        await install(rig.client)
        assert await said(rig) == "there is no InferencePool llm/a; create it, or give another one"
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, appProtocol="kubernetes.io/h2c"))
        assert (await said(rig)).startswith("spec.appProtocol: kvroute does not speak kubernetes.io/h2c")
        await change(rig, appProtocol="http")
        assert await said(rig) == ""
        await rig.client.must("DELETE", f"{DEFINITIONS}/{NAME}", {})
        assert (await said(rig)).startswith(kind)

    play(scenario, tmp_path)
