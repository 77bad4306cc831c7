"""Discovery over a server's pods and nodes: what is reported, when, and what is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.kube.kubeconfigs import kubeconfig
from tests.kube.manifests import node_document, pod_document
from tests.kube.scripted_api import ScriptedApi, answer, status
from tests.waiting import HANGS_S, until

from kvroute.kube.api.client import Access
from kvroute.kube.api.informer import Timing
from kvroute.kube.discovery.engines import DiscoverySpec, KubernetesDiscovery
from kvroute.kube.discovery.pods import PodFinding
from kvroute.types.discovered import Discovered

FAST = Timing(watch_s=2.0, silence_s=1.0, retry_first_s=0.01, retry_max_s=0.05, short_watch_s=0.0)
OPTIONS = DiscoverySpec(coalesce_s=0.02, timing=FAST)


@dataclass
class Rig:
    """A server, discovery, and what it has reported."""

    api: ScriptedApi
    discovery: KubernetesDiscovery
    reports: list[tuple[Discovered, ...]] = field(default_factory=list)
    findings: list[tuple[PodFinding, ...]] = field(default_factory=list)

    def report(self, engines: tuple[Discovered, ...]) -> None:
        """Take a report."""
        self.reports.append(engines)

    @property
    def now(self) -> dict[str, Discovered]:
        """The last report, by name."""
        return {engine.name: engine for engine in self.reports[-1]} if self.reports else {}


@asynccontextmanager
async def running(folder: Path, options: DiscoverySpec, refused: bytes | None) -> AsyncIterator[Rig]:
    """Run discovery against a server with two pods on two nodes.

    Args:
        refused: answer to the first requests for nodes.
    """
    api = ScriptedApi()
    await api.start()
    if refused is not None:
        api.refusals["nodes"] = refused
    for number, role in enumerate(("prefill", "decode")):
        await api.put("nodes", node_document(f"node-{number}", {"nvidia.com/rack": f"r{number}"}))
        labels = {"kvroute.io/role": role, "app": "vllm"}
        await api.put("pods", pod_document(role, labels=labels, node=f"node-{number}", podIP=f"10.0.0.{number}"))
    findings: list[tuple[PodFinding, ...]] = []
    discovery = KubernetesDiscovery(Access(kubeconfig(folder, api.url)), options, findings.append)
    rig = Rig(api, discovery, findings=findings)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(discovery.run(rig.report))
        try:
            yield rig
        finally:
            task.cancel()
    if api.listening:
        await api.stop()


def play(
    scenario: Callable[[Rig], Awaitable[None]],
    folder: Path,
    options: DiscoverySpec = OPTIONS,
    refused: bytes | None = None,
) -> None:
    """Run a scenario, within a limit."""

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S), running(folder, options, refused) as rig:
            await scenario(rig)

    asyncio.run(bounded())


def test_engines_come_and_go(tmp_path: Path) -> None:
    """Not ready, ready, terminating, gone; with the place of the node."""

    async def scenario(rig: Rig) -> None:
        await until(lambda: len(rig.now) == 2)
        assert len(rig.reports) == 1
        assert rig.now["llm.decode"].place.rack == "r1"
        await rig.api.put("pods", pod_document("new", node="node-1", podIP="10.0.0.9", ready=False))
        await until(lambda: "llm.new" in rig.now)
        assert not rig.now["llm.new"].ready
        await rig.api.put("pods", pod_document("new", node="node-1", podIP="10.0.0.9"))
        await until(lambda: rig.now["llm.new"].ready)
        await rig.api.put("pods", pod_document("new", node="node-1", podIP="10.0.0.9", deleted=True))
        await until(lambda: not rig.now["llm.new"].ready)
        await rig.api.delete("pods", "new")
        await until(lambda: "llm.new" not in rig.now)
        assert rig.discovery.failures == ()

    play(scenario, tmp_path)


def test_labels_of_nodes_are_followed(tmp_path: Path) -> None:
    """Only engines on that node change; a heartbeat of a node reports nothing."""

    async def scenario(rig: Rig) -> None:
        await until(lambda: len(rig.now) == 2)
        before = rig.now
        await rig.api.put("nodes", node_document("node-1", {"nvidia.com/rack": "r1", "other": "label"}))
        await rig.api.put("nodes", node_document("node-1", {"nvidia.com/rack": "r7"}))
        await until(lambda: rig.now["llm.decode"].place.rack == "r7")
        assert rig.now["llm.prefill"] == before["llm.prefill"]
        assert len(rig.reports) == 2

    play(scenario, tmp_path)


def test_without_the_right_to_list_nodes(tmp_path: Path) -> None:
    """Engines are reported without a rack, and with it as soon as nodes may be listed."""
    refused = answer(403, json.dumps(status(403, "Forbidden", "nodes is forbidden")).encode())

    async def scenario(rig: Rig) -> None:
        await until(lambda: len(rig.now) == 2)
        assert rig.now["llm.decode"].place.rack == ""
        assert any("403: nodes is forbidden" in failure for failure in rig.discovery.failures)
        assert rig.findings == [()]
        rig.api.refusals.clear()
        await until(lambda: rig.now["llm.decode"].place.rack == "r1")

    play(scenario, tmp_path, refused=refused)


def test_an_outage_reports_nothing(tmp_path: Path) -> None:
    """What has happened meanwhile is one report after it."""

    async def scenario(rig: Rig) -> None:
        await until(lambda: len(rig.now) == 2)
        await rig.api.stop()
        await until(lambda: len(rig.discovery.failures) == 2)
        assert len(rig.reports) == 1
        await rig.api.delete("pods", "prefill")
        await rig.api.put("pods", pod_document("other", podIP="10.0.0.8"))
        await rig.api.start()
        await until(lambda: sorted(rig.now) == ["llm.decode", "llm.other"])
        assert len(rig.reports) == 2
        await until(lambda: rig.discovery.failures == ())

    play(scenario, tmp_path)


def test_churn_ends_with_the_servers_pods(tmp_path: Path) -> None:
    """With watches that are dropped and versions that expire; an address that is used again belongs to the new pod."""

    async def scenario(rig: Rig) -> None:
        await until(lambda: len(rig.now) == 2)
        for number in range(40):
            name, ip = f"p{number % 7}", f"10.0.1.{number % 5}"
            if name in rig.api.objects["pods"]:
                await rig.api.delete("pods", name)
            else:
                await rig.api.put("pods", pod_document(name, podIP=ip, uid=f"u{number}"))
            if number % 10 == 4:
                await rig.api.drop_watches()
            if number % 10 == 9:
                await rig.api.expire()
        left = {pod["metadata"]["uid"] for pod in rig.api.objects["pods"].values()}
        await rig.api.put("pods", pod_document("last", podIP="10.0.2.1"))
        await until(lambda: "llm.last" in rig.now)
        uids = {engine.uid.rpartition("-")[0] for engine in rig.now.values()}
        assert uids <= left | {"uid-last"}
        urls = [engine.endpoint.url for engine in rig.now.values()]
        assert len(urls) == len(set(urls))

    play(scenario, tmp_path)


def test_findings_are_reported_when_they_change(tmp_path: Path) -> None:
    """A selected pod without a role, until it has one."""

    async def scenario(rig: Rig) -> None:
        await until(lambda: len(rig.now) == 2)
        assert rig.findings == [()]
        await rig.api.put("pods", pod_document("plain", labels={}, podIP="10.0.0.7"))
        await until(lambda: len(rig.findings) == 2)
        assert [finding.field for finding in rig.findings[-1]] == ["kvroute.io/role"]
        await rig.api.put("pods", pod_document("plain", podIP="10.0.0.7", node="node-0"))
        await until(lambda: "llm.plain" in rig.now)
        await until(lambda: rig.findings[-1] == ())
        assert "labelSelector=app" in rig.api.requests[0] + rig.api.requests[1]

    play(scenario, tmp_path, replace(OPTIONS, selector="app"))
