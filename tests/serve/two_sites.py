"""A prefill-only datacenter and one with both roles, with slow Ethernet between them, small enough for a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
from tests.serve.rig import Rig, with_section
from tests.waiting import PATIENCE_S

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway

AWAY, HOME = "away-site", "home-site"
NODE = "gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}"
UPLINKS = "uplinks: {count: 8, capacity: 100 Gbps}"
TEXT = f"""
name: two-sites
datacenters: [{{name: {AWAY}}}, {{name: {HOME}}}]
racks:
  - {{name: rack0, datacenter: {AWAY}, {UPLINKS}}}
  - {{name: rack1, datacenter: {HOME}, {UPLINKS}}}
nodes:
  - {{name: node0, rack: rack0, {NODE}}}
  - {{name: node1, rack: rack1, {NODE}}}
wan: [{{from: {AWAY}, to: {HOME}, capacity: 40 Gbps, latency: 1 ms}}]
timing:
  fast: {{prefill: {{kind: linear, per_token: 2 us, base: 1 ms}}, decode: {{base: 2 ms, per_request: 10 us}}}}
  slow: {{prefill: {{kind: linear, per_token: 10 us, base: 1 ms}}, decode: {{base: 2 ms, per_request: 10 us}}}}
defaults: {{model: llama-3-70b, tp: 2, kv_capacity: 60 GB, timing: slow}}
instances:
  - {{name: far0, role: prefill, gpus: "node0:0-1", timing: fast}}
  - {{name: far1, role: prefill, gpus: "node0:2-3", timing: fast}}
  - {{name: prefill0, role: prefill, gpus: "node1:0-1"}}
  - {{name: decode0, role: decode, gpus: "node1:2-3"}}
  - {{name: decode1, role: decode, gpus: "node1:4-5"}}
  - {{name: decode2, role: decode, gpus: "node1:6-7"}}
gateway:
  listen: {{port: 0}}
  admin: {{port: 0}}
  policy: foresight
  measure: engine
"""
THRESHOLD = 1_000
LONG, SHORT = "A long prompt indeed. " * 500, "A short prompt. "
"""2,750 and 4 tokens."""
OFFLOAD = f"""  offload:
    threshold: {THRESHOLD} tokens
    check_interval: 20 ms
    short_term: {{enabled: false}}
    wan_path: {{failures: 2, open: 200 ms}}
"""
KV_TIMEOUT_S = 0.4


@asynccontextmanager
async def two_sites(
    section: str = OFFLOAD, text: str = TEXT, *, kv_scale: float = 1e-3, kv_timeout_s: float = KV_TIMEOUT_S
) -> AsyncIterator[Rig]:
    """Run engines of both sites, and a gateway with `section` in its settings."""
    settings = EmulatedClusterSpec(kv_patience_s=kv_timeout_s, kv_scale=kv_scale)
    async with EmulatedCluster(topology.parse(text), settings) as fleet:
        deployment = Deployment.of(with_section(section, text), "two.yaml", endpoints=fleet.ready().instances)
        gateway = Gateway(deployment, seed=1)
        try:
            await gateway.start()
            async with aiohttp.ClientSession() as session:
                yield Rig(gateway, session, fleet)
        finally:
            await gateway.close()


async def wait_for_metric(gate: Rig, name: str, value: float, **labels: str) -> None:
    """Wait until a metric has this value."""
    await _until(gate, name, lambda now: now == value, labels)


async def wait_for_counter(gate: Rig, name: str, least: float, **labels: str) -> None:
    """Wait until a counter has at least this value."""
    await _until(gate, name, lambda now: now is not None and now >= least, labels)


async def _until(gate: Rig, name: str, condition: Callable[[float | None], bool], labels: dict[str, str]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        if condition(await metric(gate, name, **labels)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} {labels} is {await metric(gate, name, **labels)}")


async def metric(gate: Rig, name: str, **labels: str) -> float | None:
    """Return one sample of the gateway's metrics page."""
    pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
    prefix = f"{name}{{{pairs}}} " if pairs else f"{name} "
    for line in (await gate.get("/metrics")).body.decode().splitlines():
        if line.startswith(prefix):
            return float(line.removeprefix(prefix))
    return None
