"""kvroute's discovery as a process: prints when it is synced and each change that it reports, as lines of JSON."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from kvroute.kube.api.client import Access
from kvroute.kube.discovery.engines import DiscoverySpec, KubernetesDiscovery
from kvroute.types import Discovered


def tell(**fields: object) -> None:
    """Print one line of JSON."""
    print(json.dumps(fields), flush=True)


def rss_mb() -> float:
    """Return the present memory of this process, in MB (1e6 bytes)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


async def follow(url: str, pods: int, folder: Path) -> None:
    """Run discovery; answer `cpu` on standard input with the CPU time, until its end."""
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "current-context": "bench",
                "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench", "namespace": "llm"}}],
                "clusters": [{"name": "bench", "cluster": {"server": url}}],
                "users": [{"name": "bench", "user": {"token": "admin"}}],
            }
        )
    )
    before_mb, cpu_s, begun_s = rss_mb(), time.process_time(), time.time()
    known: dict[str, Discovered] = {}

    def report(engines: tuple[Discovered, ...]) -> None:
        now_s, first = time.time(), not known
        changed = [engine.name for engine in engines if known.get(engine.name) is not engine]
        known.clear()
        known.update((engine.name, engine) for engine in engines)
        if first and len(engines) == pods:
            spent_s = time.process_time() - cpu_s
            tell(synced_s=now_s - begun_s, cpu_s=spent_s, rss_mb=rss_mb(), imported_mb=before_mb)
        elif not first:
            for name in changed:
                tell(pod=name.removeprefix("llm."), at_s=now_s)

    running = asyncio.create_task(KubernetesDiscovery(Access(config), DiscoverySpec()).run(report))
    while await asyncio.to_thread(sys.stdin.readline):
        tell(cpu_s=time.process_time(), rss_mb=rss_mb())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kvroute-") as name:
        asyncio.run(follow(sys.argv[1], int(sys.argv[2]), Path(name)))
