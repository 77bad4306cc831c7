"""Attribution of errors: laws over the attempts of one request; poison requests and broken engines behind a gateway."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import COMPLETIONS, MODEL, RunningGateway
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    Serve,
    completion,
    engines_of,
    event,
    failing,
    run,
    start_stream,
    stub_rig,
    tokens,
)
from tests.waiting import becomes_true

from kvroute.serve.engines.availability import NOT_COUNTED, Availability
from kvroute.serve.engines.breaker import Breaker
from kvroute.serve.engines.fault_attribution import FaultAttribution, LegName

EMBEDDINGS = "/v1/embeddings"
RARE_CHECKS = "  health: {interval: 1 h, panic: 0}\n  scrape: {interval: 1 h}\n"
MARKER = b"POISON"
FAILURES = 5
"""Default number of failures that opens a breaker."""

OUTCOMES = st.sampled_from(["no_answer", "error", "error", "answered"])
ATTEMPTS = st.lists(st.tuples(st.integers(0, 2), OUTCOMES, st.sampled_from(["prefill", "decode"])), max_size=6)


def availabilities(failures: int) -> list[Availability]:
    """Return the availability of three instances."""
    return [Availability(f"{number}", Breaker(failures=failures), lambda *_: None) for number in range(3)]


def request(instances: list[Availability], attempts: list[tuple[int, str, LegName]], status: int) -> None:
    """Simulate one request with instance, outcome and leg of each attempt, and with its final status."""
    faults: FaultAttribution | None = None
    for number, outcome, leg in attempts:
        availability = instances[number]
        attempt = availability.started(0.0) if faults is None else NOT_COUNTED
        if outcome == "answered":
            availability.succeeded(attempt, 0.0)
            if faults is not None:
                faults.answered(leg, 0.0)
        else:
            faults = faults or FaultAttribution()
            faults.failed(availability, attempt, leg, 0.0, uncertain=outcome == "error")
    if faults is not None:
        faults.ended(status, 0.0)


def opened(instances: list[Availability]) -> list[str]:
    return [availability.name for availability in instances if availability.breaker.state(0.0) == "open"]


@given(ATTEMPTS, st.sampled_from([200, 400, 499, 502, 503]))
def test_a_request_counts_at_most_once_against_all_instances_together(
    attempts: list[tuple[int, str, LegName]], status: int
) -> None:
    """With a breaker that opens after one failure (or four errors), four equal requests open at most one breaker: that
    of the instance that failed first."""
    instances = availabilities(1)
    for _ in range(4):
        request(instances, attempts, status)
    first = [f"{number}" for number, outcome, _ in attempts if outcome != "answered"][:1]
    assert opened(instances) in ([], first)


@given(st.lists(st.tuples(st.integers(0, 2), st.just("error"), st.just("decode")), min_size=2, max_size=6))
def test_a_request_that_fails_on_two_instances_counts_against_neither(
    attempts: list[tuple[int, str, LegName]],
) -> None:
    instances = availabilities(FAILURES)
    for _ in range(100):
        request(instances, attempts, 502)
    several = len({number for number, _, _ in attempts}) > 1
    assert (opened(instances) == []) == several


@given(st.sampled_from(["prefill", "decode"]), st.sampled_from([0, 1]))
def test_an_instance_that_fails_requests_which_later_succeed_is_opened(leg: LegName, by: int) -> None:
    """The later answer may come from another instance or from the same one."""
    instances = availabilities(FAILURES)
    for number in range(4 * FAILURES):
        assert opened(instances) == [], number
        request(instances, [(0, "error", leg), (by, "answered", "decode")], 200)
    assert opened(instances) == ["0"]


def test_a_suspected_poison_request_is_not_used_as_a_probe() -> None:
    """The half-open instance waits for another request as its probe."""
    instances = availabilities(1)
    instance = instances[1]
    instance.failed(instance.started(-10.0), -10.0)
    assert instance.breaker.state(0.0) == "half-open"
    request(instances, [(0, "error", "decode"), (1, "error", "decode"), (1, "answered", "decode")], 200)
    assert instance.breaker.state(0.0) == "half-open"
    assert instance.breaker.allows(0.0)


# Behind a gateway


async def dropped(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
    """Break the connection off without a response."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def dropped_after_the_head(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
    """Break the connection off before the first byte of the body."""
    response = await start_stream(request)
    assert request.transport is not None
    request.transport.abort()
    return response


async def dropped_after_a_token(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
    """Break the connection off within the stream."""
    response = await start_stream(request)
    await response.write(event("a"))
    assert request.transport is not None
    request.transport.abort()
    return response


async def empty(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
    """End a stream without any token."""
    response = await start_stream(request)
    await response.write_eof()
    return response


async def invalid(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
    """Send what is no HTTP."""
    transport = request.transport
    assert transport is not None
    transport.write(b"\x00\xff" * 100)
    transport.close()
    return web.Response()


DROPS: dict[str, Serve] = {
    "at-once": dropped,
    "after-the-head": dropped_after_the_head,
    "after-a-token": dropped_after_a_token,
    "empty-stream": empty,
    "invalid": invalid,
}


def poisonous(gate: Gate | None = None, harm: Serve | None = None) -> Serve:
    """Return a handler that fails every request with the marker, once the gate is open; by default with a 500."""

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        if MARKER not in received.body:
            return await tokens(engine, request, received)
        if gate is not None:
            await gate.open.wait()
        return await (harm or failing(500))(engine, request, received)

    return serve


def up(front: RunningGateway) -> list[str]:
    """Return the names of the available instances."""
    return sorted(name for name, engine in front.gateway.runtime.engines.items() if engine.availability.up)


def received(engines: list[Engine]) -> int:
    """Return the number of requests that have reached the engines."""
    return sum(len(engine.received) for engine in engines)


def poison(number: int) -> dict[str, object]:
    return completion(prompt=f"{MARKER.decode()} {number}") | {"input": f"{MARKER.decode()} {number}"}


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("failing_side", ["prefill", "decode", "both"])
def test_ten_concurrent_poison_requests_fail_no_other_request(path: str, failing_side: str) -> None:
    """All ten requests are on the engines before the first one is answered, with default settings, three times in a
    row."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            for turn in range(3):
                gate = Gate()
                failing_engines = {"prefill": prefill, "decode": decode, "both": prefill + decode}[failing_side]
                for engine in failing_engines:
                    engine.serve = poisonous(gate)
                for engine in prefill + decode:
                    engine.received.clear()
                sent = [asyncio.create_task(front.post(poison(10 * turn + n), path)) for n in range(10)]
                assert await becomes_true(lambda: received(prefill + decode) >= 10)
                gate.open.set()
                others = [front.post(completion(prompt=f"{turn} {n}") | {"input": "x"}, path) for n in range(20)]
                assert {response.status for response in await asyncio.gather(*others)} == {200}
                statuses = {response.status for response in await asyncio.gather(*sent)}
                assert statuses <= ({200, 502} if path == EMBEDDINGS else {502})
                assert up(front) == ["decode0", "decode1", "prefill0", "prefill1"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("how", DROPS)
@pytest.mark.parametrize("attempts", [1, 3])
def test_requests_that_make_engines_drop_the_connection_fail_no_other_request(how: str, attempts: int) -> None:
    """They come in bursts of more than what opens a breaker, with and without retries. Without, nothing tells whether
    the engine or the request is at fault, so they are few: less than half of each engine's requests, even if one gets
    most of the others."""
    burst = 20 if attempts > 1 else 10

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = poisonous(harm=DROPS[how])
        section = RARE_CHECKS + f"  retries: {{attempts: {attempts}}}\n"
        async with stub_rig(prefill + decode, section) as front:
            for turn in range(3):
                others = [front.post(completion(prompt=f"{turn} {n}", stream=True)) for n in range(60)]
                assert {response.status for response in await asyncio.gather(*others)} == {200}
                poisons = [front.post(poison(turn * 20 + n) | {"stream": True}) for n in range(burst)]
                statuses = {response.status for response in await asyncio.gather(*poisons)}
                assert statuses == ({200} if how == "after-a-token" else {502})
                assert up(front) == ["decode0", "decode1", "prefill0", "prefill1"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("how", ["at-once", "after-the-head", "empty-stream", "invalid"])
def test_an_engine_that_drops_what_another_one_answers_is_soon_excluded(how: str) -> None:
    """It counts as an engine that does not answer, so few requests suffice."""

    async def main() -> None:
        engines = [Engine(f"engine{number}", "both") for number in range(2)]
        engines[0].serve = DROPS[how]
        async with stub_rig(engines, RARE_CHECKS) as front:
            for number in range(200):
                assert (await front.post(completion(prompt=f"{number}", stream=True))).status == 200
                if "engine0" not in up(front):
                    break
            assert up(front) == ["engine1"]
            assert len(engines[0].received) <= 2 * FAILURES, "each may be repeated on a new connection"
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("section", ["{}", "{attempts: 1}", "{share: 0, floor_per_s: 0}"])
@pytest.mark.parametrize("status", [500, 503])
def test_an_engine_that_always_fails_is_soon_excluded(section: str, status: int) -> None:
    """The engine is the only one or one of two; retries are on, off, or not covered by the budget."""

    async def main(count: int) -> None:
        engines = [Engine(f"engine{number}", "both") for number in range(count)]
        engines[0].serve = failing(status)
        async with stub_rig(engines, f"{RARE_CHECKS}  retries: {section}\n") as front:
            for number in range(200):
                await front.post(completion(prompt=f"{number}"))
                if "engine0" not in up(front):
                    break
            assert up(front) == [engine.name for engine in engines[1:]]
            assert len(engines[0].received) <= 4 * FAILURES * (3 if count == 1 and section == "{}" else 1)
            assert await front.becomes_idle(), front.held_resources()

    run(main(1))
    run(main(2))


def test_a_request_that_failed_on_one_instance_is_not_a_probe_of_another() -> None:
    """The decode leg of such a request goes to a half-open instance, which waits for the outcome of another request."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        gate, left = Gate(), [1]

        async def once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            left[0] -= 1
            return await failing(500, times=left[0] + 1)(engine, request, received)

        for engine in prefill:
            engine.serve = once
        decode[0].serve = gate.before(tokens)
        async with stub_rig(prefill + decode[:1], RARE_CHECKS + "  breaker: {open: 1 ms}\n") as front:
            availability = front.gateway.runtime.engines["decode0"].availability
            now = front.gateway.now()
            for attempt in [availability.started(now) for _ in range(FAILURES)]:
                availability.failed(attempt, now)
            assert await front.becomes("decode0", False)
            assert await front.becomes("decode0", True)
            running = asyncio.create_task(front.post(completion()))
            await gate.entered.wait()
            assert availability.breaker.allows(front.gateway.now())
            gate.open.set()
            assert (await running).status == 200
            assert availability.breaker.state(front.gateway.now()) == "half-open"
            assert (await front.post(completion(prompt=f"{MODEL}"))).status == 200
            assert availability.breaker.state(front.gateway.now()) == "closed"

    run(main())
