"""Emulated data-parallel ranks: one HTTP port, and a cache, a load, KV events and a KV port for each rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio
from tests.serve.rig import CLUSTER, MODEL
from tests.waiting import becomes_true

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.types import InputError

TEXT = CLUSTER.replace(
    'prefill1, role: prefill, gpus: "node1:0-1"', 'prefill1, role: prefill, gpus: "node1:4-7", dp: 2'
)
"""The engine prefill1 has two ranks."""
HEADER = "X-data-parallel-rank"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
HOLD = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def on_fleet(check: Callable[[EmulatedCluster, aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    """Run a check with the emulated engines, a session and the URL of the engine with two ranks."""

    async def main() -> None:
        async with (
            EmulatedCluster(topology.parse(TEXT), EmulatedClusterSpec()) as fleet,
            aiohttp.ClientSession() as session,
        ):
            found = fleet.ready().instances
            assert found["prefill1_dp0"].url == found["prefill1_dp1"].url
            await check(fleet, session, found["prefill1_dp0"].url)

    uvloop.run(main())


async def ask(session: aiohttp.ClientSession, url: str, rank: Any = None, **more: Any) -> tuple[int, Any]:
    headers = {} if rank is None else {HEADER: str(rank)}
    async with session.post(f"{url}/v1/completions", json=BODY | more, headers=headers) as response:
        return response.status, msgspec.json.decode(await response.read())


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> dict[str, float]:
    """Return the values of a metric by rank."""
    async with session.get(f"{url}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith(f"{name}{{")]
    return {line.partition('engine="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_header_selects_the_rank_and_its_cache() -> None:
    async def check(fleet: EmulatedCluster, session: aiohttp.ClientSession, url: str) -> None:
        name = "vllm:prefix_cache_hits_total"
        for rank, expected in ((1, False), (1, True), (0, False)):
            before = await metric(session, url, name)
            assert (await ask(session, url, rank))[0] == 200
            after = await metric(session, url, name)
            assert (after[str(rank)] > before[str(rank)]) is expected
            assert after[str(1 - rank)] == before[str(1 - rank)]
        assert await metric(session, url, "vllm:prompt_tokens_total") == {"0": 225.0, "1": 450.0}

    on_fleet(check)


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_that_does_not_exist_is_a_client_error(rank: int) -> None:
    """With the text of vLLM."""

    async def check(fleet: EmulatedCluster, session: aiohttp.ClientSession, url: str) -> None:
        status, reply = await ask(session, url, rank)
        assert status == 400
        assert reply["error"]["message"] == f"data_parallel_rank {rank} is out of range [0, 2)."

    on_fleet(check)


def test_without_the_header_the_ranks_share_the_requests() -> None:
    async def check(fleet: EmulatedCluster, session: aiohttp.ClientSession, url: str) -> None:
        for _ in range(4):
            assert (await ask(session, url))[0] == 200
        assert await metric(session, url, "vllm:e2e_request_latency_seconds_count") == {"0": 2.0, "1": 2.0}

    on_fleet(check)


def test_the_transfer_parameters_are_those_of_the_rank() -> None:
    """The engine id and the KV port of each rank differ, and the KV is fetched from them."""

    async def check(fleet: EmulatedCluster, session: aiohttp.ClientSession, url: str) -> None:
        decode = fleet.ready().instances["decode0"].url
        seen = []
        for rank in (0, 1):
            _, reply = await ask(session, url, rank, **HOLD)
            params = reply["kv_transfer_params"]
            server = fleet.servers[f"prefill1_dp{rank}"]
            assert (params["remote_engine_id"], params["remote_port"]) == (server.origin.engine_id, server.kv_port)
            assert (await ask(session, decode, kv_transfer_params=params))[0] == 200
            assert not server.engine.held
            seen.append((params["remote_engine_id"], params["remote_port"]))
        assert len(set(seen)) == len({port for _, port in seen}) == 2
        async with session.get(f"{decode}/metrics") as response:
            page = await response.text()
        assert 'kvroute:kv_transfers_total{source="prefill1_dp1",engine="0"} 1.0' in page

    on_fleet(check)


def test_each_rank_publishes_its_kv_events_with_its_number() -> None:
    async def check(fleet: EmulatedCluster, session: aiohttp.ClientSession, url: str) -> None:
        context = zmq.asyncio.Context()
        try:
            for rank in (0, 1):
                socket = context.socket(zmq.DEALER)
                socket.connect(fleet.ready().instances[f"prefill1_dp{rank}"].kv_replay)
                assert (await ask(session, url, rank))[0] == 200
                await socket.send_multipart([b"", (0).to_bytes(8, "big")])
                *_, payload = await socket.recv_multipart()
                _, events, published = msgspec.msgpack.decode(payload)
                assert published == rank
                assert events[0]["type"] == "BlockStored"
                socket.close(linger=0)
        finally:
            context.term()

    on_fleet(check)


def test_a_restart_ends_all_ranks() -> None:
    """One process has died: both caches are empty, and both engine ids are new."""

    async def check(fleet: EmulatedCluster, session: aiohttp.ClientSession, url: str) -> None:
        ids = [fleet.servers[f"prefill1_dp{rank}"].origin.engine_id for rank in (0, 1)]
        for rank in (0, 1):
            await ask(session, url, rank)
        async with session.post(f"{url}/emulator/restart", json={"down_s": 3600}) as response:
            assert response.status == 200
        first = fleet.servers["prefill1_dp0"]
        assert await becomes_true(lambda: not first._open)
        await first.come_back()
        assert await metric(session, url, "vllm:prefix_cache_queries_total") == {"0": 0.0, "1": 0.0}
        assert (await ask(session, url, 1))[0] == 200
        again = [fleet.servers[f"prefill1_dp{rank}"].origin.engine_id for rank in (0, 1)]
        assert not set(ids) & set(again)

    on_fleet(check)


def test_the_ranks_of_an_engine_are_emulated_together() -> None:
    async def main() -> None:
        async with EmulatedCluster(topology.parse(TEXT), EmulatedClusterSpec(), ["prefill1_dp1"]):
            pass

    with pytest.raises(InputError, match="prefill1_dp1 is emulated without all lower ranks of prefill1"):
        uvloop.run(main())
