"""A change of the cluster by discovery: time until an engine serves, time in the thread, and stall of the event loop.

`python -m bench.gateway.discovery`. A gateway in this process follows a file that lists 500 or 5,000 engines on a
fifth as many nodes. One engine is replaced at a time. All engines are one process that answers health checks, at
addresses of their own on loopback. The core is also measured alone, with requests in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import uvloop
from bench.measurement import Failed, Row, show

from kvroute.control import ControlSpec
from kvroute.oracle import OracleSpec
from kvroute.serve.assembly import Deployment, Gateway
from kvroute.topology import parse
from kvroute.topology.reading.discovery import admitted
from kvroute.types import (
    Admitted,
    Arrived,
    ClusterChanged,
    Discovered,
    Endpoint,
    InstanceUp,
    Joined,
    KvStored,
    Place,
    PrefillFinished,
    Request,
    TransferFinished,
)

CLUSTER = """\
name: discovery
timing: {default: {prefill: {kind: linear, per_token: 100 us, base: 1 ms}, decode: {base: 12 ms, per_request: 10 us}}}
defaults: {model: llama-3-70b, kv_capacity: 60 GB}
discovery:
  file: engines.json
  node: {gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  rack: {uplinks: {count: 16, capacity: 100 Gbps}}
gateway:
  listen: {port: 0}
  admin: {port: 0}
  policy: foresight
  health: {interval: 60 s}
  scrape: {interval: 60 s}
"""
VISIBLE_S = 1.0
STALL_S = 0.05
PATIENCE_S = 300.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\nvllm:num_requests_running 0\n"


class Change(NamedTuple):
    """One replaced engine."""

    visible_s: float
    """From the new file until the engine takes requests."""
    stall_s: float
    """Longest time for which no other task ran meanwhile, beyond the timer's own millisecond."""


class Engines(asyncio.Protocol):
    """Answers each request as a healthy engine without load."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._transport.write(ANSWER * data.count(b"\r\n\r\n"))


def _engines(port: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Engines, "0.0.0.0", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


def entry(number: int, port: int, uid: int) -> dict[str, object]:
    """Return the entry of one engine; five share a node, and sixteen nodes a rack."""
    return {
        "name": f"engine{number:05}",
        "uid": str(uid),
        "role": "prefill" if number % 2 else "decode",
        "url": f"http://127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}:{port}",
        "bootstrap": "",
        "node": f"node{number // 5:04}",
        "rack": f"rack{number // 80:03}",
    }


async def changes(engines: int, port: int, count: int) -> list[Change]:
    """Run a gateway with so many engines and replace one of them so often."""
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        file = Path(folder, "engines.json")
        entries = [entry(number, port, 0) for number in range(engines)]
        _write(file, entries)
        gateway = Gateway(Deployment.of(CLUSTER, str(Path(folder, "cluster.yaml"))), seed=1)
        await gateway.start()
        try:
            await _until(lambda: sum(e.availability.up for e in gateway.runtime.engines.values()) == engines)
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 100)  # as in `kvroute serve`
            found = []
            for number in range(count):
                await asyncio.sleep(1.0)
                found.append(await _replace(gateway, file, entries, number * engines // count, port))
            return found
        finally:
            await gateway.close()


async def _replace(gateway: Gateway, file: Path, entries: list[dict[str, object]], which: int, port: int) -> Change:
    name, uid = str(entries[which]["name"]), str(int(str(entries[which]["uid"])) + 1)
    entries[which] = entry(which, port, int(uid))
    stall_s, over = 0.0, False

    async def tick() -> None:
        nonlocal stall_s
        last_s = time.perf_counter()
        while not over:
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            stall_s, last_s = max(stall_s, now_s - last_s - 0.001), now_s

    ticks = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    text = msgspec.json.encode(entries)
    begun_s = time.perf_counter()
    _write(file, text)

    def serves() -> bool:
        return gateway.runtime.uids.get(name) == uid and gateway.runtime.engines[name].availability.up

    await _until(serves)
    visible_s = time.perf_counter() - begun_s
    await asyncio.sleep(0.2)  # the old parts are freed meanwhile
    over = True
    await ticks
    return Change(visible_s, stall_s)


def _write(file: Path, content: object) -> None:
    beside = file.with_name("new")
    beside.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    os.replace(beside, file)


async def _until(condition: Any) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > limit:
            raise Failed(f"the engines did not come up within {PATIENCE_S:g} s")
        await asyncio.sleep(0.005)


def core(engines: int, requests: int, count: int) -> tuple[float, float]:
    """Return the median seconds that a core needs to prepare a change and to apply it, with requests in flight."""
    base = parse(CLUSTER.partition("gateway:")[0])
    spec = ControlSpec(decode="foresight", shadow="netkv", oracle=OracleSpec(self_measured=True))
    control = spec.build(base)
    found = [_discovered(entry(number, 8000, 0)) for number in range(engines)]
    joined = admitted(base, {}, found)[0]
    control.handle(ClusterChanged(0.0, joined))
    for engine in found:
        control.handle(InstanceUp(0.0, engine.name))
    for number in range(requests):
        at, blocks = 1.0 + number * 1e-4, tuple(range(number * 100, number * 100 + 40))
        request = Request(id=number, input_tokens=640, blocks=blocks, block_tokens=16, max_output_tokens=64)
        control.handle(Arrived(at, request))
        if number % 4 and control.in_progress(number):
            control.handle(PrefillFinished(at, number))
            control.handle(KvStored(at, joined[number % engines].engine.name, blocks, 16))
        if number % 4 > 1 and control.in_progress(number):
            control.handle(TransferFinished(at, number))
            control.handle(Admitted(at, number))
    gc.freeze()
    prepare_s, apply_s, spare = [], [], "engine00040x"
    for number in range(count):
        member = control.members.get(spare)
        new = _discovered(entry(40, 8001, number) | {"name": spare, "node": "spare"})
        change = (Joined(new, (0,)),), (spare,) if member is not None else ()
        start_s = time.perf_counter()
        following = control.prepare(*change)
        ready_s = time.perf_counter()
        before = control.parts  # freed elsewhere, as the gateway does
        control.expect(following)
        control.handle(ClusterChanged(2.0 + requests, *change))
        apply_s.append(time.perf_counter() - ready_s)
        prepare_s.append(ready_s - start_s)
        del before, following
    return median(prepare_s), median(apply_s)


def _discovered(fields: dict[str, object]) -> Discovered:
    return Discovered(
        name=str(fields["name"]),
        uid=str(fields["uid"]),
        role="prefill" if fields["role"] == "prefill" else "decode",
        endpoint=Endpoint(url=str(fields["url"])),
        place=Place(node=str(fields["node"]), rack=str(fields["rack"])),
    )


def rows_of(engines: int, port: int, count: int, requests: int) -> list[Row]:
    """Measure one size and return its rows."""
    prepare_s, apply_s = core(engines, requests, count)
    found = uvloop.run(changes(engines, port, count))
    size = f"{engines:,} engines"
    worst = max(change.visible_s for change in found)
    return [
        Row(
            measure=f"from a changed file until the engine serves, {size}",
            unit="s",
            better="lower",
            ours=round(median(change.visible_s for change in found), 3),
            target=VISIBLE_S,
            note=f"{count} replaced engines, longest {worst:.3f} s",
        ),
        Row(
            measure=f"longest stall of the event loop by a change, {size}",
            unit="s",
            better="lower",
            ours=round(max(change.stall_s for change in found), 4),
            target=STALL_S,
            note=f"median {median(change.stall_s for change in found):.4f} s",
        ),
        Row(
            measure=f"core: prepare a change in a thread, {size}",
            unit="s",
            better="lower",
            ours=round(prepare_s, 3),
            target=None,
            note="",
        ),
        Row(
            measure=f"core: apply it, {size}, {requests:,} requests in flight",
            unit="s",
            better="lower",
            ours=round(apply_s, 4),
            target=STALL_S,
            note="",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, nargs="+", default=[500, 5000])
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--requests", type=int, default=8000, help="in flight while the core is measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    logging.getLogger("kvroute").setLevel(logging.ERROR)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_engines, args=(there,), daemon=True)
    process.start()
    try:
        port = here.recv()
        rows = [row for engines in options.engines for row in rows_of(engines, port, options.changes, options.requests)]
    except Failed as error:
        print(f"gateway.discovery: {error}", file=sys.stderr)
        return 1
    finally:
        process.terminate()
        process.join()
    show(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
