"""Streams whose chunks the thread forwards, through the whole gateway: responses, counts, failures and disconnects are
the same as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import xxhash
from aiohttp import web
from tests.serve.proxy.test_slow_client import QUIET_TURNS, reader_of
from tests.serve.rig import CHAT, COMPLETIONS, RunningGateway
from tests.serve.stub_engines import (
    Engine,
    ReceivedRequest,
    completion,
    engines_of,
    event,
    run,
    start_stream,
    stub_rig,
)
from tests.waiting import becomes_true

from kvroute.control.log import read_log
from kvroute.types import Finished

TOKENS = 40
WITHOUT = "  forwarding_thread: false\n"


class Source:
    """A decode engine's stream, whose events the test sends one by one."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        """The events to send; None breaks the connection off."""
        self.left = asyncio.Event()

    async def serve(self, _: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
        """Send the stream."""
        try:
            response = await start_stream(request)
            while (data := await self.events.get()) is not None:
                await response.write(data)
                if data.endswith(b"[DONE]\n\n") or b"message_stop" in data or b"response.completed" in data:
                    await response.write_eof()
                    return response
            assert request.transport is not None
            request.transport.abort()
            return response
        finally:
            self.left.set()


def source_of(decode: list[Engine]) -> Source:
    """Let all decode engines send one stream."""
    source = Source()
    for engine in decode:
        engine.serve = source.serve
    return source


async def forwarded(front: RunningGateway) -> float:
    """Return the number of streams that the thread forwards, as the metrics page shows it."""
    lines = (await front.metrics()).splitlines()
    return float(next(line for line in lines if line.startswith("kvroute_forwarded_streams ")).split()[1])


async def started(front: RunningGateway, source: Source, token: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
    """Request a stream and send tokens until the thread forwards it; return the response and what it has brought."""
    source.events.put_nowait(token)
    response = await front.session.post(front.url + COMPLETIONS, json=completion(stream=True))
    received = await response.content.readexactly(len(token))
    while not await forwarded(front):
        source.events.put_nowait(token)
        received += await response.content.readexactly(len(token))
    return response, received


FORMATS: dict[str, tuple[str, dict[str, object], list[bytes], Callable[[int], bytes], bytes]] = {
    "completions": (COMPLETIONS, completion(stream=True), [], lambda n: event(f"{n} "), b"data: [DONE]\n\n"),
    "chat": (
        CHAT,
        {"model": "llama-3-70b", "messages": [{"role": "user", "content": "KV? " * 40}], "stream": True},
        [],
        lambda n: b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % n,
        b"data: [DONE]\n\n",
    ),
    "responses": (
        "/v1/responses",
        {"model": "llama-3-70b", "input": "KV? " * 40, "stream": True},
        [b'event: response.created\ndata: {"type":"response.created"}\n\n'],
        lambda n: (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"%d"}\n\n' % n
        ),
        b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "llama-3-70b",
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "KV? " * 40}],
            "stream": True,
        },
        [b'event: message_start\ndata: {"type":"message_start"}\n\n'],
        lambda n: b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d}\n\n' % n,
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
}


@pytest.mark.parametrize("section", ["", WITHOUT], ids=["thread", "event-loop"])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_stream_and_its_counts_are_the_same_with_and_without_the_thread(
    kind: str, section: str, tmp_path: Path
) -> None:
    path, body, preamble, token, last = FORMATS[kind]

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = source_of(decode)
        log = f"  log: {{events: {tmp_path}/events.jsonl}}\n"
        async with stub_rig(prefill + decode, section + log) as front:
            sent = b"".join([*preamble, token(0)])
            for data in (*preamble, token(0)):
                source.events.put_nowait(data)
            async with front.session.post(front.url + path, json=body) as response:
                received, count = b"", 1
                while count < TOKENS or (not section and not await forwarded(front)):
                    source.events.put_nowait(token(count))
                    sent += token(count)
                    received += await response.content.readexactly(len(sent) - len(received))
                    count += 1
                assert await forwarded(front) == (0 if section else 1)
                source.events.put_nowait(last)
                assert received + await response.content.read() == sent + last
            assert await front.becomes_idle(), front.held_resources()
            assert await forwarded(front) == 0
            lines = (await front.metrics()).splitlines()
            values = {line.split()[0]: float(line.split()[-1]) for line in lines if line and line[0] != "#"}
            assert values["kvroute_relayed_bytes_total"] == len(sent + last)
        _, records = read_log(tmp_path / "events.jsonl")
        (finished,) = [record.event for record in records if isinstance(record.event, Finished)]
        assert finished.output_tokens == count

    run(main())


@pytest.mark.parametrize("silent", [True, False], ids=["silent-engine", "tokens-go-on"])
def test_a_client_that_leaves_releases_the_engine(silent: bool) -> None:
    """A client that closes its side directly after its request may still be reading; tokens show that it has left."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = source_of(decode)
        async with stub_rig(prefill + decode) as front:
            began_s, token = front.gateway.now(), event("a")
            response, _ = await started(front, source, token)
            while silent and front.gateway.now() < began_s + 1.0:
                source.events.put_nowait(token)
                assert await response.content.readexactly(len(token)) == token
            response.close()
            while not source.left.is_set():
                if not silent:
                    source.events.put_nowait(token)
                await asyncio.sleep(0.001)
            assert await front.becomes_idle(), front.held_resources()
            assert await forwarded(front) == 0

    run(main())


def test_an_engine_that_breaks_off_ends_the_stream_with_an_error_event() -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = source_of(decode)
        async with stub_rig(prefill + decode) as front:
            response, _ = await started(front, source, event("a"))
            async with response:
                source.events.put_nowait(None)
                rest = await response.content.read()
            assert rest.startswith(b'data: {"error":')
            assert b"closed the connection" in rest
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_an_engine_that_is_silent_too_long_ends_the_stream_and_one_that_is_slow_does_not() -> None:
    """The time between two tokens counts, also while the event loop does not see them."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = source_of(decode)
        async with stub_rig(prefill + decode, "  timeouts: {between_tokens: 500 ms}\n") as front:
            response, _ = await started(front, source, event("a"))
            async with response:
                began_s = front.gateway.now()
                while front.gateway.now() < began_s + 1.5:
                    source.events.put_nowait(event("b"))
                    assert await response.content.readexactly(len(event("b"))) == event("b")
                assert await forwarded(front) == 1
                rest = await response.content.read()
            assert rest.startswith(b'data: {"error":')
            assert b"did not respond in time" in rest or b"sent nothing" in rest
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_gateway_that_closes_aborts_the_stream() -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = source_of(decode)
        async with stub_rig(prefill + decode) as front:
            response, _ = await started(front, source, event("a"))
            await front.gateway.close()
            async with response:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.content.read()
            await source.left.wait()

    run(main())


def test_several_streams_of_one_connection_follow_each_other() -> None:
    """The connections to the client and to the engine are used again after the thread has used them."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        source = source_of(decode)
        async with stub_rig(prefill + decode) as front:
            for number in range(3):
                token = event(str(number))
                response, received = await started(front, source, token)
                async with response:
                    source.events.put_nowait(b"data: [DONE]\n\n")
                    received += await response.content.read()
                    assert received == token * (len(received) // len(token)) + b"data: [DONE]\n\n"
            assert await becomes_true(lambda: front.gateway.runtime.engines["decode0"].pool.busy == 0)
            opened = [engine.pool.connections for engine in front.gateway.runtime.engines.values()]
            assert max(opened) <= 3, "for health checks, metrics and requests"

    run(main())


def test_a_client_that_stops_reading_gets_every_byte_once_it_reads_again() -> None:
    """The stream goes back to the event loop within a chunk, waits there, and is forwarded by the thread again."""
    token, count = event("x" * 4_000), 8_000

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        sent, fast = 0, asyncio.Event()

        async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            nonlocal sent
            response = await start_stream(request)
            while sent < count:
                await response.write(token)
                sent += 1
                if not fast.is_set():
                    await asyncio.sleep(0.001)  # so that chunks arrive one by one
            await response.write_eof()
            return response

        for engine in decode:
            engine.serve = serve
        async with stub_rig(prefill + decode) as front:
            reader = await reader_of(front.gateway.port)
            reader.transport.resume_reading()
            while not await forwarded(front):
                await asyncio.sleep(0)
            reader.transport.pause_reading()
            while await forwarded(front):
                await asyncio.sleep(0)
            fast.set()
            before, quiet_turns = -1, 0
            while quiet_turns < QUIET_TURNS:
                await asyncio.sleep(0)
                quiet_turns, before = (quiet_turns + 1 if sent == before else 0), sent
            assert sent < count, "the engine waits for the client"
            reader.transport.resume_reading()
            await reader.done.wait()
            assert (reader.body_bytes, reader.hash.digest()) == (
                count * len(token),
                xxhash.xxh64(token * count).digest(),
            )
            reader.transport.abort()
            assert await front.becomes_idle(), front.held_resources()

    run(main())
