"""Requests, connections and replaced clusters leave no object behind, without the cyclic garbage collector.

The gateway raises the collector's thresholds, so a reference cycle may stay for hours.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import COMPLETIONS, MODEL, Rig, rig, with_section
from tests.serve.two_sites import two_sites
from tests.waiting import until

from kvroute.http.client.callbacks import weakly
from kvroute.prefix import PrefixIndex
from kvroute.prefix.tree import PrefixNode
from kvroute.serve.assembly import Deployment
from kvroute.serve.proxy.runtime import ClusterRuntime

OWN_PACKAGES = ("control", "flows", "gateway", "oracle", "policies", "prefix", "topology")
"""Packages of the gateway's process; the rig's engines use others."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 30
COPIES = """  offload:
    threshold: 1000 tokens
    rule: abundant
    layerwise: true
    copy: {timeout: 10 s}
    check_interval: 20 ms
"""


@contextmanager
def without_collector() -> Iterator[Callable[[], Counter[str]]]:
    """Turn the collector off inside; yield a function that counts kvroute's objects which only the collector could free
    now."""

    def cyclic() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            kinds = [f"{type(obj).__module__}.{type(obj).__qualname__}" for obj in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        return Counter(kind for kind in kinds if kind.split(".")[0] == "kvroute" and kind.split(".")[1] in OWN_PACKAGES)

    gc.collect()
    gc.disable()
    try:
        yield cyclic
    finally:
        gc.enable()
        gc.collect()


async def _streamed(gate: Rig) -> None:
    assert (await gate.ask(PROMPT, stream=True)).status == 200


async def _whole(gate: Rig) -> None:
    assert (await gate.ask(PROMPT)).status == 200


async def _passed_on(gate: Rig) -> None:
    await gate.post({"model": MODEL, "input": "hi"}, "/v1/embeddings")
    await gate.get("/v1/models")


async def _refused(gate: Rig) -> None:
    for body, path in (({"prompt": 5}, COMPLETIONS), ({"model": MODEL}, COMPLETIONS), ({}, "/nowhere")):
        assert (await gate.post(body, path)).status in (400, 404)
    await gate.get("/metrics")


async def _failing(gate: Rig) -> None:
    """Send requests whose legs fail, are retried, or fail finally."""
    for leg, status in (("prefill", 500), ("decode", 503), ("decode", 429)):
        for name in ("prefill0", "prefill1") if leg == "prefill" else ("decode0", "decode1"):
            await gate.command(name, fail_next=1, status=status, leg=leg)
        await gate.ask(PROMPT)
        await gate.ask(PROMPT, stream=True)


async def _leaving(gate: Rig) -> None:
    """Run clients that leave in the middle of a stream."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(gate.url + COMPLETIONS, json=body) as response:
        await response.content.readany()
        response.close()


SCENARIOS = [_streamed, _whole, _passed_on, _refused, _failing, _leaving]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
def test_requests_leave_no_cycles(scenario: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    """Objects checked: the exchange, the request, its legs and calls, connections on both sides, health checks and
    scrapes."""

    async def run() -> None:
        section = "  health: {interval: 20 ms}\n  scrape: {interval: 20 ms}\n"
        async with rig(section) as gate:
            await _whole(gate)
            await until(lambda: len(gate.gateway.runtime.measured) == 4)
            with without_collector() as cyclic:
                for _ in range(2):
                    await scenario(gate)
                await gate.session.close()
                assert await gate.becomes_idle(), gate.held_resources()
                await until(lambda: not _connected(gate))
                assert cyclic() == {}

    uvloop.run(run())


def _connected(gate: Rig) -> bool:
    """Return whether a client is connected."""
    return "kvroute_client_connections 0\n" not in "".join(gate.gateway.metrics.page("")[1])


def test_prefix_copies_and_early_transfers_leave_no_cycles() -> None:
    """A prefix is copied from another datacenter, and KV is pulled while it is computed."""

    async def run() -> None:
        async with two_sites(COPIES) as gate:
            prompt = list(range(3_000))
            assert (await gate.ask(prompt[:900], stream=True)).status == 200
            with without_collector() as cyclic:
                for tokens in (2_000, 3_000):
                    assert (await gate.ask(prompt[:tokens], stream=True)).status == 200
                assert await gate.becomes_idle(), gate.held_resources()
                assert cyclic() == {}

    uvloop.run(run())


@pytest.mark.parametrize("policy", ["foresight", "round-robin"])
def test_a_replaced_cluster_is_freed_with_its_last_request(policy: str) -> None:
    """The cluster, its engine clients and pools, its core with all prefixes, and its collectors are freed. Requests are
    in flight meanwhile."""

    async def run() -> None:
        section = f"  policy: {policy}\n  scrape: {{interval: 20 ms}}\n"
        async with rig(section) as gate:
            endpoints = gate.fleet.ready().instances

            def read() -> Deployment:
                return Deployment.of(with_section(section), "f", endpoints=endpoints)

            # By now everything that is loaded or compiled at first use is loaded, and no reference cycle of kvroute's
            # objects remains.
            for _ in range(2):
                assert (await gate.ask(PROMPT, stream=True)).status == 200
                assert await gate.gateway.reload(read)
            with without_collector() as cyclic:
                for number in range(3):
                    parts = _parts(gate.gateway.runtime)
                    for name in ("one", "two"):
                        assert (await gate.ask(f"{number} {name} {PROMPT}")).status == 200
                    running = asyncio.create_task(gate.ask(PROMPT, tokens=40, stream=True))
                    await until(lambda: gate.held_resources()["requests"] > 0)
                    assert await gate.gateway.reload(read)
                    assert len((await running).events) == 40
                    await until(lambda references=parts: not any(reference() for reference in references))  # type: ignore[misc]
                assert await gate.becomes_idle(), gate.held_resources()
                assert cyclic() == {}

    uvloop.run(run())


def _parts(runtime: ClusterRuntime) -> list[weakref.ref[Any]]:
    """Return weak references to the objects that must be freed with a cluster."""
    engines = runtime.engines.values()
    pools = [engine.pool for engine in engines]
    return [weakref.ref(engine) for engine in (runtime, runtime.control, runtime.control.oracle, *engines, *pools)]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=8)), max_size=20))
def test_a_prefix_index_is_freed_without_the_garbage_collector(stored: list[tuple[int, list[int]]]) -> None:
    """Every block is freed once, and no node needs the collector afterwards."""
    gc.freeze()  # the count ignores objects from other tests
    index = PrefixIndex(3)
    for instance, blocks in stored:
        index.store(instance, tuple(blocks))
    prefixes = {tuple(blocks[:depth]) for _, blocks in stored for depth in range(1, len(blocks) + 1)}
    gc.disable()
    try:
        assert sum(index.dismantle()) == len(prefixes)
        del index
        assert not [obj for obj in gc.get_objects() if isinstance(obj, PrefixNode) and obj.end]
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_callback_does_not_keep_its_owner_alive() -> None:
    """The callback calls its owner while it exists and does nothing afterwards."""

    received: list[int] = []

    class Owner:
        def callback(self, number: int) -> None:
            received.append(number)

    owner = Owner()
    call = weakly(owner.callback)
    call(1)
    del owner
    call(2)
    assert received == [1]
