"""Limits of the picker for requests that are too long, too slow or too many: those of the gateway's HTTP server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.envoy_rig import Answer, EnvoyStream, PickerRig, alone, completion_body, message_headers, picker
from tests.serve.rig import COMPLETIONS
from tests.serve.stub_engines import run
from tests.waiting import becomes_true

from kvroute.epp.envoy_pb2 import (
    FULL_DUPLEX_STREAMED,
    NONE,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
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


def connections(rig: PickerRig) -> int:
    """Return the number of streams."""
    return rig.gateway.state.tick(rig.gateway.now()).load.connections


def test_streams_are_bounded() -> None:
    """One more gets 429 at once, and the next one after the end of another is served."""

    async def main() -> None:
        async with picker(alone(1), "  limits: {connections: 3}\n") as rig:
            streams = [rig.stream() for _ in range(3)]
            for stream in streams:
                assert (await stream.ask(completion_body())).destination
            refused = await answer_of(rig.stream())
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert b"the picker has reached its limit of requests" in refused.body
            assert 'kvroute_rejects_total{reason="connection_limit"} 1' in await rig.metrics()
            streams[0].call.cancel()
            assert await becomes_true(lambda: connections(rig) == 2)
            assert (await rig.stream().ask(completion_body())).destination

    run(main())


def test_half_sent_requests_do_not_keep_others_out() -> None:
    """The oldest one is refused for a new one, and nothing of it stays."""

    async def main() -> None:
        async with picker(alone(1), "  limits: {connections: 100, body_time: 1 h}\n") as rig:
            streams = []
            for _ in range(500):
                streams.append(rig.stream())
                await begin(streams[-1], body=b"x" * 1000)
            client = rig.stream()
            assert (await client.ask(completion_body())).destination
            answers = [await answer_of(stream) for stream in streams[:401]]
            assert {(answer.status, answer.headers["retry-after"]) for answer in answers} == {(429, "1")}
            assert connections(rig) == 100
            for stream in (client, *streams):
                stream.call.cancel()
            assert await becomes_true(lambda: connections(rig) == 0)

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "section"),
    [
        (COMPLETIONS, completion_body(stream=True), "first_token: 0.1 s"),
        (COMPLETIONS, completion_body(), "answer: 0.1 s"),
        ("/tokenize", completion_body(), "prefill: 0.1 s"),
    ],
    ids=["stream", "response", "passthrough"],
)
def test_a_choice_after_which_no_response_begins_is_withdrawn(path: str, body: bytes, section: str) -> None:
    """With the timeouts of the gateway for an engine, and so that nothing stays booked."""

    async def main() -> None:
        async with picker(alone(1), f"  timeouts: {{connect: 0.1 s, {section}}}\n") as rig:
            stream = rig.stream()
            assert (await stream.ask(body, path=path)).destination
            answer = await answer_of(stream)
            assert (answer.status, b"did not respond in time" in answer.body) == (504, True)
            assert await becomes_true(lambda: connections(rig) == 0)
            assert await rig.becomes_idle(), rig.held_resources()
            assert rig.booked() == {}

    run(main())


@pytest.mark.parametrize("read", [True, False], ids=["reads the end", "reads nothing"])
def test_a_stream_that_goes_on_after_its_response_is_over_ends(read: bool) -> None:
    """Only its end may follow the end of the response."""

    async def main() -> None:
        async with picker(alone(1), "  limits: {body_time: 0.1 s}\n") as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            await stream.respond(200, answer.endpoints[0], ends=True)
            if read:
                assert await stream.call.read() is grpc.aio.EOF
                assert await stream.call.code() == grpc.StatusCode.OK
            assert await becomes_true(lambda: connections(rig) == 0)

    run(main())


def test_a_response_whose_body_stops_in_the_middle_ends_the_stream() -> None:
    """If Envoy sends the body through the picker; otherwise the picker sees nothing of it until its end."""

    async def main() -> None:
        async with picker(alone(1), "  timeouts: {connect: 0.1 s, first_token: 0.1 s}\n") as rig:
            stream = rig.stream()
            head = HttpHeaders(headers=message_headers(HEAD))
            mode = ProtocolConfiguration(
                request_body_mode=FULL_DUPLEX_STREAMED, response_body_mode=FULL_DUPLEX_STREAMED
            )
            await stream.send(request_headers=head, protocol_config=mode)
            await stream.send(request_body=HttpBody(body=completion_body(stream=True), end_of_stream=True))
            answer = await stream.answer(True)
            await stream.respond(200, answer.endpoints[0])
            await stream.send(response_body=HttpBody(body=b"data: 1\n\n"))
            assert (await stream.read()).response_body.response.body_mutation.streamed_response.body == b"data: 1\n\n"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.call.read()
            assert caught.value.code() == grpc.StatusCode.ABORTED
            assert await becomes_true(lambda: connections(rig) == 0)
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header line that is not indexed (RFC 7541, section 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def test_the_streams_of_an_envoy_that_is_gone_end() -> None:
    """Its machine has lost power: nothing closes the connection, and no ping is answered."""

    async def main() -> None:
        section = "  limits: {stall: 0.4 s, header_time: 1 h}\n"
        async with picker(alone(1), section) as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.port)
            head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", PROCESS.encode()), (b":authority", b"a")]
            head += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
            settings, acknowledgement = http2_frame(4, 0, 0, b""), http2_frame(4, 1, 0, b"")
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            await reader.readexactly(9)  # of the picker's settings
            writer.write(acknowledgement + http2_frame(1, 4, 1, b"".join(literal(*line) for line in head)))
            assert await becomes_true(lambda: connections(rig) == 1)
            await reader.read()  # to the end of the connection
            assert await becomes_true(lambda: connections(rig) == 0)
            writer.close()

    run(main())


def test_the_headers_of_a_huge_message_are_not_read() -> None:
    """A message takes less time in the picker than in a parser, so that other requests are served meanwhile."""
    part = HttpHeaders(headers=message_headers([(f"x-{number}", "y") for number in range(1500)]))
    raw = ProcessingRequest(request_headers=part).SerializeToString() * 1000
    started_s = time.thread_time()
    assert len(ProcessingRequest.FromString(raw).request_headers.headers.headers) == 1_500_000
    parsing_s = time.thread_time() - started_s

    async def main() -> None:
        async with picker(alone(1)) as rig:
            call = rig.channel.stream_stream(PROCESS, response_deserializer=ProcessingResponse.FromString)()
            await call.wait_for_connection()
            started_s = time.thread_time()
            await call.write(raw)
            answer = await call.read()
            assert time.thread_time() - started_s < parsing_s / 2
            assert answer.immediate_response.status.code == 431

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
            for trailers in (False, True):
                stream = rig.stream()
                assert (await stream.respond(431)).HasField("response_headers")
                if trailers:
                    await stream.send(response_trailers=HttpTrailers())
                    assert (await stream.read()).HasField("response_trailers")
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


@pytest.mark.slow
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


def test_streams_of_access_logs_are_bounded() -> None:
    """By the number of streams; each Envoy has one for each of its threads."""

    async def main() -> None:
        async with picker(alone(1), "  limits: {connections: 3}\n") as rig:
            method = rig.channel.stream_unary(ACCESS_LOGS)
            calls = [method() for _ in range(3)]
            for call in calls:
                await call.write(StreamAccessLogsMessage().SerializeToString())

            assert await method().code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            calls[0].cancel()
            while True:
                another = method()
                await another.done_writing()
                if await another.code() == grpc.StatusCode.OK:
                    break

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
