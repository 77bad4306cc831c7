"""How the status of an engine's response is treated: by leg, who gets the request next, what the client receives, and
what counts against the instance. `serve/proxy/retry.py` decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.epp.envoy_rig import PickerRig, address, completion_body, picker
from tests.serve.rig import COMPLETIONS, RunningGateway
from tests.serve.stub_engines import (
    Engine,
    ReceivedRequest,
    Serve,
    completion,
    engines_of,
    run,
    start_stream,
    stub_rig,
)

EMBEDDINGS = "/v1/embeddings"
SECTION = "  health: {interval: 1 h, panic: 0}\n  scrape: {interval: 1 h}\n  retries: {floor_per_s: 1000}\n"
STRICT = SECTION + "  breaker: {failures: 1}\n"


@dataclass(frozen=True)
class Seen:
    """What follows if all engines respond with the same error, in the order of the columns of `TABLE`."""

    status: int
    """The status of the response to the client."""
    error: str
    """`type` of its error object."""
    retry_after: str | None
    calls: tuple[int, int]
    """Requests to prefill and to decode instances."""
    failures: int
    """Failed legs that the metrics count."""


def refusing(status: int, retry_after: str = "") -> Serve:
    """Return a handler that responds with an error of the engine."""

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        error = {"error": {"message": "the engine says no", "type": "of_engine", "code": status}}
        return web.json_response(error, status=status, headers={"Retry-After": retry_after} if retry_after else {})

    return serve


def error_event(code: int) -> Serve:
    """Return a handler whose stream begins with an error."""

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        error = {"error": {"message": "the engine says no", "type": "of_engine", "code": code}}
        await response.write(b"data: %b\n\n" % msgspec.json.encode(error))
        await response.write_eof()
        return response

    return serve


async def failed_legs(front: RunningGateway) -> int:
    lines = (await front.metrics()).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("kvroute_leg_failures_total{"))


async def seen(front: RunningGateway, engines: tuple[Sequence[Engine], Sequence[Engine]], body: Any, path: str) -> Seen:
    """Send a request, and return what follows."""
    before = await failed_legs(front)
    counts = [sum(len(engine.received) for engine in some) for some in engines]
    response = await front.post(body, path)
    assert await front.becomes_idle(), front.held_resources()
    calls = [sum(len(engine.received) for engine in some) - count for some, count in zip(engines, counts, strict=True)]
    failures = await failed_legs(front) - before
    error = response.json["error"]
    assert error["message"].endswith("the engine says no"), error
    return Seen(response.status, error["type"], response.headers.get("retry-after"), (calls[0], calls[1]), failures)


PASSED_ON = [404, 501]
"""What another instance would say, too: the client gets the response of the first one."""
FULL = [429, 503]
"""The instance has not begun: the KV cache stays as it is, and the client may try again later."""
BROKEN = [500, 504]


def expected(leg: str, status: int) -> Seen:
    """Return what follows if all instances of a leg respond with `status`; three attempts are allowed."""
    if status in PASSED_ON:
        return Seen(status, "of_engine", None, (1, 0) if leg in ("prefill", "passthrough") else (1, 1), 0)
    # A decode instance that is full has not fetched the KV cache, so that the prompt is not computed again, unless it
    # has accepted the request before it says so.
    full = status in FULL
    calls = {"prefill": (3, 0), "passthrough": (2, 1)}.get(leg, (1 if full and leg != "event" else 3, 3))
    return Seen(503 if full else 502, "upstream_error", "1" if full else None, calls, 3)


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream", "event", "passthrough"])
def test_what_follows_from_each_status(leg: str) -> None:
    """`event`: the stream of a decode leg begins with an error event."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        failing = {"prefill": prefill, "passthrough": prefill + decode}.get(leg, decode)
        body = completion(stream=leg in ("stream", "event"), input="x")
        path = EMBEDDINGS if leg == "passthrough" else COMPLETIONS
        async with stub_rig(prefill + decode, SECTION) as front:
            for status in PASSED_ON + FULL + BROKEN:
                for engine in failing:
                    engine.serve = error_event(status) if leg == "event" else refusing(status)
                found = await seen(front, (prefill, decode), body, path)
                assert (status, found) == (status, expected(leg, status))

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
def test_a_full_engine_tells_the_client_when_to_try_again(path: str) -> None:
    """Within a minute; a date, or nothing, is a second. The error of a broken engine has no such time."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, SECTION) as front:
            for status, said, told in (
                (429, "7", "7"),
                (503, "3600", "60"),
                (503, "0", "1"),
                (429, "Wed, 21 Oct 2026 07:28:00 GMT", "1"),
                (500, "7", None),
            ):
                for engine in prefill + decode:
                    engine.serve = refusing(status, said)
                found = await seen(front, (prefill, decode), completion(input="x"), path)
                assert (said, found.retry_after) == (said, told)

    run(main())


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream", "event", "passthrough"])
def test_which_status_counts_against_an_instance(leg: str) -> None:
    """A 5xx that another instance does not repeat does; not a 4xx, 429 among them, and not a 501."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        bad = (decode if leg in ("decode", "stream", "event") else prefill)[0]
        path = EMBEDDINGS if leg == "passthrough" else COMPLETIONS
        made = error_event if leg == "event" else refusing
        async with stub_rig(prefill + decode, STRICT) as front:
            available = front.gateway.runtime.engines[bad.name].availability

            async def tries(status: int, most: int) -> int:
                """Let the instance respond with `status` to so many requests at most, while it is up."""
                count = len(bad.received)
                bad.serve = made(status)
                for number in range(200):
                    body = completion(prompt=f"{number} words " * 20, stream=leg in ("stream", "event"), input="x")
                    await front.post(body, path)
                    if not available.up or len(bad.received) - count >= most:
                        break
                return len(bad.received) - count

            for status in (404, 429, 501):
                assert (status, await tries(status, 6), available.up) == (status, 6, True)
            assert (await tries(503, 6), available.up) == (4, False)  # four errors weigh as one missing response
            assert await front.becomes_idle(), front.held_resources()

    run(main())


PICKED = {
    # status of the engine, or of Envoy itself: whether so many of them open the breaker, and the failed legs of each
    (200, True): (False, 0),
    (404, True): (False, 0),
    (429, True): (False, 1),
    (500, True): (True, 1),
    (501, True): (False, 0),
    (503, True): (True, 1),
    (404, False): (False, 0),
    (429, False): (False, 0),
    (503, False): (True, 1),
}


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize(("status", "reached"), PICKED)
def test_a_status_that_envoy_reports_counts_as_in_the_gateway(path: str, status: int, reached: bool) -> None:
    """Envoy sends the response to the client. `reached`: an engine has sent it; otherwise Envoy itself has."""
    opens, failures = PICKED[status, reached]

    async def main() -> None:
        engines = [Engine("engine0", "both")]
        async with picker(engines, STRICT) as rig:
            for number in range(4):
                before = await failed_legs(rig)
                stream = rig.stream()
                answer = await stream.ask(completion_body(input="x"), path=path)
                assert not answer.status, number
                await stream.respond(status, address(engines[0]) if reached else "")
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
                assert await failed_legs(rig) - before == failures
                if not up(rig):
                    break
            assert up(rig) is not opens

    run(main())


def up(rig: PickerRig) -> bool:
    return rig.gateway.runtime.engines["engine0"].availability.up
