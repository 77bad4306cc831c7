"""Failures of a request by engines or by the gateway itself: which component is blamed, what is kept, what the client
receives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.serve.rig import CHAT, COMPLETIONS, MODEL, RunningGateway
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

from kvroute.http.headers import Headers
from kvroute.serve.observe.tracing import Attributes

EMBEDDINGS = "/v1/embeddings"
NOTHING: Attributes = {}
RARE_CHECKS = "  health: {interval: 1 h}\n  scrape: {interval: 1 h}\n"
STRICT_BREAKER = "  breaker: {failures: 2}\n  retries: {floor_per_s: 1000}\n"


def up(front: RunningGateway) -> list[str]:
    """Return the names of the available instances."""
    return sorted(name for name, engine in front.gateway.runtime.engines.items() if engine.availability.up)


def received(engines: Sequence[Engine]) -> int:
    return sum(len(engine.received) for engine in engines)


async def value(front: RunningGateway, line: str) -> float | None:
    """Return a sample of the metrics page, selected by the beginning of its line."""
    page = (await front.get("/metrics")).body.decode()
    samples = [text for text in page.splitlines() if text.startswith(line)]
    return float(samples[0].rpartition(" ")[2]) if samples else None


@pytest.mark.parametrize(("status", "prefills"), [(429, 1), (503, 1), (500, 2)])
def test_after_a_full_decode_engine_the_kv_is_fetched_by_another_one(status: int, prefills: int) -> None:
    """Another decode engine fetches the KV without a second prefill; after a 500 the KV may be lost, so the prefill is
    repeated."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        left = [1]

        async def once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            left[0] -= 1
            return await failing(status, times=left[0] + 1)(engine, request, received)

        for engine in decode:
            engine.serve = once
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            response = await front.post(completion())
            assert response.status == 200
            assert (received(prefill), received(decode)) == (prefills, 2)
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize(
    ("path", "status"), [(COMPLETIONS, 429), (COMPLETIONS, 501), (EMBEDDINGS, 429), (EMBEDDINGS, 501)]
)
def test_status_429_and_501_do_not_mark_an_engine_as_down(path: str, status: int) -> None:
    """The instances stay available, however often it happens; a 501 is passed on to the client at once."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = failing(status)
        async with stub_rig(prefill + decode, RARE_CHECKS + STRICT_BREAKER) as front:
            for n in range(8):
                before = received(prefill + decode)
                response = await front.post(completion() | {"input": f"{n}"}, path)
                assert response.status == (503 if status == 429 else 501)
                assert received(prefill + decode) - before == (3 if status == 429 else 1)
            assert len(up(front)) == 4
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
def test_a_request_that_fails_on_every_engine_makes_none_unavailable(path: str) -> None:
    """A poison request is blamed, not the engines that fail on it; repeated failures of one instance alone do count."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = failing(500)
        async with stub_rig(prefill + decode, RARE_CHECKS + STRICT_BREAKER) as front:
            for n in range(8):
                assert (await front.post(completion() | {"input": f"{n}"}, path)).status == 502
            assert len(up(front)) == 4
            for engine in prefill[1:] + decode:
                engine.serve = Engine("", "both").serve
            for n in range(40):
                assert (await front.post(completion(prompt=f"{n}") | {"input": f"{n}"}, path)).status == 200
                if len(up(front)) < 4:
                    break
            assert up(front) == ["decode0", "decode1", "prefill1"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize(
    ("section", "calls"),
    [("attempts: 1", 1), ("attempts: 2", 2), ("share: 0, floor_per_s: 0", 1), ("attempts: 9", 4)],
)
def test_passthrough_requests_follow_the_retry_settings(section: str, calls: int) -> None:
    """Attempts and budget are those of completions; failures and retries are counted; decode engines are tried last."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = failing(500)
        async with stub_rig(prefill + decode, f"{RARE_CHECKS}  retries: {{{section}}}\n") as front:
            response = await front.post({"model": MODEL, "input": "x"}, EMBEDDINGS)
            assert response.status == 502
            assert received(prefill + decode) == calls
            assert received(prefill) == min(calls, 2)
            failures = [
                await value(
                    front, f'kvroute_leg_failures_total{{leg="passthrough",engine="{engine.name}",kind="status"'
                )
                for engine in prefill + decode
            ]
            assert sum(count or 0 for count in failures) == calls
            assert (await value(front, 'kvroute_retries_total{leg="passthrough"}') or 0) == calls - 1
            assert await front.becomes_idle(), front.held_resources()

    run(main())


CHUNKS = [{"choices": [{"index": 0, "text": f"{n} \u00e4\u20ac"}]} for n in range(4)]


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_stream_events_split_anywhere_arrive_complete(size: int, end: str) -> None:
    """For every split of the engine's stream, the client receives the same bytes, an unterminated last event
    included."""
    text = "".join(f"data: {msgspec.json.encode(chunk).decode()}{end}" for chunk in CHUNKS) + "data: [DONE]"

    async def pieces(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        content = text.encode()
        for start in range(0, len(content), size):
            await response.write(content[start : start + size])
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = pieces
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            assert (await front.post(completion(stream=True))).body == text.encode()
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize(
    "extra", [b"", b'data: {"choi', event("half")[:-1]], ids=["between", "inside", "nearly-complete"]
)
def test_an_engine_that_dies_within_an_event_causes_no_incomplete_event(extra: bytes) -> None:
    """Each event that the client receives is complete JSON; the last one reports the error."""

    async def dying(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("one") + extra)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = dying
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            response = await front.post(completion(stream=True))
            first, last = response.events
            assert first["choices"][0]["text"] == "one"
            assert "closed the connection" in last["error"]["message"]
            assert await front.becomes_idle(), front.held_resources()
            assert front.gateway.state.tick(front.gateway.now() + 2.0).errors_per_s > 0, "the dashboard shows it"

    run(main())


def test_a_non_streaming_response_has_its_own_timeout() -> None:
    """No byte of a non-streaming response comes before its last token, so the timeout is `answer` and not
    `first_token`."""

    async def slow(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        await asyncio.sleep(1.0)
        return web.json_response({"choices": [], "usage": {"completion_tokens": 1}})

    async def hangs(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError("the gateway gives this request up")

    async def main(serve: Serve, section: str, status: int) -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = serve
        section = f"{RARE_CHECKS}  retries: {{attempts: 1}}\n  timeouts: {{{section}}}\n"
        async with stub_rig(prefill + decode, section) as front:
            assert (await front.post(completion())).status == status
            assert received(decode) == 1
            assert await front.becomes_idle(), front.held_resources()

    run(main(slow, "first_token: 300 ms", 200))
    run(main(hangs, "answer: 1 s", 504))


def test_only_streams_have_a_ttft() -> None:
    """For a non-streaming response neither this time nor the transfer time is known; the bytes of the transfer still
    count."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            assert (await front.post(completion())).status == 200
            for name in ("ttft_seconds", "ttft_part_seconds", "transfer_seconds"):
                assert await value(front, f"kvroute_{name}_count{{") is None
            assert await value(front, "kvroute_decode_first_byte_seconds_count") == 0
            assert await value(front, "kvroute_transfer_bytes_total") is not None
            [split] = front.gateway.state.snapshot(front.gateway.now()).tick.splits
            assert (split.requests, split.streams) == (1, 0)
            assert (await front.post(completion(stream=True))).status == 200
            for name in ("ttft_seconds", "ttft_part_seconds", "transfer_seconds"):
                assert await value(front, f"kvroute_{name}_count{{") == 1
            assert await value(front, "kvroute_decode_first_byte_seconds_count") == 1

    run(main())


def test_a_response_at_the_expected_transfer_time_is_reported_once() -> None:
    """The core receives one event for the start of decoding, although reporting that event also checks which transfers
    are due."""

    async def later(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        await asyncio.sleep(0.02)  # after the first expected step, before any check
        return web.json_response({"choices": [], "usage": {"completion_tokens": 1}})

    async def main() -> None:
        engine = Engine("engine", "both", serve=later)
        async with stub_rig([engine], RARE_CHECKS) as front:
            for n in range(5):
                assert (await front.post(completion(prompt=f"{n}"))).status == 200
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_an_unknown_model_is_not_found() -> None:
    """The error has OpenAI's form and no engine is called; leaving the model out when there are several is a client
    error too."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        section = f"{RARE_CHECKS}  models: {{big: {MODEL}}}\n"
        other = Engine("other", "both", model="llama-3-8b")
        async with stub_rig([*prefill, *decode, other], section) as front:
            for path in (COMPLETIONS, EMBEDDINGS):
                response = await front.post(completion(model="unknown-model") | {"input": "x"}, path)
                assert (response.status, response.json["error"]["code"]) == (404, "model_not_found")
                assert (await front.post(completion(model="big") | {"input": "x"}, path)).status == 200
            missing = completion()
            del missing["model"]
            assert (await front.post(missing)).status == 400
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT, {}, 4096),
        (CHAT, {"max_completion_tokens": 7}, 7),
        (COMPLETIONS, {"max_tokens": 10_000}, 4096),
        (COMPLETIONS, {"max_tokens": 0, "echo": True}, 0),
        (COMPLETIONS, {}, 16),
    ],
    ids=["chat", "chat-bound", "much", "none", "default"],
)
def test_output_tokens_are_reserved_for_unbounded_requests(
    path: str, fields: dict[str, int], tokens: int, tmp_path: Any
) -> None:
    """A chat without a bound on its output is booked with `reserve_output_tokens`."""
    log = tmp_path / "events.log"

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, f"{RARE_CHECKS}  log: {{events: {log}}}\n") as front:
            body = {"model": MODEL, "prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}
            assert (await front.post(body, path)).status == 200

    run(main())
    [arrived] = [line for line in log.read_text().splitlines() if '"arrived"' in line]
    assert msgspec.json.decode(arrived)["event"]["request"].get("max_output_tokens", 0) == tokens


class Failing:
    """A tracer with a broken exporter: it raises at one of its calls, for a request or for a leg."""

    replaced: frozenset[bytes] = frozenset()
    trace_id = ""
    head = b""

    def __init__(self, left: int) -> None:
        self.left = left

    def request(self, headers: Headers, name: str, attributes: Attributes = NOTHING) -> Failing:
        return self._count()

    def leg(self, name: str, attributes: Attributes = NOTHING) -> Failing:
        return self._count()

    def end(self, *args: Any, **more: Any) -> None:
        self._count()

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _count(self) -> Failing:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("the exporter is broken")
        return self


@pytest.mark.parametrize("kind", ["whole", "stream", "passed-on", "sglang"])
def test_an_internal_error_costs_only_its_request(kind: str) -> None:
    """At every place where it can occur, the client gets a 500 (or what was sent before), and all resources are
    released."""

    async def main() -> None:
        prefill, decode = engines_of("sglang" if kind == "sglang" else "vllm")
        path = EMBEDDINGS if kind == "passed-on" else COMPLETIONS
        body = completion(stream=kind in ("stream", "sglang")) | {"input": "x"}
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            errors: list[str] = []
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: errors.append(str(context["exception"]))
            )
            statuses, failures = [], 0
            for number in range(20):
                front.gateway.runtime.tracer = tracer = Failing(number)
                response = await front.post(body, path)
                statuses.append(response.status)
                if response.status == 200:
                    assert response.body
                assert await front.becomes_idle(), (number, front.held_resources())
                if tracer.left >= 0:
                    break
                failures += 1
            assert statuses[0] == 500
            assert statuses[-1] == 200
            assert failures == (4 if kind == "passed-on" else 6)
            assert errors == ["the exporter is broken"] * failures
            assert len(up(front)) == 4

    run(main())


def test_an_internal_error_aborts_the_other_leg() -> None:
    """The other leg of the request is aborted."""

    async def main() -> None:
        prefill, decode = engines_of("sglang")
        gate = Gate()
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            front.gateway.runtime.tracer = Failing(3)  # the end of the decode leg
            response = await front.post(completion(stream=True))
            assert response.events[-1]["error"]["message"] == "internal error in the gateway"
            await gate.left.wait()
            assert gate.cancelled
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_an_internal_error_at_the_start_releases_its_place() -> None:
    """With a limit of one request, the next request is admitted."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, RARE_CHECKS + "  limits: {in_flight: 1}\n") as front:
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            for number in range(3):
                front.gateway.runtime.tracer = Failing(number)
                responses = await asyncio.gather(*[front.post(completion()) for _ in range(3)])
                assert sorted(response.status for response in responses) == [200, 200, 500]
                assert "internal error in the gateway" in next(
                    a.json["error"]["message"] for a in responses if a.status == 500
                )
            assert await front.becomes_idle(), front.held_resources()

    run(main())
