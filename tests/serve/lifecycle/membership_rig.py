"""A gateway that discovers emulated or stub engines in a watched file."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tests.serve.rig import RunningGateway, with_section
from tests.waiting import until

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway

DISCOVERY = """
name: live
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
discovery:
  file: engines.yaml
  node: {gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  rack: {uplinks: {count: 4, capacity: 100 Gbps}}
  drain: 60 s
gateway:
  listen: {port: 0}
  admin: {port: 0}
  policy: foresight
  health: {interval: 200 ms}
  scrape: {interval: 200 ms}
"""
"""Cluster file of the gateway; its own instances are none."""


def fleet_text(prefill: int, decode: int) -> str:
    """Return the cluster file of emulated engines, four on each node."""
    names = [f"prefill{n}" for n in range(prefill)] + [f"decode{n}" for n in range(decode)]
    nodes = "\n".join(
        f"  - {{name: node{n}, rack: rack{n % 2}, gpus: 8, nics: {{compute: {{count: 8, capacity: 100 Gbps}}}}}}"
        for n in range(len(names) // 4 + 1)
    )
    instances = "\n".join(
        f'  - {{name: {name}, role: {name.rstrip("0123456789")}, gpus: "node{n // 4}:{n % 4 * 2}-{n % 4 * 2 + 1}"}}'
        for n, name in enumerate(names)
    )
    head, _, _ = DISCOVERY.partition("discovery:")
    racks = ", ".join(f"{{name: rack{n}, uplinks: {{count: 4, capacity: 100 Gbps}}}}" for n in (0, 1))
    return f"{head}racks: [{racks}]\nnodes:\n{nodes}\ninstances:\n{instances}\n"


@dataclass(slots=True)
class DiscoveryRig(RunningGateway):
    """A running gateway, the file that it follows, and the engines in it."""

    file: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """All engines that may be listed, by name."""

    def list(self, names: Iterable[str], **more: dict[str, Any]) -> None:
        """Replace the file by one that lists these engines. `more`: other fields of some of them."""
        write(self.file, [self.entries[name] | more.get(name, {}) for name in names])

    @property
    def members(self) -> set[str]:
        """Names of the engines of the cluster."""
        return set(self.gateway.runtime.engines)

    @property
    def up(self) -> set[str]:
        """Names of the engines that take requests."""
        return {name for name, engine in self.gateway.runtime.engines.items() if engine.availability.up}

    async def becomes_up(self, *names: str) -> None:
        """Wait until exactly these engines take requests."""
        await until(lambda: self.up == set(names))


def write(file: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Replace a file of engines atomically."""
    beside = file.with_name(file.name + ".new")
    beside.write_bytes(msgspec.yaml.encode(list(entries)))
    os.replace(beside, file)


@asynccontextmanager
async def discovering(
    folder: Path, entries: dict[str, dict[str, Any]], listed: Iterable[str], section: str = "", text: str = DISCOVERY
) -> AsyncIterator[DiscoveryRig]:
    """Run a gateway that follows `engines.yaml` in a folder, and wait until it is ready."""
    file = folder / "engines.yaml"
    write(file, [entries[name] for name in listed])
    gateway = Gateway(Deployment.of(with_section(section, text), str(folder / "cluster.yaml")), seed=1)
    try:
        await gateway.start()
        async with aiohttp.ClientSession() as session:
            rig = DiscoveryRig(gateway, session, file, entries)
            await rig.becomes_up(*listed)
            yield rig
    finally:
        await gateway.close()


@asynccontextmanager
async def emulated(
    folder: Path, prefill: int, decode: int, listed: Iterable[str], section: str = ""
) -> AsyncIterator[tuple[DiscoveryRig, EmulatedCluster]]:
    """Run emulated engines and a gateway that discovers some of them."""
    cluster = topology.parse(fleet_text(prefill, decode))
    async with EmulatedCluster(cluster, EmulatedClusterSpec()) as fleet:
        endpoints = fleet.ready().instances
        entries = {
            instance.name: {
                "name": instance.name,
                "uid": f"{instance.name}-1",
                "role": instance.role,
                "url": endpoints[instance.name].url,
                "protocol": endpoints[instance.name].protocol,
                "bootstrap": endpoints[instance.name].bootstrap,
                "kv_events": endpoints[instance.name].kv_events,
                "kv_replay": endpoints[instance.name].kv_replay,
                "node": instance.node,
                "rack": instance.rack,
            }
            for instance in cluster.instances
        }
        async with discovering(folder, entries, listed, section) as rig:
            yield rig, fleet
