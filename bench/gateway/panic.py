"""Rejected requests when all health checks of all engines fail at once for 10 s while the engines work.

`python -m bench.gateway.panic`. Emulated engines and the gateway run in one event loop; three engines of each role.
Requests arrive at a fixed rate from 3 s before the checks fail until 10 s after they pass again. The same load is
played again without the panic threshold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass

import aiohttp
import uvloop
from bench.measurement import Row, show

from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway
from kvroute.topology import parse

CLUSTER = """
name: panic
racks: [{name: rack0}]
nodes: [{name: node0, rack: rack0, gpus: 12, nics: {compute: {count: 8, capacity: 100 Gbps}}}]
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-1"}
  - {name: prefill1, role: prefill, gpus: "node0:2-3"}
  - {name: prefill2, role: prefill, gpus: "node0:4-5"}
  - {name: decode0, role: decode, gpus: "node0:6-7"}
  - {name: decode1, role: decode, gpus: "node0:8-9"}
  - {name: decode2, role: decode, gpus: "node0:10-11"}
gateway:
  listen: {port: 0}
  admin: {port: 0}
  policy: foresight
  health: {interval: 500 ms, timeout: 1 s, failures: 2, panic: PANIC}
"""
BEFORE_S, AFTER_S = 3.0, 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of the clients, and the gateway's counters."""

    statuses: Counter[int]
    panics: int
    """Number of panic periods."""
    in_panic_after: int
    """Number of roles in panic at the end."""


async def _send(session: aiohttp.ClientSession, url: str, number: int, statuses: Counter[int]) -> None:
    body = {
        "model": "llama-3-70b",
        "prompt": f"{number} What goes up must come down.",
        "max_tokens": 8,
        "ignore_eos": True,
    }
    async with session.post(url, json=body) as response:
        await response.read()
        statuses[response.status] += 1


async def _checks(session: aiohttp.ClientSession, fleet: EmulatedCluster, share: int) -> None:
    for instance in fleet.ready().instances.values():
        fault = {"leg": "health", "share": share, "status": 503}
        async with session.post(f"{instance.url}/emulator/fault", json=fault) as response:
            response.raise_for_status()


async def play(panic: float, fail_s: float, rate_per_s: float) -> Seen:
    """Run the load once."""
    text, statuses = CLUSTER.replace("PANIC", str(panic)), Counter[int]()
    async with EmulatedCluster(parse(text), EmulatedClusterSpec()) as fleet:
        gateway = Gateway(Deployment.of(text, "panic.yaml", endpoints=fleet.ready().instances), seed=1)
        await gateway.start()
        try:
            async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
                while gateway.ready():
                    await asyncio.sleep(0.05)
                url = f"http://127.0.0.1:{gateway.port}/v1/completions"
                started, orders = time.monotonic(), [(BEFORE_S, 1), (BEFORE_S + fail_s, 0)]
                for number in range(int((BEFORE_S + fail_s + AFTER_S) * rate_per_s)):
                    await asyncio.sleep(max(0.0, started + number / rate_per_s - time.monotonic()))
                    if orders and time.monotonic() - started >= orders[0][0]:
                        await _checks(session, fleet, orders.pop(0)[1])
                    group.create_task(_send(session, url, number, statuses))
            page = "".join(gateway.metrics.page("")[1]).splitlines()
        finally:
            await gateway.close()
    return Seen(statuses, _sum(page, "kvroute_panics_total{"), _sum(page, "kvroute_panic{"))


def _sum(page: list[str], start: str) -> int:
    return sum(int(line.rsplit(" ", 1)[1]) for line in page if line.startswith(start))


def main() -> None:
    """Play both, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--fail-s", type=float, default=10.0, help="the checks fail for so long")
    parser.add_argument("--rate-per-s", type=float, default=40.0)
    given = parser.parse_args()
    ours, without = (uvloop.run(play(panic, given.fail_s, given.rate_per_s)) for panic in (0.5, 0.0))
    total, failed = ours.statuses.total(), without.statuses.total() - without.statuses[200]
    note = f"without the threshold {failed} of {total}; panics that began: {ours.panics}"

    def row(measure: str, value: float) -> Row:
        return Row(measure=measure, unit="", better="lower", ours=value, target=0, note=note)

    rows = [
        row(
            f"requests refused while all health checks fail for {given.fail_s:g} s, of {total}",
            total - ours.statuses[200],
        ),
        row("roles in a panic 10 s after the checks pass again", ours.in_panic_after),
    ]
    show(rows, given.json, {"statuses": json.dumps(ours.statuses), "without": json.dumps(without.statuses)})


if __name__ == "__main__":
    main()
