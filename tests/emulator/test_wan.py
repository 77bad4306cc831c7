"""Ordered faults between datacenters: transfers on a cut path stall and resume, engines time out, roles change."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import until

from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.emulator.clock import Alarm
from kvroute.emulator.kv.fabric import EmulatedFabric, EmulatedTransfer
from kvroute.topology import Cluster, build, two_datacenters
from kvroute.types import DecodeSpec, InputError, LinearPrefill, TimingSpec

SITES = build(two_datacenters(prefill_nodes=1, local_prefill_nodes=1, decode_nodes=1))
AWAY, HOME_PREFILL, DECODE = (
    next(i.name for i in SITES.instances if (i.datacenter, i.role) == site_and_role)
    for site_and_role in (("prefill-site", "prefill"), ("local-site", "prefill"), ("local-site", "decode"))
)
WAN_PATH = "prefill-site/local-site"
MODEL = SITES.instances[0].model
PROMPT = "The quick brown fox jumps over the lazy dog. " * 200


class Hand:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.time, self._alarms = 0.0, list[tuple[float, int, Any]]()

    def now(self) -> float:
        return self.time

    def at(self, when_s: float, ring: Any) -> Alarm:
        entry = (max(when_s, self.time), len(self._alarms), ring)
        self._alarms.append(entry)
        return _Entry(self._alarms, entry)

    def run(self, until_s: float) -> None:
        """Fire all timers that are due until this time."""
        while due := [entry for entry in self._alarms if entry[0] <= until_s]:
            entry = min(due, key=lambda sending: sending[:2])
            self._alarms.remove(entry)
            self.time = max(self.time, entry[0])
            entry[2]()
        self.time = until_s


class _Entry:
    def __init__(self, alarms: list[tuple[float, int, Any]], entry: tuple[float, int, Any]) -> None:
        self._alarms, self._entry = alarms, entry

    def cancel(self) -> None:
        if self._entry in self._alarms:
            self._alarms.remove(self._entry)


class Hold:
    """A receiver that only counts bytes."""

    def __init__(self, clock: Hand) -> None:
        self._clock = clock
        self.wire_bytes, self.ended_s = 0, math.nan

    def carry(self, wire_bytes: int, last: bool) -> None:
        self.wire_bytes += wire_bytes
        if last:
            self.ended_s = self._clock.now()


def _sent(cluster: Cluster, orders: list[tuple[float, float]], gigabytes: float) -> tuple[Hold, EmulatedTransfer]:
    """Start one transfer to the home site at 0 s, while the share of the path's capacity changes at the given times."""
    clock = Hand()
    fabric, hold = EmulatedFabric(cluster, clock, kv_scale=1e-6), Hold(clock)
    transfer = fabric.send(cluster.index(AWAY), cluster.index(DECODE), gigabytes * 1e9, hold)
    for at_s, share in orders:
        clock.run(at_s)
        fabric.degrade(WAN_PATH, share)
    clock.run(clock.now() + 500.0)
    fabric.close()
    return hold, transfer


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 0.3), st.sampled_from([0.0, 0.25, 0.5])), max_size=3),
    st.floats(0.5, 8.0),
)
def test_transfer_time_follows_the_remaining_capacity_of_the_wan_path(
    steps: list[tuple[float, float]], gigabytes: float
) -> None:
    """The bytes are the integral of the capacity over time, and all arrive once the path has full capacity."""
    at_s, orders = 0.0, list[tuple[float, float]]()
    for step_s, share in steps:
        at_s += step_s
        orders.append((at_s, share))
    orders.append((at_s + 0.2, 1.0))
    hold, transfer = _sent(SITES, orders, gigabytes)
    capacity = 12.5e9
    left, time_s, share = gigabytes * 1e9, 0.0, 1.0
    for next_s, next_share in orders:
        could = (next_s - time_s) * share * capacity
        if could >= left:
            break
        left, time_s, share = left - could, next_s, next_share
    latency_s = SITES.latency_s(SITES.index(AWAY), SITES.index(DECODE))
    assert hold.ended_s == pytest.approx(time_s + left / (share * capacity) + latency_s, abs=1e-3)
    assert hold.wire_bytes == transfer.wire_bytes


def test_an_unknown_wan_path_cannot_be_cut() -> None:
    fabric = EmulatedFabric(SITES, Hand(), kv_scale=1e-6)
    with pytest.raises(InputError, match=f"no WAN path 'here/there'.*{WAN_PATH}"):
        fabric.degrade("here/there", 0.0)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="not a valid share"):
            fabric.degrade(WAN_PATH, share)
    fabric.close()


class Sites:
    """Emulated engines of both sites and a session."""

    def __init__(self, fleet: EmulatedCluster, session: aiohttp.ClientSession) -> None:
        self.fleet, self.session = fleet, session

    async def post(self, name: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the decoded JSON, or the raw body if it is not JSON."""
        url = self.fleet.ready().instances[name].url
        async with self.session.post(url + path, json=body) as response:
            data = await response.read()
            return response.status, msgspec.json.decode(data) if data.startswith(b"{") else data

    async def prefill(self, prompt: str = PROMPT) -> Any:
        """Run the prefill leg; return the parameters of the decode leg."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        status, answer = await self.post(AWAY, "/v1/completions", {**body, "kv_transfer_params": params})
        assert status == 200
        return answer["kv_transfer_params"]

    async def decode(self, params: Any, prompt: str = PROMPT) -> tuple[int, Any]:
        """Run the decode leg."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
        return await self.post(DECODE, "/v1/completions", body)


@asynccontextmanager
async def sites(**more: Any) -> AsyncIterator[Sites]:
    """Run fast engines of both sites."""
    quick = TimingSpec(prefill=LinearPrefill(per_token_s=1e-7), decode=DecodeSpec(base_s=1e-3, per_request_s=0.0))
    cluster = build(two_datacenters(prefill_nodes=1, local_prefill_nodes=1, decode_nodes=1))
    cluster.timing.update(dict.fromkeys(cluster.timing, quick))
    async with EmulatedCluster(cluster, EmulatedClusterSpec(**more)) as fleet, aiohttp.ClientSession() as session:
        yield Sites(fleet, session)


def test_a_cut_wan_path_stalls_transfers_until_it_is_restored() -> None:
    async def run() -> None:
        async with sites(kv_patience_s=60.0) as both:
            assert await both.post(DECODE, "/emulator/wan", {"share": 0.0}) == (200, {})
            answer = asyncio.create_task(both.decode(await both.prefill()))
            kv_source = both.fleet.servers[AWAY].kv_server.kv_source
            await until(lambda: bool(kv_source.fabric.in_flight))
            assert kv_source.fabric.in_flight == 1
            assert not answer.done()
            assert await both.post(AWAY, "/emulator/wan", {"wan_path": WAN_PATH, "share": 1.0}) == (200, {})
            status, document = await answer
            assert (status, document["usage"]["completion_tokens"]) == (200, 4)

    uvloop.run(run())


def test_an_engine_aborts_a_stalled_transfer_and_the_source_keeps_the_kv() -> None:
    """As vLLM with `kv_load_failure_policy=fail`: the engine returns an error, and nothing remains held."""

    async def run() -> None:
        async with sites(kv_patience_s=0.1) as both:
            params = await both.prefill()
            await both.post(DECODE, "/emulator/wan", {"share": 0.0})
            status, document = await both.decode(params)
            assert status == 500
            assert "made no progress for 0.1 s" in document["error"]["message"]
            engine = both.fleet.servers[DECODE].engine
            assert (engine.running, engine.waiting, engine.counters.kv_failed) == (0, 0, 1)
            await both.post(DECODE, "/emulator/wan", {"share": 1.0})
            status, _ = await both.decode(params)
            assert status == 200

    uvloop.run(run())


def test_invalid_requests_to_the_wan_endpoint_are_rejected() -> None:
    async def run() -> None:
        async with sites() as both:
            status, answer = await both.post(AWAY, "/emulator/wan", {"wan_path": "moon/mars", "share": 0.5})
            assert (status, answer["error"]["param"]) == (400, "wan_path")
            assert WAN_PATH in answer["error"]["message"]
            status, _ = await both.post(AWAY, "/emulator/wan", {"share": 2})
            assert status == 400
            status, _ = await both.post(DECODE, "/emulator/role", {"role": "oracle"})
            assert status == 400

    uvloop.run(run())


def test_only_an_idle_engine_switches_its_role_and_its_cache_is_empty() -> None:
    async def run() -> None:
        async with sites() as both:
            server = both.fleet.servers[HOME_PREFILL]
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
            assert (await both.post(HOME_PREFILL, "/v1/completions", body))[0] == 200
            assert server.engine.kv_used_share == 0.0
            order = {"role": "decode", "instance": HOME_PREFILL, "from": "prefill"}
            assert await both.post(HOME_PREFILL, "/emulator/role", order) == (200, {"role": "decode"})
            assert server.role == "decode"
            status, document = await both.post(HOME_PREFILL, "/v1/completions", body)
            assert (status, document["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
            await both.post(HOME_PREFILL, "/emulator/slow", {"factor": 1000})
            busy = asyncio.create_task(
                both.post(HOME_PREFILL, "/v1/completions", {**body, "max_tokens": 5_000, "ignore_eos": True})
            )
            await until(lambda: bool(server.engine.running or server.engine.waiting))
            status, answer = await both.post(HOME_PREFILL, "/emulator/role", {"role": "prefill"})
            assert (status, server.role) == (409, "decode")
            assert "drain" in answer["error"]["message"]
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)

    uvloop.run(run())
