"""The upstream pool: connections are reused or closed, unsafe requests are not sent again, every call ends once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.http.upstream_rig import (
    OK,
    RecordedResponse,
    closed,
    engine,
    fetch,
    replies,
    run,
    send,
)

from kvroute.http.client.pool import UpstreamPool, request_bytes
from kvroute.http.deadlines import Deadlines
from kvroute.types import InputError


def test_the_most_recently_used_connection_is_reused_first() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            both = [RecordedResponse(), RecordedResponse()]
            for response in both:
                send(pool, response)
            assert (pool.busy, pool.idle) == (2, 0)
            for response in both:
                await response.ended.wait()
            assert (pool.busy, pool.idle, pool.connections) == (0, 2, 2)
            for _ in range(3):
                assert (await fetch(pool)).body == b"ok"
            assert (pool.busy, pool.idle, pool.connections) == (0, 2, 2)
            await closed(pool)

    run(main())


def test_on_end_may_start_the_next_call_on_the_same_connection() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            second = RecordedResponse()

            class First(RecordedResponse):
                def on_end(self) -> None:
                    super().on_end()
                    send(pool, second)

            await_first = First()
            send(pool, await_first)
            await second.ended.wait()
            assert second.body == b"ok"
            assert pool.connections == 1
            await closed(pool)

    run(main())


def test_a_dead_kept_alive_connection_is_replaced_once() -> None:
    """The engine reads the second request on a connection and closes it without a byte: it is sent once more, on a new
    connection."""
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url)
            for _ in range(3):
                assert (await fetch(pool)).callbacks == ["head", "body", "end"]
            assert connections == 3
            await closed(pool)

    run(main())


def test_a_new_connection_that_closes_is_not_retried() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections == 1:
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n")

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url)
            assert (await fetch(pool)).callbacks[-1] == "end"
            assert (await fetch(pool)).callbacks == ["failure"]
            assert connections == 2
            await closed(pool)

    run(main())


def test_a_request_released_before_it_is_sent_is_sent_completely() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool, response = UpstreamPool(url), RecordedResponse()
            send(pool, response).forget_request()
            await response.ended.wait()
            assert response.callbacks == ["head", "body", "end"]
            await closed(pool)

    run(main())


def test_a_request_released_after_it_was_sent_is_not_sent_again() -> None:
    """The engine closes a kept-alive connection without a byte: the call fails at once and uses no other connection."""
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")

    async def main() -> None:
        async with engine(script) as url:
            pool, response = UpstreamPool(url), RecordedResponse()
            assert (await fetch(pool)).callbacks[-1] == "end"
            send(pool, response).forget_request()
            await response.ended.wait()
            assert response.failure is not None
            assert (response.failure.kind, response.callbacks, connections) == ("reset", ["failure"], 1)
            await closed(pool)

    run(main())


def test_a_request_is_not_sent_again_after_its_response_has_begun() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"H")

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url)
            assert (await fetch(pool)).callbacks[-1] == "end"
            assert (await fetch(pool)).callbacks == ["failure"]
            await closed(pool)

    run(main())


@pytest.mark.parametrize("data", [b"", OK], ids=["close", "unsolicited"])
def test_an_idle_connection_that_closes_or_sends_data_is_dropped(data: bytes) -> None:
    async def main() -> None:
        answered = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await answered.wait()
            writer.write(data)
            if data:
                await reader.read()

        async with engine(script) as url:
            pool = UpstreamPool(url)
            await fetch(pool)
            assert pool.idle == 1
            answered.set()
            while pool.connections:
                await asyncio.sleep(0)
            assert pool.idle == 0
            await closed(pool)

    run(main())


def test_idle_connections_have_a_maximum_number_and_age() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url, idle_max=2, keep_s=0.05, deadlines=Deadlines(0.01))
            calls = [RecordedResponse() for _ in range(5)]
            for response in calls:
                send(pool, response)
            for response in calls:
                await response.ended.wait()
                assert pool.idle <= 2
            while pool.connections:
                await asyncio.sleep(0)
            assert pool.idle == 0

    run(main())


def test_a_closed_pool_completes_its_calls_and_keeps_no_connection() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            response = RecordedResponse()
            send(pool, response)
            pool.close()
            await response.ended.wait()
            assert response.body == b"ok"
            assert pool.idle == 0
            await closed(pool)

    run(main())


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "ftp://a:1", "http://", "http://a:1/v1", "http://a:x", "http://a:70000"]
)
def test_a_url_that_is_not_an_origin_is_rejected(url: str) -> None:
    with pytest.raises(InputError, match="is not a valid origin"):
        UpstreamPool(url)


BEHAVIOURS: dict[str, tuple[bytes, bool]] = {
    "fine": (OK, False),
    "fine-then-closed": (OK, True),
    "closed": (b"", True),
    "rubbish": (b"\x00\x01", False),
    "short": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", True),
    "surplus": (OK + OK, False),
    "until-close": (b"HTTP/1.1 200 OK\r\n\r\nok", True),
    "silent": (b"", False),
    "stuck": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", False),
}


@settings(max_examples=40, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.sampled_from(sorted(BEHAVIOURS)), st.sampled_from(["stay", "now", "later"])), max_size=20
    )
)
def test_every_call_ends_exactly_once_and_nothing_leaks(plan: list[tuple[str, str]]) -> None:
    """Engines behave in any way and callers leave at any time, all at once over one pool."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            reply, close = BEHAVIOURS[request.split(b" ")[1][1:].decode()]
            writer.write(reply)
            if close:
                return

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url, idle_max=3, deadlines=Deadlines(0.01))
            stayed = []
            for behaviour, leaving in plan:
                response = RecordedResponse()
                request = request_bytes(b"GET", b"/" + behaviour.encode(), b"engine", [], b"")
                call = send(pool, response, request, silent_s=0.2)
                if leaving == "stay":
                    stayed.append((behaviour, response))
                    continue
                if leaving == "later":
                    for _ in range(3):
                        await asyncio.sleep(0)
                callbacks = list(response.callbacks)
                call.abort()
                assert response.callbacks == callbacks
            for behaviour, response in stayed:
                await response.ended.wait()
                if behaviour in ("fine", "surplus", "until-close"):
                    assert response.callbacks[-1] == "end"
                elif behaviour in ("rubbish", "short", "silent", "stuck", "closed"):
                    assert response.callbacks[-1] == "failure"
            await closed(pool)
            for _, response in stayed:
                response.check()

    run(main())
