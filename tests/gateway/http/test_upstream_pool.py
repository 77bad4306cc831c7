"""The upstream pool: connections are reused or closed, unsafe requests are not sent again, every call ends once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.http.upstream_rig import OK, Heard, ask, closed, engine, replies, run, send

from kvroute.gateway.http.deadlines import Deadlines
from kvroute.gateway.http.pool import UpstreamPool, request_bytes
from kvroute.types import InputError


def test_the_most_recently_used_connection_is_reused_first() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            both = [Heard(), Heard()]
            for heard in both:
                send(pool, heard)
            assert (pool.busy, pool.idle) == (2, 0)
            for heard in both:
                await heard.over.wait()
            assert (pool.busy, pool.idle, pool.connections) == (0, 2, 2)
            for _ in range(3):
                assert (await ask(pool)).body == b"ok"
            assert (pool.busy, pool.idle, pool.connections) == (0, 2, 2)
            await closed(pool)

    run(main())


def test_on_end_may_start_the_next_call_on_the_same_connection() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            second = Heard()

            class First(Heard):
                def on_end(self) -> None:
                    super().on_end()
                    send(pool, second)

            await_first = First()
            send(pool, await_first)
            await second.over.wait()
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
                assert (await ask(pool)).told == ["head", "body", "end"]
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
            assert (await ask(pool)).told[-1] == "end"
            assert (await ask(pool)).told == ["failure"]
            assert connections == 2
            await closed(pool)

    run(main())


def test_a_request_released_before_it_is_sent_is_sent_completely() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool, heard = UpstreamPool(url), Heard()
            send(pool, heard).forget_request()
            await heard.over.wait()
            assert heard.told == ["head", "body", "end"]
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
            pool, heard = UpstreamPool(url), Heard()
            assert (await ask(pool)).told[-1] == "end"
            send(pool, heard).forget_request()
            await heard.over.wait()
            assert heard.failure is not None
            assert (heard.failure.kind, heard.told, connections) == ("reset", ["failure"], 1)
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
            assert (await ask(pool)).told[-1] == "end"
            assert (await ask(pool)).told == ["failure"]
            await closed(pool)

    run(main())


@pytest.mark.parametrize("word", [b"", OK], ids=["close", "unsolicited"])
def test_an_idle_connection_that_closes_or_sends_data_is_dropped(word: bytes) -> None:
    async def main() -> None:
        answered = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await answered.wait()
            writer.write(word)
            if word:
                await reader.read()

        async with engine(script) as url:
            pool = UpstreamPool(url)
            await ask(pool)
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
            calls = [Heard() for _ in range(5)]
            for heard in calls:
                send(pool, heard)
            for heard in calls:
                await heard.over.wait()
                assert pool.idle <= 2
            while pool.connections:
                await asyncio.sleep(0)
            assert pool.idle == 0

    run(main())


def test_a_closed_pool_completes_its_calls_and_keeps_no_connection() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            heard = Heard()
            send(pool, heard)
            pool.close()
            await heard.over.wait()
            assert heard.body == b"ok"
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
            answer, close = BEHAVIOURS[request.split(b" ")[1][1:].decode()]
            writer.write(answer)
            if close:
                return

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url, idle_max=3, deadlines=Deadlines(0.01))
            stayed = []
            for behaviour, leaving in plan:
                heard = Heard()
                request = request_bytes(b"GET", b"/" + behaviour.encode(), b"engine", [], b"")
                call = send(pool, heard, request, silent_s=0.2)
                if leaving == "stay":
                    stayed.append((behaviour, heard))
                    continue
                if leaving == "later":
                    for _ in range(3):
                        await asyncio.sleep(0)
                told = list(heard.told)
                call.abort()
                assert heard.told == told
            for behaviour, heard in stayed:
                await heard.over.wait()
                if behaviour in ("fine", "surplus", "until-close"):
                    assert heard.told[-1] == "end"
                elif behaviour in ("rubbish", "short", "silent", "stuck", "closed"):
                    assert heard.told[-1] == "failure"
            await closed(pool)
            for _, heard in stayed:
                heard.check()

    run(main())
