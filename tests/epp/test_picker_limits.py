"""Limits of the picker for requests that are too long, too slow or too many: those of the gateway's HTTP server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.envoy_rig import Answer, EnvoyStream, alone, completion_body, message_headers, picker
from tests.gateway.stub_engines import run
from tests.waiting import becomes_true

from kvroute.epp.envoy_pb2 import (
    FULL_DUPLEX_STREAMED,
    NONE,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProtocolConfiguration,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)
from kvroute.epp.messages import ACCESS_LOGS, PROCESS, other_bytes

HEAD = (":method", "POST"), (":path", "/v1/completions")


async def begin(stream: EnvoyStream, *headers: tuple[str, str], body: bytes | None = None) -> None:
    """Send headers, and the beginning of a body."""
    config = ProtocolConfiguration(request_body_mode=FULL_DUPLEX_STREAMED, response_body_mode=NONE)
    sent = HttpHeaders(headers=message_headers([*HEAD, *headers]))
    await stream.send(request_headers=sent, protocol_config=config)
    if body is not None:
        await stream.send(request_body=HttpBody(body=body))


async def answer_of(stream: EnvoyStream) -> Answer:
    """Return the answer, after which the picker has ended the stream."""
    answer = await stream.answer(True)
    assert await stream.call.read() is grpc.aio.EOF
    return answer


@pytest.mark.parametrize("sent", ["nothing", "headers", "half a body"])
def test_a_request_that_does_not_arrive_in_time_is_408(sent: str) -> None:
    """Within `header_time` and `body_time`; nothing of it stays."""

    async def main() -> None:
        async with picker(alone(1), "  limits: {header_time: 0.1 s, body_time: 0.1 s}\n") as rig:
            stream = rig.stream()
            if sent != "nothing":
                await begin(stream, body=b"x" * 100_000 if sent == "half a body" else None)
            answer = await answer_of(stream)
            assert (answer.status, answer.headers["content-type"]) == (408, "application/json")
            what = b"headers" if sent == "nothing" else b"body"
            assert b"the request's %b did not arrive in time" % what in answer.body
            assert await becomes_true(lambda: rig.gateway.state.tick(rig.gateway.now()).load.connections == 0)
            assert 'kvroute_rejects_total{reason="too_slow"} 1' in await rig.metrics()

    run(main())


def test_a_request_whose_sender_reads_no_reply_ends() -> None:
    """Within `stall`; gRPC holds no more of a reply than its window."""

    async def main() -> None:
        async with picker(alone(1), "  limits: {stall: 0.1 s}\n") as rig:
            stream = rig.stream()
            await stream.ask_only(completion_body(prompt="x" * 8_000_000))
            assert await becomes_true(lambda: rig.gateway.state.tick(rig.gateway.now()).load.connections == 0)
            assert await rig.becomes_idle(), rig.held_resources()
            assert (await rig.stream().ask(completion_body())).destination

    run(main())


def test_streams_are_bounded() -> None:
    """One more gets 429 at once, and the next one after the end of another is served."""

    async def main() -> None:
        async with picker(alone(1), "  limits: {connections: 3}\n") as rig:
            streams = [rig.stream() for _ in range(3)]
            for stream in streams:
                await begin(stream, body=b"{")
            assert await becomes_true(lambda: rig.gateway.state.tick(rig.gateway.now()).load.connections == 3)
            refused = await answer_of(rig.stream())
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert b"the picker has reached its limit of requests" in refused.body
            streams[0].call.cancel()
            assert await becomes_true(lambda: rig.gateway.state.tick(rig.gateway.now()).load.connections == 2)
            assert (await rig.stream().ask(completion_body())).destination

    run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(f"x-{number}", "y") for number in range(100)], 0),
        ([(f"x-{number}", "y") for number in range(200)], 431),
        ([(f"x-{number}", "y") for number in range(200_000)], 431),
        ([("x", "y" * 60_000)], 0),
        ([("x", "y" * 70_000)], 431),
        ([("x", "y" * 3_000_000)], 431),
        ([("x", "y\r\nevil: 1")], 400),
        ([("x\n", "y")], 400),
        ([("x-ä", "y")], 0),
    ],
    ids=["100", "200", "200,000", "60 KB", "70 KB", "3 MB", "CRLF", "LF in a name", "not ASCII"],
)
def test_headers_are_bounded_and_can_be_sent_on(headers: list[tuple[str, str]], status: int) -> None:
    """Before they are read one by one."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            stream = rig.stream()
            await begin(stream, *headers)
            if status:
                assert (await answer_of(stream)).status == status
            else:
                await stream.send(request_body=HttpBody(body=completion_body(), end_of_stream=True))
                assert (await stream.answer(True)).destination

    run(main())


async def details_of(channel: Any, *messages: bytes) -> str:
    """Send raw messages, and return the reason for which the picker ends the stream."""
    call = channel.stream_stream(PROCESS)()
    for message in messages:
        await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_what_is_no_message_of_envoy_ends_the_stream_with_one_sentence() -> None:
    """Also a request whose body Envoy sends past the picker: nothing could be removed from it."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            assert "ext_proc" in await details_of(rig.channel, b"\xff" * 100)
            assert "request_header_mode: SEND" in await details_of(rig.channel, b"")
            head = HttpHeaders(headers=message_headers([(":method", "POST"), (":path", "/v1/audio/x")]))
            unseen = ProcessingRequest(
                request_headers=head, protocol_config=ProtocolConfiguration(request_body_mode=NONE)
            )
            assert "request_body_mode: FULL" in await details_of(rig.channel, unseen.SerializeToString())
            head.end_of_stream = True
            whole = rig.stream()
            await whole.send(request_headers=head, protocol_config=ProtocolConfiguration(request_body_mode=NONE))
            assert (await whole.answer(False)).destination

    run(main())


def test_a_response_of_envoy_to_a_request_that_no_filter_has_seen_is_unchanged() -> None:
    """Such as status 431; the client would get no response if the picker ended the stream with an error."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            stream = rig.stream()
            assert (await stream.respond(431)).HasField("response_headers")
            await stream.end()

    run(main())


def test_a_status_that_is_none_counts_as_a_failure() -> None:
    """It may have any number of digits."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            sent = HttpHeaders(headers=message_headers([(":status", "9" * 5000)]))
            await stream.send(request_headers=None, response_headers=sent)
            assert (await stream.read()).HasField("response_headers")
            await stream.end()
            assert answer.destination
            assert await rig.becomes_idle()

    run(main())


def test_a_long_message_of_the_access_log_is_skipped() -> None:
    """And the next one is read."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            log = rig.channel.stream_unary(ACCESS_LOGS, response_deserializer=StreamAccessLogsResponse.FromString)()
            entry: dict[str, Any] = {
                "commonProperties": {"upstreamRemoteAddress": {"socketAddress": {"address": "::1"}}}
            }
            for count in (300, 100_000, 1):
                message = json_format.ParseDict({"httpLogs": {"logEntry": [entry] * count}}, StreamAccessLogsMessage())
                await log.write(message.SerializeToString())
            await log.done_writing()
            assert isinstance(await log, StreamAccessLogsResponse)

    run(main())


BODIES = st.builds(HttpBody, body=st.binary(max_size=300), end_of_stream=st.booleans())
MESSAGES = st.one_of(
    st.builds(ProcessingRequest, request_body=BODIES),
    st.builds(ProcessingRequest, response_body=BODIES),
    st.builds(ProcessingRequest, request_trailers=st.just(HttpTrailers())),
    st.builds(ProcessingRequest, request_headers=st.builds(HttpHeaders, headers=st.just(message_headers(HEAD)))),
)


@given(MESSAGES, st.binary(max_size=20))
def test_the_size_beside_the_body_is_known_before_a_message_is_parsed(message: ProcessingRequest, more: bytes) -> None:
    """It is never more than the message, and for a body only what precedes and follows it."""
    raw = message.SerializeToString() + more
    size = other_bytes(raw)
    assert 0 <= size <= len(raw)
    if message.WhichOneof("request") in ("request_body", "response_body"):
        assert size <= 4 + len(more)
    else:
        assert size == len(raw)
    assert other_bytes(more) <= len(more)
