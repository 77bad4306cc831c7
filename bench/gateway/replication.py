"""Cost and use of shared state between gateways: `python -m bench.gateway.replication [--json]`.

Emulated engines (6 prefill, 10 decode) get the same open-loop load three times: through one gateway, through four that
share a Redis stream, and through four that share nothing. Figures: mean TTFT, CPU time of all gateways per request, and
Redis' bytes and CPU time per request. Four processes take more of the machine than one; with long prompts and a low
rate, TTFT shows the choices alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from bench.gateway.clusters import reached, tree, write
from bench.gateway.mock_worker import MODEL
from bench.gateway.program import Program, free_ports
from bench.gateway.program import served as addresses
from bench.gateway.scale import KVROUTE
from bench.measurement import Failed, Row, show

from kvroute.topology import TimingEntry
from kvroute.topology.schema import DecodeEntry, EndpointEntry, InstanceEntry, LinearPrefillEntry
from kvroute_engine.files.units import Duration

PREFILL, DECODE = 6, 10
OUTPUT_TOKENS, TOKEN_CHARS = 8, 4
TIMING = TimingEntry(
    prefill=LinearPrefillEntry(per_token_s=Duration(90e-6), base_s=Duration(10e-3)),
    decode=DecodeEntry(base_s=Duration(10e-3), per_request_s=Duration(1e-3)),
)
"""A prompt of 1,000 tokens takes 0.1 s of prefill."""


@dataclass(frozen=True)
class Load:
    """Requests at equal distances."""

    rate_per_s: float = 40.0
    seconds: float = 30.0
    prompt_tokens: int = 1_000


@dataclass(frozen=True, slots=True)
class Engines:
    """Running engines, and where files of gateways go."""

    program: Program
    endpoints: Mapping[str, Mapping[str, Any]]
    folder: Path

    def file(self, gateway: Mapping[str, Any]) -> Path:
        """Write a cluster file of these engines with a `gateway` section."""

        def endpoint(instance: InstanceEntry) -> EndpointEntry:
            return EndpointEntry(url=self.endpoints[instance.name]["url"])

        cluster = msgspec.structs.replace(tree(PREFILL, DECODE), timing={"default": TIMING})
        return write(reached(cluster, endpoint, gateway), Path(tempfile.mkdtemp(dir=self.folder)))


@contextlib.contextmanager
def engines(folder: Path) -> Any:
    """Run the engines in one process."""
    file = write(msgspec.structs.replace(tree(PREFILL, DECODE), timing={"default": TIMING}), folder)
    with Program([KVROUTE, "emulate", str(file), "--kv-scale", "1e-5", "--no-kv-events"], name="engines") as program:
        yield Engines(program, program.document()["instances"], folder)


@dataclass(frozen=True, slots=True)
class Served:
    """A running gateway."""

    program: Program
    url: str
    admin: str


@contextlib.asynccontextmanager
async def gateways(running: Engines, count: int, section: Mapping[str, Any]) -> AsyncIterator[list[Served]]:
    """Run gateways with this section in front of the engines."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            ports = {"listen": {"port": 0}, "admin": {"port": 0}}
            file = running.file({**ports, "prefix": "approximate", "policy": "foresight", **section})
            ready = file.with_suffix(".ready")
            program = stack.enter_context(Program([KVROUTE, "serve", str(file), "--ready-file", str(ready)]))
            found.append((program, ready))
        served = [(program, await addresses(ready, program)) for program, ready in found]
        yield [Served(program, where["url"].removesuffix("/v1"), where["admin"]) for program, where in served]


@contextlib.contextmanager
def redis(folder: Path, port: int) -> Any:
    """Run a Redis server on this port, which keeps nothing on disk. Raises Failed if there is none."""
    program = shutil.which("redis-server")
    if program is None:
        raise Failed("there is no redis-server")
    options = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
    with Program([program, *options], name="redis") as server:
        server.listens(port)
        yield server


async def gauge(session: aiohttp.ClientSession, gateway: Served, name: str) -> float:
    """Sum of the samples of one metric of a gateway."""
    async with session.get(f"{gateway.admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


async def in_sync(session: aiohttp.ClientSession, found: Sequence[Served], others: int | None = None) -> bool:
    """Whether each gateway is in sync with this number of others, by default all."""
    wanted = len(found) - 1 if others is None else others
    for gateway in found:
        if await gauge(session, gateway, "kvroute_replication_gateways") != wanted:
            return False
        if not await gauge(session, gateway, 'kvroute_replication_state{state="in_sync"}'):
            return False
    return True


def body(number: int, prompt_tokens: int = Load.prompt_tokens) -> dict[str, Any]:
    """The request of this number; no two have equal prompts."""
    prompt = f"{number:08} " + "what is a KV cache? " * (TOKEN_CHARS * prompt_tokens // 20)
    return {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}


async def ttft_s(session: aiohttp.ClientSession, url: str, number: int, prompt_tokens: int) -> float:
    """Send one request; return the time to its first token."""
    started = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body(number, prompt_tokens)) as response:
        if response.status != 200:
            raise Failed(f"status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data:"):
                first_s = time.perf_counter() - started
                break
        await response.read()
    return first_s


async def apply(load: Load, session: aiohttp.ClientSession, urls: Sequence[str]) -> list[float]:
    """Send the requests to gateways drawn at random; return their times to the first token."""
    tasks, started = [], time.perf_counter()
    for number in range(int(load.rate_per_s * load.seconds)):
        await asyncio.sleep(max(started + number / load.rate_per_s - time.perf_counter(), 0.0))
        # A draw and not a turn: gateways in turn would leave each other's choices a fixed time.
        url = urls[hash((number * 2_654_435_761) % 4_294_967_296) // 7 % len(urls)]
        tasks.append(asyncio.create_task(ttft_s(session, url, number, load.prompt_tokens)))
    return list(await asyncio.gather(*tasks))


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one load."""

    ttft_s: float
    cpu_us: float
    """CPU time of all gateways per request."""
    redis_cpu_us: float = 0.0
    redis_bytes: float = 0.0
    entries: float = 0.0


async def observed(
    running: Engines, load: Load, count: int, section: Mapping[str, Any], server: Program | None
) -> Figures:
    """Run gateways and the load."""
    async with gateways(running, count, section) as found, aiohttp.ClientSession() as session:
        urls = [gateway.url for gateway in found]
        limit = time.monotonic() + 60.0
        while server is not None and not await in_sync(session, found):
            if time.monotonic() > limit:
                raise Failed("the gateways are not in sync after a minute")
            await asyncio.sleep(0.2)
        await apply(dataclasses.replace(load, seconds=2.0), session, urls)
        before_s = sum(gateway.program.cpu_s() for gateway in found)
        redis_s = server.cpu_s() if server is not None else 0.0
        names = ("kvroute_replication_bytes_total", 'kvroute_replication_entries_total{direction="written"}')
        counted = [sum([await gauge(session, gateway, name) for gateway in found]) for name in names]
        times_s = await apply(load, session, urls)
        counted = [
            sum([await gauge(session, gateway, name) for gateway in found]) - before
            for name, before in zip(names, counted, strict=True)
        ]
        requests = len(times_s)
        return Figures(
            ttft_s=statistics.mean(times_s),
            cpu_us=1e6 * (sum(gateway.program.cpu_s() for gateway in found) - before_s) / requests,
            redis_cpu_us=1e6 * (server.cpu_s() - redis_s) / requests if server is not None else 0.0,
            redis_bytes=counted[0] / requests,
            entries=counted[1] / requests,
        )


async def measured(load: Load) -> dict[str, Figures]:
    """Measure the three configurations, one after the other, with the same engines."""
    with tempfile.TemporaryDirectory() as name:
        folder, (port,) = Path(name), free_ports(1)
        with engines(folder) as running:
            found = {"one gateway": await observed(running, load, 1, {}, None)}
            with redis(folder, port) as server:
                section = {"replication": {"redis": f"redis://127.0.0.1:{port}", "flush": "5 ms"}}
                found["four gateways, 5 ms"] = await observed(running, load, 4, section, server)
            found["four gateways, nothing shared"] = await observed(running, load, 4, {}, None)
            return found


def rows(load: Load, found: Mapping[str, Figures]) -> list[Row]:
    """The figures as rows, with one gateway as the peer."""
    single, shared = found["one gateway"], found["four gateways, 5 ms"]
    note = (
        f"{load.rate_per_s:g} requests/s of {load.prompt_tokens:,} tokens for {load.seconds:g} s, "
        f"{PREFILL} prefill and {DECODE} decode engines, one machine"
    )
    table = [
        Row(
            measure=f"mean TTFT, {name}", unit="ms", better="lower", ours=1e3 * figures.ttft_s,
            peer=1e3 * single.ttft_s, peer_name="one gateway", note=note,
        )
        for name, figures in found.items()
        if figures is not single
    ]  # fmt: skip
    alone = found["four gateways, nothing shared"]
    costs = (
        ("CPU of the gateways per request, four that share", "us", shared.cpu_us, alone.cpu_us),
        ("CPU of Redis per request", "us", shared.redis_cpu_us, None),
        ("bytes written and read per request, all gateways", "B", shared.redis_bytes, None),
        ("entries per request", "", shared.entries, None),
    )
    return table + [
        Row(
            measure=measure, unit=unit, better="lower", ours=ours, peer=peer, peer_name="nothing shared" if peer else ""
        )
        for measure, unit, ours, peer in costs
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rate", type=float, default=Load.rate_per_s, help="requests per second")
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--prompt-tokens", type=int, default=Load.prompt_tokens)
    options = parser.parse_args()
    load = Load(options.rate, options.seconds, options.prompt_tokens)
    show(rows(load, uvloop.run(measured(load))), options.json)


if __name__ == "__main__":
    main()
