"""KV that is requested before it is computed: the time of its arrival, its counters, and the outcome when the prompt is
cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.emulator.test_wan import AWAY, DECODE, MODEL, SITES, WAN_PATH, Hand, Hold
from tests.waiting import until

from kvroute import llm
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.emulator.kv.fabric import EmulatedFabric
from kvroute.types import DecodeSpec, LinearPrefill, TimingSpec

CAPACITY = 12.5e9
LATENCY_S = SITES.latency_s(SITES.index(AWAY), SITES.index(DECODE))
QUICK = TimingSpec(
    prefill=LinearPrefill(per_token_s=20e-6, base_s=2e-3), decode=DecodeSpec(base_s=1e-3, per_request_s=1e-5)
)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 200
TOKENS = len(PROMPT) // 4


@settings(max_examples=40, deadline=None)
@given(st.floats(0.5, 8.0), st.floats(0.01, 2.0), st.sampled_from([1.0, 0.5, 0.25]), st.integers(2, 80))
def test_the_slower_of_prefill_and_link_limits_the_rate(
    gigabytes: float, prefill_s: float, share: float, layers: int
) -> None:
    """From the end of the first layer on, bytes are sent at most at the speed of the prefill; when it ends, the rest is
    sent at link speed (as in the simulator's layer-wise mode)."""
    clock, nbytes, rate = Hand(), gigabytes * 1e9, share * CAPACITY
    fabric, hold = EmulatedFabric(SITES, clock, kv_scale=1e-6), Hold(clock)
    fabric.degrade(WAN_PATH, share)
    first_s = prefill_s / layers
    clock.run(first_s)
    pace = nbytes / prefill_s
    transfer = fabric.send(SITES.index(AWAY), SITES.index(DECODE), nbytes, hold, produced_bytes_per_s=pace)
    clock.run(prefill_s)
    fabric.sync()
    sent_bytes, _ = fabric.progress(transfer)
    assert sent_bytes == pytest.approx(min(pace, rate) * (prefill_s - first_s), rel=1e-6, abs=1.0)
    fabric.release(transfer)
    clock.run(clock.now() + 100.0)
    fabric.close()
    assert hold.ended_s == pytest.approx(prefill_s + (nbytes - sent_bytes) / rate + LATENCY_S, abs=1e-3)
    assert hold.wire_bytes == transfer.wire_bytes


class Busy(Hand):
    """A clock during whose reads other processes run, longer each time."""

    def now(self) -> float:
        self.time = 1.5 * self.time + 1e-3
        return self.time


def test_progress_read_after_sync_belongs_to_its_time() -> None:
    """Bytes and their time must belong together; otherwise the throughput looks higher than the link's capacity."""
    clock = Busy()
    fabric = EmulatedFabric(SITES, clock, kv_scale=1e-6)
    transfer = fabric.send(SITES.index(AWAY), SITES.index(DECODE), 1e12, Hold(clock))
    samples = [(fabric.sync(), *fabric.progress(transfer)) for _ in range(5)]
    fabric.close()
    for (before, some, _), (after, more, rate) in pairwise(samples):
        assert more - some == pytest.approx(rate * (after - before), rel=1e-9)


class Sites:
    """Emulated engines of both sites with prompts of 45 ms, and a client."""

    def __init__(self, fleet: EmulatedCluster, session: aiohttp.ClientSession) -> None:
        self.fleet, self.session = fleet, session

    async def post(self, name: str, path: str, body: Any) -> tuple[int, Any]:
        url = self.fleet.ready().instances[name].url
        async with self.session.post(url + path, json=body) as response:
            return response.status, msgspec.json.decode(await response.read() or b"null")

    async def prefill(self, key: str, prompt: str = PROMPT) -> tuple[int, Any]:
        """Run the leg that computes."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
        return await self.post(AWAY, "/v1/completions", body)

    async def decode(self, key: str, prompt: str = PROMPT) -> tuple[int, Any]:
        """Run the leg that pulls early."""
        host, _, port = self.fleet.ready().instances[AWAY].bootstrap.rpartition(":")
        params = {"do_remote_prefill": True, "transfer_id": key, "remote_host": host, "remote_port": int(port)}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
        return await self.post(DECODE, "/v1/completions", body)

    def held(self) -> int:
        """Return the number of KV caches held at the source."""
        return len(self.fleet.servers[AWAY].engine.held)

    def waits(self, key: str) -> bool:
        """Return whether a pull of this key waits at the source."""
        return key in self.fleet.servers[AWAY].kv_server.awaited

    async def metric(self, name: str, sample: str) -> float:
        url = self.fleet.ready().instances[name].url
        async with self.session.get(url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))


def on_sites(check: Callable[[Sites], Awaitable[None]]) -> None:
    cluster = replace(SITES, timing=dict.fromkeys(SITES.timing, QUICK))

    async def main() -> None:
        async with EmulatedCluster(cluster, EmulatedClusterSpec()) as fleet, aiohttp.ClientSession() as session:
            await check(Sites(fleet, session))

    uvloop.run(main())


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_concurrent_legs_start_in_any_order(first: str) -> None:
    """The response is that of a single engine; the transfer is counted as early, and nothing stays held."""

    async def check(sites: Sites) -> None:
        legs = {"prefill": sites.prefill, "decode": sites.decode}
        order = [first, *(name for name in legs if name != first)]
        prompt = PROMPT + "!"
        _, alone = await sites.post(AWAY, "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4})
        answers = dict(zip(order, await asyncio.gather(*(legs[name]("k", prompt) for name in order)), strict=True))
        assert [status for status, _ in answers.values()] == [200, 200]
        assert answers["decode"][1]["choices"][0]["text"] == alone["choices"][0]["text"]
        params = answers["prefill"][1]["kv_transfer_params"]
        assert (params["remote_request_id"], params["remote_num_tokens"]) == ("k", len(prompt) // 4 + 1)
        source = f'{{source="{AWAY}",engine="0"}}'
        assert await sites.metric(DECODE, f"kvroute:kv_early_total{source}") == 1
        assert await sites.metric(DECODE, f"kvroute:kv_transfers_total{source}") == 0
        nbytes = await sites.metric(DECODE, f"kvroute:kv_early_bytes_total{source}")
        assert 0 < nbytes <= llm.model(MODEL).kv_bytes(len(prompt) // 4 + 1)
        assert await sites.metric(AWAY, f'kvroute:kv_sent_bytes_total{{target="{DECODE}",engine="0"}}') == nbytes
        await until(lambda: sites.held() == 0)

    on_sites(check)


def test_bytes_are_sent_before_the_prompt_is_computed() -> None:
    """The bytes sent grow from one scrape to the next while the source still computes."""

    async def check(sites: Sites) -> None:
        long = PROMPT * 20
        legs = [asyncio.create_task(leg("k", long)) for leg in (sites.decode, sites.prefill)]
        engine = sites.fleet.servers[AWAY].engine
        await until(lambda: engine.computing_sequence("k") is not None)
        seen = [0.0]
        while engine.computing_sequence("k") is not None and len(seen) < 4:
            sent = await sites.metric(AWAY, f'kvroute:kv_sent_bytes_total{{target="{DECODE}",engine="0"}}')
            if sent > seen[-1]:
                seen.append(sent)
        assert len(seen) == 4
        assert seen[-1] < llm.model(MODEL).kv_bytes(len(long) // 4)
        assert [status for status, _ in await asyncio.gather(*legs)] == [200, 200]

    on_sites(check)


@pytest.mark.parametrize("stage", ["computing", "queued"])
def test_a_cancelled_prompt_ends_the_pull(stage: str) -> None:
    """The waiting pull gets an error at once, and a later prompt with the same key is served."""

    async def check(sites: Sites) -> None:
        engine, ahead = sites.fleet.servers[AWAY].engine, list[asyncio.Task[Any]]()
        await sites.post(AWAY, "/emulator/slow", {"factor": 20})
        if stage == "queued":
            ahead.append(asyncio.create_task(sites.prefill("ahead", PROMPT + "ahead")))
            await until(lambda: engine.computing_sequence("ahead") is not None)
        pulling = asyncio.create_task(sites.decode("k"))
        await until(lambda: sites.waits("k"))
        request = asyncio.create_task(sites.prefill("k"))
        await until(lambda: engine.waiting > 0 if ahead else engine.computing_sequence("k") is not None)
        request.cancel()
        status, error = await pulling
        assert (status, error["error"]["type"]) == (500, "InternalServerError")
        assert not sites.waits("k")
        for task in ahead:
            task.cancel()
        await asyncio.gather(request, *ahead, return_exceptions=True)
        await sites.post(AWAY, "/emulator/slow", {"factor": 1})
        answers = await asyncio.gather(sites.decode("k"), sites.prefill("k"))
        assert [status for status, _ in answers] == [200, 200]

    on_sites(check)


def test_a_second_target_may_pull_the_same_name() -> None:
    """The first target leaves before the transfer is complete."""

    async def check(sites: Sites) -> None:
        first = asyncio.create_task(sites.decode("k"))
        await until(lambda: sites.waits("k"))
        computing = asyncio.create_task(sites.prefill("k"))
        await until(lambda: sites.fleet.servers[AWAY].engine.computing_sequence("k") is not None)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        status, _ = await sites.decode("k")
        assert status == 200
        assert (await computing)[0] == 200
        await until(lambda: sites.held() == 0)

    on_sites(check)


def test_a_cut_link_shows_a_stalled_send_queue() -> None:
    """Connections have unsent data and the bytes sent do not grow; after the repair they grow."""

    async def check(sites: Sites) -> None:
        await sites.post(AWAY, "/emulator/wan", {"share": 0})
        legs = [asyncio.create_task(leg("k")) for leg in (sites.decode, sites.prefill)]
        target = f'{{target="{DECODE}",engine="0"}}'
        while not await sites.metric(AWAY, f"kvroute:kv_link_connections{target}"):
            pass
        before = await sites.metric(AWAY, f"kvroute:kv_sent_bytes_total{target}")
        looked = await sites.metric(AWAY, f"kvroute:kv_link_looked_seconds{target}")
        assert await sites.metric(AWAY, f"kvroute:kv_link_unsent_bytes{target}") > 0
        assert await sites.metric(AWAY, f"kvroute:kv_sent_bytes_total{target}") == before
        assert await sites.metric(AWAY, f"kvroute:kv_link_looked_seconds{target}") > looked
        await sites.post(AWAY, "/emulator/wan", {"share": 1})
        assert [status for status, _ in await asyncio.gather(*legs)] == [200, 200]
        assert await sites.metric(AWAY, f"kvroute:kv_link_connections{target}") == 0
        assert await sites.metric(AWAY, f"kvroute:kv_sent_bytes_total{target}") > before

    on_sites(check)
