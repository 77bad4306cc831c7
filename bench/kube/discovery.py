"""Discovery of 5,000 pods on 1,000 nodes: time to sync, CPU, memory, and time until a change is visible.

`python -m bench.kube.discovery`. The API server is that of the tests, as a process. The peer is the informer of the
official Kubernetes client, which keeps the objects and makes no engines of them. Both follow the same server in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.measurement import ROOT, Failed, Row, show
from bench.peers.environment import programs
from tests.kube.client import MERGE, ApiClient

PODS, NODES = "/api/v1/namespaces/llm/pods", "/api/v1/nodes"
PATIENCE_S = 300.0
AT_ONCE = 16
VISIBLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one process needed."""

    synced_s: float
    cpu_s: float
    """To sync, without the imports."""
    kept_mb: float
    """Memory after the sync beyond that after the imports."""
    visible_s: tuple[float, ...]
    change_cpu_s: float
    """CPU time per change, under a steady rate of changes."""


def node(number: int) -> dict[str, Any]:
    """Return a node in one of 63 racks, with the labels of a cloud."""
    labels = {f"feature.node.example.com/{name}": "true" for name in ("avx512", "gpu", "rdma", "nvme", "ib", "numa")}
    labels |= {"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/rack": f"r{number // 16:02}"}
    return {"metadata": {"name": f"node-{number:04}", "labels": labels}}


def pod(number: int, nodes: int) -> dict[str, Any]:
    """Return a vLLM pod with what manifests usually have: variables, probes, resources, volumes."""
    transfer = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 10}
    container = {
        "name": "engine",
        "image": "vllm/vllm-openai:v0.11.0",
        "args": ["--model", "meta-llama/Llama-3.1-8B", "--port", "8000", "--kv-transfer-config", transfer],
        "env": [{"name": f"SETTING_{index}", "value": f"value-{index}"} for index in range(20)],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": probe,
        "livenessProbe": probe,
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "80Gi"}, "requests": {"cpu": "8"}},
        "volumeMounts": [{"name": "models", "mountPath": "/models"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "models", "hostPath": {"path": "/models"}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    labels = {"app": "vllm", "kvroute.io/role": "prefill" if number % 2 else "decode", "pod-template-hash": "6d4cf56db"}
    annotations = {"prometheus.io/scrape": "true", "checksum/config": "0123456789abcdef" * 4}
    metadata = {"name": f"engine-{number:05}", "labels": labels, "annotations": annotations}
    spec = {"nodeName": f"node-{number % nodes:04}", "containers": [container], "volumes": volumes}
    return {"metadata": metadata, "spec": spec}


def status(number: int, ready: bool) -> dict[str, Any]:
    """Return the status of a running pod."""
    address = f"10.{number // 62_500}.{number // 250 % 250}.{1 + number % 250}"
    kinds = {"Initialized": True, "PodScheduled": True, "ContainersReady": ready, "Ready": ready}
    conditions = [{"type": kind, "status": "True" if holds else "False"} for kind, holds in kinds.items()]
    return {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}}


@asynccontextmanager
async def served(pods: int, nodes: int) -> AsyncIterator[ApiClient]:
    """Run the API server with these objects."""
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        ready = Path(folder, "ready.json")
        command = [sys.executable, "-m", "tests.kube.apiserver", "--ready", str(ready)]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not ready.exists():
                    await asyncio.sleep(0.05)
            async with ApiClient(json.loads(ready.read_text())["url"]) as client:
                await _fill(client, pods, nodes)
                yield client
        finally:
            process.terminate()
            await process.wait()


async def _fill(client: ApiClient, pods: int, nodes: int) -> None:
    await client.must("POST", "/api/v1/namespaces", {"metadata": {"name": "llm"}})
    await client.must("POST", "/api/v1/namespaces/llm/serviceaccounts", {"metadata": {"name": "default"}})
    limit = asyncio.Semaphore(AT_ONCE)

    async def make_node(number: int) -> None:
        async with limit:
            await client.must("POST", NODES, node(number))

    async def make_pod(number: int) -> None:
        async with limit:
            await client.must("POST", PODS, pod(number, nodes))
            await set_ready(client, number, True)

    await asyncio.gather(*map(make_node, range(nodes)))
    await asyncio.gather(*map(make_pod, range(pods)))


async def set_ready(client: ApiClient, number: int, ready: bool) -> None:
    """Change whether a pod is ready."""
    await client.must("PATCH", f"{PODS}/engine-{number:05}/status", status(number, ready), MERGE)


class Follower:
    """One process that follows the server, and its lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.seen_s: dict[str, float] = {}
        """Time of the last change of each pod that it has reported."""
        self.reported: list[str] = []
        """Pod of each change that it has reported."""

    async def line(self) -> dict[str, Any]:
        """Return the next line that is no change of a pod."""
        assert self._process.stdout is not None
        while True:
            text = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
            if not text:
                raise Failed(f"a follower ended with {await self._process.wait()}")
            found: dict[str, Any] = json.loads(text)
            if "pod" not in found:
                return found
            self.seen_s[found["pod"]] = found["at_s"]
            self.reported.append(found["pod"])

    async def seen(self, count: int) -> int:
        """Return how many changes it has reported since the last call: `count`, or fewer if none comes for a second."""
        before = -1
        while len(self.reported) < count and len(self.reported) != before:
            before = len(self.reported)
            await asyncio.sleep(1.0)
            await self.cpu_s()
        found, self.reported = len(self.reported), []
        return max(found, 1)

    async def cpu_s(self) -> float:
        """Return its CPU time until now."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"cpu\n")
        await self._process.stdin.drain()
        return float((await self.line())["cpu_s"])


async def measured(client: ApiClient, command: list[str], pods: int, changes: int, rate_per_s: float) -> Figures:
    """Run one process from cold and return its figures."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        follower = Follower(process)
        synced = await follower.line()
        visible_s = [await _change(client, follower, number * (pods // changes)) for number in range(changes)]
        count = int(rate_per_s * 10)
        await follower.seen(changes)
        before_s = await follower.cpu_s()
        for number in range(count):
            begun_s = time.monotonic()
            await set_ready(client, number % pods, number // pods % 2 == 1)
            await asyncio.sleep(max(0.0, 1.0 / rate_per_s - (time.monotonic() - begun_s)))
        seen = await follower.seen(count)
        spent_s = await follower.cpu_s() - before_s
        await asyncio.gather(*(set_ready(client, number, True) for number in range(min(count, pods))))
        return Figures(
            synced["synced_s"],
            synced["cpu_s"],
            synced["rss_mb"] - synced["imported_mb"],
            tuple(visible_s),
            spent_s / seen,
        )
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _change(client: ApiClient, follower: Follower, number: int) -> float:
    """Return the time from the request for a change until the follower has reported it."""
    name = f"engine-{number:05}"
    follower.seen_s.pop(name, None)
    begun_s = time.time()
    await set_ready(client, number, False)
    while name not in follower.seen_s:
        await asyncio.sleep(0.05)
        await follower.cpu_s()
    seen_s = follower.seen_s[name] - begun_s
    await set_ready(client, number, True)
    return seen_s


async def run(pods: int, nodes: int, changes: int, rounds: int, rate_per_s: float, *, with_peer: bool) -> list[Row]:
    """Measure both sides in turn and return the rows."""
    ours_command = [sys.executable, "-m", "bench.kube.follower"]
    peer_command, missing = None, ""
    try:
        if not with_peer:
            raise Failed("--no-peer")
        peer_command = [str(programs("kubernetes") / "python"), "bench/peers/kubernetes_informer.py"]
    except Failed as error:
        missing = str(error)
    ours: list[Figures] = []
    peer: list[Figures] = []
    async with served(pods, nodes) as client:
        for _ in range(rounds):
            for command, figures in ((ours_command, ours), (peer_command, peer)):
                if command is not None:
                    whole = [*command, client.url, str(pods), str(nodes)]
                    figures.append(await measured(client, whole, pods, changes, rate_per_s))
    return _rows(ours, peer, f"{pods:,} pods on {nodes:,} nodes", missing)


def _rows(ours: list[Figures], peer: list[Figures], size: str, missing: str) -> list[Row]:
    name = "official client's informer" if peer else missing

    def row(measure: str, unit: str, field: str, scale: float = 1.0, target: float | None = None) -> Row:
        def middle(figures: list[Figures]) -> float | None:
            values = [getattr(figure, field) for figure in figures]
            return round(scale * median(values), 3) if values else None

        return Row(
            measure=f"{measure}, {size}",
            unit=unit,
            better="lower",
            ours=middle(ours),
            peer=middle(peer),
            peer_name=name,
            target=target,
            note=f"medians of {len(ours)} rounds; the API server is the tests' one",
        )

    visible = [second for trial in ours for second in trial.visible_s]
    others = [second for trial in peer for second in trial.visible_s]
    return [
        row("from cold until all is known", "s", "synced_s"),
        row("CPU time of this", "s", "cpu_s"),
        row("memory for all objects", "MB", "kept_mb"),
        row("CPU time per changed pod", "ms", "change_cpu_s", 1e3),
        Row(
            measure=f"from a change until it is visible, {size}",
            unit="s",
            better="lower",
            ours=round(median(visible), 4),
            peer=round(median(others), 4) if others else None,
            peer_name=name,
            target=VISIBLE_S,
            note=f"longest {max(visible):.3f} s; kvroute waits 0.1 s for further changes",
        ),
    ]


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=5_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--changes", type=int, default=20, help="pods that are changed one by one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20.0, help="changes per second for the CPU time per change")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sizes = given.pods, given.nodes, given.changes, given.rounds, given.rate
    show(asyncio.run(run(*sizes, with_peer=not given.no_peer)), given.json)


if __name__ == "__main__":
    main()
