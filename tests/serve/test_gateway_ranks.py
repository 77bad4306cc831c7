"""The gateway in front of engines with data-parallel ranks: each rank has its own load, cache and place."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from tests.serve.rig import COMPLETIONS, MODEL, Rig, rig
from tests.waiting import becomes_true

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway
from kvroute.topology import parse
from kvroute.types import Decision, Decode, Prefill

RANKS = ("decode0_dp0", "decode0_dp1")
TEXT = """
name: test
racks: [{name: rack0}]
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 50 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-7", dp: 4}
  - {name: decode0, role: decode, gpus: "node1:0-3", dp: 2}
gateway:
  listen: {port: 0}
  admin: {port: 0}
  policy: foresight
  scrape: {interval: 50 ms}
"""


def prompt(number: int) -> str:
    return f"{number} " + "The quick brown fox jumps over the lazy dog. " * 40


def rank_header(rank: int) -> dict[str, str]:
    return {"X-data-parallel-rank": str(rank)}


async def read(session: aiohttp.ClientSession, url: str, body: dict[str, Any], rank: int) -> None:
    async with session.post(url + COMPLETIONS, json=body, headers=rank_header(rank)) as reply:
        await reply.read()


def test_a_request_reaches_the_ranks_that_were_chosen(tmp_path: Path) -> None:
    """The engines would divide requests themselves without the header; here each leg is on the rank of its decision.
    The log replays."""
    log = tmp_path / "events.log"

    async def run() -> tuple[dict[str, int], Counter[tuple[str, str]]]:
        in_turn = "  policy: round-robin\n  prefill: round-robin\n"
        async with rig(f"{in_turn}  log: {{events: {log}}}\n", text=TEXT) as gate:
            replies = await asyncio.gather(*[gate.ask(prompt(number)) for number in range(24)])
            assert [reply.status for reply in replies] == [200] * 24
            assert await gate.becomes_idle(), gate.held_resources()
            engines = {name: server.engine for name, server in gate.fleet.servers.items()}
        prompts = {name: engine.counters.prefill_s.counts for name, engine in engines.items() if name not in RANKS}
        pulled = Counter({(s, n): p.transfers for n in RANKS for s, p in engines[n].counters.pulled.items()})
        return {name: sum(counts) for name, counts in prompts.items()}, pulled

    prompts, pulled = uvloop.run(run())
    header, records = read_log(log)
    control = header.spec.build(parse(header.cluster))
    decisions: list[Decision] = []
    for record, again in replay(control, records):
        assert decisions_equal(record.decisions, again)
        decisions += record.decisions
    assert prompts == Counter(decision.instance for decision in decisions if isinstance(decision, Prefill))
    assert pulled == Counter(
        (decision.source, decision.target) for decision in decisions if isinstance(decision, Decode)
    )
    assert all(prompts.values())
    assert {target for _, target in pulled} == set(RANKS)


def test_a_repeated_prefix_returns_to_its_rank() -> None:
    """Only KV events tell where it is: the prompt was sent to one rank past the gateway."""

    async def run() -> None:
        async with rig("  prefix: events\n", text=TEXT) as gate:
            control, url = gate.gateway.runtime.control, gate.fleet.ready().instances["prefill0_dp0"].url
            for rank in (2, 0, 3, 1):
                name, ids = f"prefill0_dp{rank}", [rank + 1, 5, 7] * 200
                body = {"model": MODEL, "prompt": ids, "max_tokens": 1}
                async with gate.session.post(url + COMPLETIONS, json=body, headers=rank_header(rank)) as reply:
                    assert reply.status == 200
                server, slot = gate.fleet.servers[name], control.cluster.index(name)
                assert await becomes_true(lambda: control.prefix.used_blocks(slot) >= len(ids) // 16)  # noqa: B023
                measured = gate.gateway.runtime.measured
                assert await becomes_true(lambda: name in measured and not measured[name].running)  # noqa: B023
                counted = server.engine.counters.hits
                assert (await gate.ask(ids)).status == 200
                assert server.engine.counters.hits > counted

    uvloop.run(run())


def test_the_load_is_that_of_each_rank() -> None:
    """One page of metrics, scraped once for the engine, gives the load of each of its ranks."""

    async def run() -> None:
        async with rig(text=TEXT) as gate, aiohttp.ClientSession() as session:
            url = gate.fleet.ready().instances[RANKS[0]].url
            gate.slow(200)
            body = {"model": MODEL, "prompt": prompt(1), "max_tokens": 200, "ignore_eos": True}
            sent = [asyncio.create_task(read(session, url, body, 1)) for _ in range(3)]
            measured = gate.gateway.runtime.measured

            def busy(name: str) -> int:
                return measured[name].running + measured[name].waiting if name in measured else -1

            assert await becomes_true(lambda: (busy(RANKS[0]), busy(RANKS[1])) == (0, 3))
            for task in sent:
                task.cancel()

    uvloop.run(run())


def test_the_ranks_of_an_engine_fail_together() -> None:
    """One process: its health check and its circuit breaker are those of all ranks."""

    async def run() -> None:
        async with rig("  health: {interval: 100 ms}\n", text=TEXT) as gate:
            await gate.stop_engine(RANKS[0])
            for name in RANKS:
                assert await gate.becomes(name, False)
            assert (await gate.ask(prompt(1))).status == 503
            await gate.restart_engine(RANKS[0])
            for name in RANKS:
                assert await gate.becomes(name, True)
            assert (await gate.ask(prompt(1))).status == 200

    uvloop.run(run())


def test_a_client_does_not_choose_the_rank() -> None:
    """Even if the file forwards the header: an engine gets the rank of the decision, once."""

    async def run() -> None:
        async with rig("  forward_headers: [X-Data-Parallel-Rank]\n", text=TEXT) as gate:
            for number in range(4):
                body = {"model": MODEL, "prompt": prompt(number), "max_tokens": 2}
                reply = await gate.post(body, headers={"X-data-parallel-rank": "7"})
                assert reply.status == 200, reply.body

    uvloop.run(run())


def test_kv_events_of_another_rank_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The file gives two ranks the port of one: what that one has cached would count for both."""

    async def run() -> None:
        cluster = parse(TEXT)
        async with EmulatedCluster(cluster, EmulatedClusterSpec()) as fleet:
            found = fleet.ready().instances
            one, two = (found[name] for name in RANKS)
            found[RANKS[1]] = msgspec.structs.replace(two, kv_events=one.kv_events, kv_replay=one.kv_replay)
            gateway = Gateway(Deployment.of(TEXT + "  prefix: events\n", "test.yaml", endpoints=found), seed=1)
            try:
                await gateway.start()
                async with aiohttp.ClientSession() as session:
                    gate = Rig(gateway, session, fleet)
                    number = 0
                    while not any("kv_events_of_another_rank" in record.message for record in caplog.records):
                        number += 1  # events before the subscription are not sent
                        body = {"model": MODEL, "prompt": [number, 5, 7] * 200, "max_tokens": 1}
                        await read(gate.session, one.url, body, 0)
            finally:
                await gateway.close()

    with caplog.at_level("WARNING", logger="kvroute"):
        uvloop.run(run())
    (warning,) = [record for record in caplog.records if record.message == "kv_events_of_another_rank"]
    assert "its KV events are those of rank 0, but by those of decode0_dp" in str(warning.__dict__)
