"""Streams through the whole gateway: what precedes the first token, how tokens are counted, and when a stream is
complete."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.proxy.test_forwarded_streams import FORMATS, WITHOUT, Source, forwarded, source_of
from tests.serve.rig import COMPLETIONS, GatewayResponse, RunningGateway
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    Serve,
    completion,
    engines_of,
    event,
    run,
    start_stream,
    stub_rig,
)
from tests.waiting import until

from kvroute.control.log import read_log
from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.api.requests import Kind, read_completion
from kvroute.serve.api.streams import STREAMS, reported, with_usage
from kvroute.types import Finished

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
ERRORS: dict[str, bytes] = {
    "plain": b'data: {"error": {"message": "boom"}}\n\n',
    "without-a-space": b'data:{"error":{"message":"boom"}}\n\n',
    "not-the-first-key": b'data: {"id": "a", "error": {"message": "boom"}}\n\n',
    "object": b'data: {"message": "boom", "object": "error"}\n\n',
    "event": b"event: error\ndata: boom\n\n",
    "event-without-a-space": b"event:error\ndata:{}\n\n",
    "crlf": b'event: error\r\ndata: {"error": {}}\r\n\r\n',
    "after-a-comment": b': keep-alive\ndata: {"error": {"message": "boom"}}\n\n',
}
NO_TOKEN: dict[str, bytes] = {
    "nothing": b"",
    "comments": COMMENT * 3,
    "crlf-comments": b": keep-alive\r\n\r\n" * 3,
    "done": DONE,
    "usage": b'data: {"choices": [], "usage": {"completion_tokens": 0}}\n\n' + DONE,
    "empty-events": b"data:\n\nevent: ping\n\n",
}


def sending(parts: Sequence[bytes]) -> Serve:
    """Return a handler that sends these parts of a stream one after the other."""

    async def serve(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        for part in parts:
            await response.write(part)
        await response.write_eof()
        return response

    return serve


def outputs(log: Path) -> list[int | None]:
    """Return the numbers of output tokens in an event log."""
    return [record.event.output_tokens for record in read_log(log)[1] if isinstance(record.event, Finished)]


async def counted(front: RunningGateway, name: str) -> float:
    """Return the sum over all labels of a counter on the metrics page."""
    lines = (await front.metrics()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")))


# Before the first token


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_after_comments_is_retried(kind: str, error: str) -> None:
    path, body, preamble, token, last = FORMATS[kind]

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        answer = [*preamble, token(1), last]
        failed: list[str] = []

        async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if not failed:
                failed.append(engine.name)
                return await sending([COMMENT, *preamble, ERRORS[error]])(engine, request, received)
            return await sending(answer)(engine, request, received)

        for engine in decode:
            engine.serve = serve
        async with stub_rig(prefill + decode) as front:
            response = await front.post(body, path)
            assert (response.status, response.body) == (200, b"".join(answer))
            assert await counted(front, "kvroute_retries_total") == 1
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("sent", NO_TOKEN)
def test_a_stream_without_a_token_is_a_failure(kind: str, sent: str) -> None:
    path, body, *_ = FORMATS[kind]

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = sending([NO_TOKEN[sent]])
        async with stub_rig(prefill + decode) as front:
            response = await front.post(body, path)
            assert response.status == 502
            assert "ended the stream before its first token" in response.json["error"]["message"]
            assert await counted(front, "kvroute_ttft_seconds_count") == 0
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("empty", [b":\n\n", b":\r\n\r\n", b"data:\n\n", b"event: ping\n\n"], ids=str)
@pytest.mark.parametrize(("count", "status"), [(10_000, 200), (20_000, 502)])
def test_events_before_the_first_token_are_bounded(empty: bytes, count: int, status: int) -> None:
    """Each of them takes time on the event loop, however small it is."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        rest = [event("a"), DONE]
        for engine in decode:
            engine.serve = sending([*[empty * 1000] * (count // 1000), *rest])
        async with stub_rig(prefill + decode, "  retries: {attempts: 1}\n") as front:
            response = await front.post(completion(stream=True))
            assert response.status == status
            if status == 200:
                assert response.body == empty * count + b"".join(rest)
            else:
                assert "sent too much before its first token" in response.json["error"]["message"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("sent", [COMMENT, b'data: {"choices": []}\n\n'], ids=["comments", "events"])
def test_what_has_no_token_does_not_end_the_wait_for_the_first_one(sent: bytes) -> None:
    async def serve(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        while True:
            await response.write(sent)
            await asyncio.sleep(0.01)

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = serve
        async with stub_rig(prefill + decode, "  timeouts: {first_token: 200 ms}\n  retries: {attempts: 1}\n") as front:
            response = await front.post(completion(stream=True))
            assert response.status == 504
            assert "did not respond in time" in response.json["error"]["message"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("section", ["", WITHOUT], ids=["thread", "event-loop"])
@pytest.mark.parametrize("alone", [True, False], ids=["chunks", "pieces"])
def test_comments_do_not_end_the_wait_for_the_next_token(section: str, alone: bool) -> None:
    """Also if a comment and its end arrive separately."""

    async def serve(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        for _turn in range(12):
            await response.write(event("a"))
            await asyncio.sleep(0.001)
        while True:
            await response.write(COMMENT if alone else b": keep-alive\r\n\r\n")
            await asyncio.sleep(0.01)

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = serve
        async with stub_rig(prefill + decode, section + "  timeouts: {between_tokens: 500 ms}\n") as front:
            response = await front.post(completion(stream=True))
            assert b'"error"' in response.body.rpartition(b"data: ")[2]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_the_first_token_is_the_first_event_with_one() -> None:
    """Nothing reaches the client and no TTFT is measured before it."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        gate = Gate()

        async def serve(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(COMMENT)
            await gate.wait()
            await response.write(event("a") + DONE)
            await response.write_eof()
            return response

        for engine in decode:
            engine.serve = serve
        async with stub_rig(prefill + decode) as front:
            task = asyncio.create_task(front.post(completion(stream=True)))
            await gate.entered.wait()
            entered_s = front.gateway.now()
            await until(lambda: front.gateway.now() > entered_s + 0.3)
            assert await counted(front, "kvroute_ttft_seconds_count") == 0
            gate.open.set()
            assert (await task).body == COMMENT + event("a") + DONE
            assert await counted(front, "kvroute_ttft_seconds_count") == 1
            assert await counted(front, "kvroute_ttft_seconds_sum") >= 0.3

    run(main())


# Tokens


def usage_event(tokens: int, choices: str = "") -> bytes:
    usage = {"prompt_tokens": 120, "completion_tokens": tokens, "total_tokens": 120 + tokens}
    return b'data: {"id":"a","choices":[%b],"usage":%b}\n\n' % (choices.encode(), msgspec.json.encode(usage))


EIGHT = [event("a b c d "), event("e f g h ")]
CONTINUOUS = [usage_event(4, '{"index":0,"text":"a b c d "}'), usage_event(8, '{"index":0,"text":"e f g h "}')]


@pytest.mark.parametrize("section", ["", WITHOUT], ids=["thread", "event-loop"])
@pytest.mark.parametrize(
    ("asked", "sent", "shown"),
    [
        (None, [*EIGHT, usage_event(8), DONE], [*EIGHT, DONE]),
        ({"include_usage": False}, [*EIGHT, usage_event(8) + DONE], [*EIGHT, DONE]),
        (None, [EIGHT[0], EIGHT[1] + usage_event(8) + DONE], [*EIGHT, DONE]),
        ({"include_usage": True}, [*EIGHT, usage_event(8), DONE], [*EIGHT, usage_event(8), DONE]),
        ({"include_usage": True, "continuous_usage_stats": True}, [*CONTINUOUS, DONE], [*CONTINUOUS, DONE]),
        (None, [*EIGHT * 8, usage_event(64), DONE], [*EIGHT * 8, DONE]),
        (None, [*EIGHT * 8, DONE], [*EIGHT * 8, DONE]),
    ],
    ids=["not-asked", "declined", "one-chunk", "asked", "continuous", "long", "not-reported"],
)
def test_the_last_usage_counts_and_the_client_gets_what_it_asked_for(
    section: str, asked: dict[str, bool] | None, sent: list[bytes], shown: list[bytes], tmp_path: Path
) -> None:
    tokens = {8: 8, 2: 8}.get(len(shown) - 1, 64 if usage_event(64) in sent else len(shown) - 1)
    tokens = 8 if asked is not None else tokens

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = source_of(decode)
        log = f"  log: {{events: {tmp_path}/events.jsonl}}\n"
        async with stub_rig(prefill + decode, section + log) as front:
            more = {"stream_options": asked} if asked is not None else {}
            source.events.put_nowait(sent[0])
            async with front.session.post(front.url + COMPLETIONS, json=completion(stream=True, **more)) as response:
                received = await response.content.readexactly(len(sent[0]))
                for number, part in enumerate(sent[1:], 1):
                    source.events.put_nowait(part)
                    if number + 1 < len(sent) and part in shown:
                        received += await response.content.readexactly(len(part))
                received += await response.content.read()
            assert received == b"".join(shown)
            assert await front.becomes_idle(), front.held_resources()
            [leg] = [request for engine in decode for request in engine.received]
            assert leg.json["stream_options"] == (asked or {}) | {"include_usage": True}
            assert await counted(front, "kvroute_relayed_bytes_total") == len(received)
        assert outputs(tmp_path / "events.jsonl") == [tokens]

    run(main())


@pytest.mark.parametrize(
    ("kind", "last", "tokens"),
    [
        ("responses", b'"response":{"usage":{"input_tokens":3,"output_tokens":9,"total_tokens":12}}', 9),
        ("messages", b'"usage":{"output_tokens":9}', 9),
    ],
)
@pytest.mark.parametrize("section", ["", WITHOUT], ids=["thread", "event-loop"])
def test_conversations_report_their_usage_themselves(
    kind: str, last: bytes, tokens: int, section: str, tmp_path: Path
) -> None:
    path, body, preamble, token, end = FORMATS[kind]
    name, _, document = end.partition(b"data: ")
    usage = name.replace(b"message_stop", b"message_delta") + b"data: {" + last + b"," + document[1:]
    sent = [*preamble, *[token(n) for n in range(12)], usage, *([end] if kind == "messages" else [])]

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = sending(sent)
        log = f"  log: {{events: {tmp_path}/events.jsonl}}\n"
        async with stub_rig(prefill + decode, section + log) as front:
            assert (await front.post(body, path)).body == b"".join(sent)
            [leg] = [request for engine in decode for request in engine.received]
            assert "stream_options" not in leg.json
        assert outputs(tmp_path / "events.jsonl") == [tokens]

    run(main())


KEYS = {"alice": "kvr_alice", "bob": "kvr_bob"}
RATED = (
    "  keys: {known: {"
    + ", ".join(f'{name}: "{hash_text(key)}"' for name, key in KEYS.items())
    + "}, classes: {alice: small}}\n  classes: {default: {}, small: {tokens_per_minute: 300}}\n"
)


async def ask(front: RunningGateway, name: str, **more: object) -> GatewayResponse:
    return await front.post(completion(**more), headers={"Authorization": f"Bearer {KEYS[name]}"})


def test_a_key_pays_for_the_tokens_that_engines_report() -> None:
    """Prompt and output of a stream together, whatever its number of events is."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = sending([*EIGHT, usage_event(3_000), DONE])
        async with stub_rig(prefill + decode, RATED) as front:
            assert (await ask(front, "alice", stream=True)).status == 200
            assert await front.becomes_idle(), front.held_resources()
            refused = await ask(front, "alice", stream=True)
            assert refused.status == 429
            assert 400 < int(refused.headers["retry-after"]) <= (3_120 - 300 + 103) / 5

    run(main())


@pytest.mark.parametrize("reports", [False, True], ids=["usual", "reported"])
def test_a_client_that_leaves_pays_for_what_is_known_of_its_tokens(reports: bool) -> None:
    """What the engine has reported within the stream; else one earlier stream, with 64 tokens or more in each event, is
    enough to know better than the number of events."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        [engine] = decode[:1]
        engine.serve = sending([*EIGHT, usage_event(200), DONE])
        async with stub_rig([*prefill, engine], RATED) as front:
            if not reports:
                assert (await ask(front, "bob", stream=True)).status == 200
            source = source_of([engine])
            sent = usage_event(400, '{"index":0,"text":"a"}') if reports else event("a") * 10
            source.events.put_nowait(sent)
            headers = {"Authorization": f"Bearer {KEYS['alice']}"}
            options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if reports else {}
            request = completion(stream=True, **options)
            async with front.session.post(front.url + COMPLETIONS, json=request, headers=headers) as response:
                await response.content.readexactly(len(sent))
            while front.requests:
                source.events.put_nowait(event("a"))
                await asyncio.sleep(0.001)
            assert (await ask(front, "alice", stream=True)).status == 429

    run(main())


sizes = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(st.sampled_from(["completions", "chat"]), sizes, st.booleans(), st.booleans(), st.data())
def test_hiding_the_usage_changes_nothing_else(
    kind: Kind, words: list[int], continuous: bool, crlf: bool, data: st.DataObject
) -> None:
    """Law: however events are grouped, the client gets the events of an engine that was not asked for the usage."""
    plain, asked, total = list[bytes](), list[bytes](), 0
    for count in words:
        total += count
        choice = {"index": 0, "text": 'a_tokens": 7 ' * count}
        plain.append(b"data: %b\n\n" % msgspec.json.encode({"id": "x", "choices": [choice]}))
        usage = {"usage": {"completion_tokens": total}} if continuous else {}
        asked.append(b"data: %b\n\n" % msgspec.json.encode({"id": "x", "choices": [choice]} | usage))
    asked += [usage_event(total), DONE]
    plain.append(DONE)
    if crlf and not continuous:
        asked, plain = ([piece.replace(b"\n", b"\r\n") for piece in some] for some in (asked, plain))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(asked)))))
    pieces = [b"".join(asked[a:b]) for a, b in zip([0, *cuts], [*cuts, len(asked)], strict=True)]
    found = [reported(piece, hidden=True) for piece in pieces]
    assert b"".join(shown for _, shown in found) == b"".join(plain)
    last = [usage for usage, _ in found if usage is not None][-1]
    assert (last.prompt_tokens, last.output_tokens) == (120, total)
    assert [reported(piece, hidden=False)[1] for piece in pieces] == pieces


@given(
    st.sampled_from(sorted(STREAMS)),
    st.lists(
        st.sampled_from([*NO_TOKEN.values(), *ERRORS.values(), b'data: {"choices":[{}]}\n\n', b"data: x\n\n"]),
        max_size=6,
    ),
    st.data(),
)
def test_the_first_event_is_found_however_events_are_grouped(
    kind: Kind, events: list[bytes], data: st.DataObject
) -> None:
    form, whole = STREAMS[kind], b"".join(events)
    place, role = form.first(whole)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)))))
    at = 0
    for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        piece = b"".join(events[start:end])
        inside, found = form.first(piece)
        if found != "preamble":
            assert (at + inside, found) == (place, role)
            return
        at += len(piece)
    assert role == "preamble"


@pytest.mark.parametrize("options", [b"7", b'"a"', b"[]", b'{"include_usage":true}', b'{"include_usage": true}'])
def test_options_that_ask_already_or_are_invalid_stay_as_they_are(options: bytes) -> None:
    body = b'{"prompt":"a","stream":true,"stream_options":%b}' % options
    request = read_completion(b"/v1/completions", body)
    assert with_usage(request) == (request, False)


# The end


@pytest.mark.parametrize("section", ["", WITHOUT], ids=["thread", "event-loop"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", [2, 40])
def test_a_client_that_closes_after_the_last_event_has_its_whole_response(
    kind: str, section: str, length: int, tmp_path: Path
) -> None:
    """The engine has not ended the body yet. The request counts as answered, with its output."""
    path, body, preamble, token, last = FORMATS[kind]

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = OpenEnded()
        for engine in decode:
            engine.serve = source.serve
        log = f"  log: {{events: {tmp_path}/events.jsonl}}\n"
        async with stub_rig(prefill + decode, section + log) as front:
            sent = b"".join([*preamble, token(0)])
            source.events.put_nowait(sent)
            async with front.session.post(front.url + path, json=body) as response:
                await response.content.readexactly(len(sent))
                for number in range(1, length):
                    source.events.put_nowait(token(number))
                    await response.content.readexactly(len(token(number)))
                if not section and length > 20:
                    await until_forwarded(front)
                source.events.put_nowait(last)
                await response.content.readexactly(len(last))
                reset(response)
            assert await front.becomes_idle(), front.held_resources()
            page = await front.metrics()
            assert f'kvroute_requests_total{{endpoint="{kind}",code="200"}} 1' in page
            assert await counted(front, "kvroute_client_disconnects_total") == 0
        assert outputs(tmp_path / "events.jsonl") == [length]

    run(main())


def reset(response: aiohttp.ClientResponse) -> None:
    """Close the connection so that the gateway detects it at once."""
    assert response.connection is not None
    transport = response.connection.transport
    assert transport is not None
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class OpenEnded(Source):
    """A stream whose body goes on after its last event."""

    async def serve(self, _: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        while (data := await self.events.get()) is not None:
            await response.write(data)
        return response


async def until_forwarded(front: RunningGateway) -> None:
    """Wait until the thread has the stream."""
    while not await forwarded(front):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_client_that_closes_before_the_last_event_has_left(kind: str) -> None:
    path, body, preamble, token, _ = FORMATS[kind]

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = OpenEnded()
        for engine in decode:
            engine.serve = source.serve
        async with stub_rig(prefill + decode) as front:
            sent = b"".join([*preamble, token(0), token(1)])
            source.events.put_nowait(sent)
            async with front.session.post(front.url + path, json=body) as response:
                await response.content.readexactly(len(sent))
                reset(response)
            assert await front.becomes_idle(), front.held_resources()
            assert f'kvroute_requests_total{{endpoint="{kind}",code="499"}} 1' in await front.metrics()

    run(main())
