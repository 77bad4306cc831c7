"""Service classes in a running gateway: rates with their headers, turns by weight and priority, and deadlines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.serve.rig import CLUSTER, GatewayResponse, Rig, rig
from tests.serve.stub_engines import run
from tests.waiting import becomes_true

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.serve.api.api_keys import hash_text
from kvroute.topology import parse
from kvroute.types import Arrived, Finished, Prefill, Reject

KEYS = {"alice": "kvr_alice", "bob": "kvr_bob"}


def section(classes: str, keys: str = "{}", more: str = "") -> str:
    """Settings with two keys, their classes, and further lines."""
    known = ", ".join(f'{name}: "{hash_text(key)}"' for name, key in KEYS.items())
    return f"  keys: {{known: {{{known}}}, classes: {keys}}}\n  classes: {classes}\n{more}"


async def ask(
    gate: Rig, name: str, *, tokens: int = 4, headers: dict[str, str] | None = None, **more: object
) -> GatewayResponse:
    """Send a completion with a key."""
    body = {"model": "llama-3-70b", "prompt": more.pop("prompt", "hello " * 40), "max_tokens": tokens}
    body |= {"ignore_eos": True, **more}
    return await gate.post(body, headers={"Authorization": f"Bearer {KEYS[name]}", **(headers or {})})


def waiting(gate: Rig) -> int:
    """Number of requests in the placement queue."""
    placement = gate.gateway.runtime.placement
    assert placement is not None
    return sum(placement.depths().values()) + placement.deferred


def test_a_key_above_its_rate_is_told_when_to_come_back() -> None:
    """The headers count down, the third request of a minute is refused, and another key is not affected."""

    async def scenario() -> None:
        limits = "{default: {}, small: {requests_per_minute: 2, tokens_per_minute: 100000}}"
        async with rig(section(limits, "{alice: small}")) as gate:
            first = await ask(gate, "alice", stream=True)
            assert first.status == 200
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert (await ask(gate, "alice")).headers["x-ratelimit-remaining-requests"] == "0"
            refused = await ask(gate, "alice")
            assert refused.status == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert refused.json["error"]["code"] == "rate_limit_exceeded"
            assert "2 requests per minute" in refused.json["error"]["message"]
            bob = await ask(gate, "bob")
            assert bob.status == 200
            assert not [name for name in bob.headers if name.startswith("x-ratelimit")]
            assert 'kvroute_rejects_total{reason="rate_requests"} 1' in await gate.metrics()
            assert await gate.becomes_idle(), gate.held_resources()

    run(scenario())


def test_a_request_is_charged_for_what_it_has_used() -> None:
    """The reserve for the output is given back at the end; a request that is refused costs nothing."""

    async def scenario() -> None:
        async with rig(section("{default: {tokens_per_minute: 1000}}")) as gate:
            limiter = gate.gateway.runtime.tenancy.limiter
            asked = await ask(gate, "alice", prompt=[1] * 200, tokens=500, stop=["never"])
            assert asked.status == 200
            used = 200 + asked.json["usage"]["completion_tokens"]
            assert await becomes_true(lambda: limiter.states("alice", 0.0)[0].remaining >= 1_000 - used), (
                "the reserve is given back"
            )
            refused = await ask(gate, "bob", prompt=[1] * 900, tokens=200)
            assert (refused.status, refused.json["error"]["code"]) == (400, "request_too_large")
            assert "1100 tokens" in refused.json["error"]["message"]
            assert "retry-after" not in refused.headers, "no wait helps"
            body, own_key = {"model": "llama-3-70b", "input": "a" * 8_000}, {"Authorization": f"Bearer {KEYS['bob']}"}
            embedded = await gate.post(body, "/v1/embeddings", own_key)
            assert (embedded.status, "retry-after" in embedded.headers) == (400, False)
            assert limiter.states("bob", 0.0)[0].remaining == 1_000

    run(scenario())


def test_a_flood_does_not_delay_another_key_for_long() -> None:
    """With one request at a time, the request of another key is the second to be served, not the last."""

    async def scenario() -> None:
        more = "  fair_queue: {running: 1}\n"
        async with rig(section("{default: {}}", more=more)) as gate:
            gate.slow(20)
            done: list[str] = []

            async def one(name: str) -> None:
                assert (await ask(gate, name, tokens=8)).status == 200
                done.append(name)

            flood = [asyncio.ensure_future(one("alice")) for _ in range(12)]
            assert await becomes_true(lambda: waiting(gate) == 11)
            late = asyncio.ensure_future(one("bob"))
            await asyncio.gather(*flood, late)
            assert done.index("bob") <= 2 + 1
            assert waiting(gate) == 0
            assert 'kvroute_class_wait_seconds_count{class="default"} 13' in await gate.metrics()
            assert await gate.becomes_idle(), gate.held_resources()

    run(scenario())


def test_a_higher_priority_goes_first_and_a_request_may_lower_its_own() -> None:
    """Bands are strict. `X-Priority` and the field `priority` count up to `priority_max` of the class."""

    async def scenario() -> None:
        classes = "{default: {priority: 1}, urgent: {priority: 2}}"
        async with rig(section(classes, "{bob: urgent}", "  fair_queue: {running: 1}\n")) as gate:
            gate.slow(20)
            done: list[str] = []

            async def one(name: str, tag: str, **more: object) -> None:
                assert (await ask(gate, name, tokens=8, **more)).status == 200  # type: ignore[arg-type]
                done.append(tag)

            tasks = [asyncio.ensure_future(one("alice", "first"))]
            assert await becomes_true(lambda: len(gate.requests) == 1)
            asked: tuple[tuple[str, str, dict[str, object]], ...] = (
                ("alice", "low", {"headers": {"X-Priority": "0"}}),
                ("alice", "lowest", {"priority": 5}),
                ("alice", "capped", {"headers": {"X-Priority": "9"}}),
                ("bob", "urgent", {}),
            )
            for name, tag, more in asked:
                before = waiting(gate)
                tasks.append(asyncio.ensure_future(one(name, tag, **more)))
                while waiting(gate) == before:
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)
            assert done == ["first", "urgent", "capped", "low", "lowest"]
            wrong = await ask(gate, "alice", headers={"X-Priority": "high"})
            assert wrong.status == 400
            assert "X-Priority" in wrong.json["error"]["message"]

    run(scenario())


def test_clients_that_leave_the_queue_release_their_place() -> None:
    """The request behind them is served, and nothing is held."""

    async def scenario() -> None:
        async with rig(section("{default: {tokens_per_minute: 100000}}", more="  fair_queue: {running: 1}\n")) as gate:
            gate.slow(20)
            first = asyncio.ensure_future(ask(gate, "alice", tokens=40))
            assert await becomes_true(lambda: len(gate.requests) == 1)
            gone = [asyncio.ensure_future(ask(gate, "alice")) for _ in range(5)]
            assert await becomes_true(lambda: waiting(gate) == 5)
            last = asyncio.ensure_future(ask(gate, "bob"))
            assert await becomes_true(lambda: waiting(gate) == 6)
            for task in gone:
                task.cancel()
            assert (await last).status == (await first).status == 200
            assert await gate.becomes_idle(), gate.held_resources()
            assert waiting(gate) == 0

    run(scenario())


SLOW = CLUSTER.replace("per_token: 1 us", "per_token: 1 ms")
"""A prompt of 60,000 tokens takes a minute by the timing model, and by emulated engines of normal speed."""


async def _occupied(gate: Rig, tokens: int = 60_000) -> list[asyncio.Task[GatewayResponse]]:
    """Send one such prompt to each prefill instance."""
    gate.slow(1)
    tasks = [asyncio.create_task(ask(gate, "alice", prompt=[number] * tokens)) for number in (1, 2)]
    assert await becomes_true(lambda: gate.gateway.runtime.control.in_flight == 2)
    return tasks


def test_a_request_that_would_be_late_is_refused_at_once(tmp_path: Path) -> None:
    """By the prediction of the core. The log has the prediction, the rejection and the measured TTFT, and repeats."""

    async def scenario() -> None:
        events = tmp_path / "events.log"
        classes = "{default: {slo: {ttft: 300 s, header: true}}}"
        async with rig(section(classes, more=f"  log: {{events: {events}}}\n"), SLOW) as gate:
            gate.slow(0.001)
            assert (await ask(gate, "alice", stream=True)).status == 200
            impossible = await ask(gate, "alice", prompt=[7] * 5_000, headers={"X-Slo-Ttft-Ms": "1000"})
            assert impossible.status == 503
            assert impossible.headers["retry-after"] == "5"
            assert impossible.json["error"]["code"] == "slo"
            assert "first token is expected in 5" in impossible.json["error"]["message"]
            busy = await _occupied(gate)
            refused = await ask(gate, "bob", prompt=[9] * 100, headers={"X-Slo-Ttft-Ms": "20000"})
            assert refused.status == 503
            assert 20 <= int(refused.headers["retry-after"]) <= 45
            wrong = await ask(gate, "bob", headers={"X-Slo-Ttft-Ms": "soon"})
            assert wrong.status == 400
            assert "X-Slo-Ttft-Ms" in wrong.json["error"]["message"]
            for task in busy:
                task.cancel()
            assert await gate.becomes_idle(), gate.held_resources()
            assert 'kvroute_rejects_total{reason="slo"} 2' in await gate.metrics()
        header, records = read_log(events)
        found = list(records)
        decided = [decision for record in found for decision in record.decisions]
        assert (
            len(
                [
                    decision
                    for decision in decided
                    if isinstance(decision, Reject) and decision.ttft_s and decision.least_s
                ]
            )
            == 2
        )
        predicted = [decision.ttft_s for decision in decided if isinstance(decision, Prefill)]
        assert len(predicted) == 3
        assert all(seconds is not None and seconds > 0 for seconds in predicted)
        measured = [record.event.ttft_s for record in found if isinstance(record.event, Finished)]
        assert len([seconds for seconds in measured if seconds is not None and seconds > 0]) == 1
        assert all(record.event.ttft_max_s for record in found if isinstance(record.event, Arrived))
        again = replay(header.spec.build(parse(header.cluster)), iter(found))
        assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)

    run(scenario())


@pytest.mark.slow
def test_a_deferred_request_is_placed_when_there_is_room_again() -> None:
    """Work that ends earlier than predicted makes room before the deadline; without room the request is refused when
    no instance can meet the deadline any more. The emulated engines end the prompts, which take 15 s, all the same."""

    async def scenario() -> None:
        classes = "{default: {slo: {ttft: 600 s, late: defer, header: true}}}"
        async with rig(section(classes), SLOW) as gate:
            busy = await _occupied(gate, 15_000)
            hopeless = await ask(gate, "bob", prompt=[8] * 100, headers={"X-Slo-Ttft-Ms": "400"})
            assert hopeless.status == 503
            assert "cannot come in time" in hopeless.json["error"]["message"]
            asked = asyncio.create_task(
                ask(gate, "bob", prompt=[9] * 100, stream=True, headers={"X-Slo-Ttft-Ms": "10000"})
            )
            assert await becomes_true(lambda: waiting(gate) == 1)
            for task in busy:
                task.cancel()
            assert (await asked).status == 200
            assert await gate.becomes_idle(), gate.held_resources()

    run(scenario())


def test_waiting_requests_are_answered_when_the_gateway_closes(caplog: pytest.LogCaptureFixture) -> None:
    """None of them is placed while others are aborted."""

    async def scenario() -> None:
        async with rig(section("{default: {}}", more="  fair_queue: {running: 1}\n")) as gate:
            gate.slow(100)
            asked = [asyncio.ensure_future(ask(gate, "alice", tokens=500)) for _ in range(5)]
            assert await becomes_true(lambda: waiting(gate) == 4)
            await gate.gateway.close()
            responses = await asyncio.gather(*asked)
            assert [response.status for response in responses] == [503] * 5
            assert not any(gate.held_resources().values())

    run(scenario())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
