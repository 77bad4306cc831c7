"""Clients that close a connection, or their sending side of it, before, during and after a response."""

from __future__ import annotations

import asyncio

import pytest
from tests.http.server_rig import (
    HOST,
    HOST_AND_CLOSE,
    client,
    echo,
    exchange_bytes,
    run,
    run_server,
)
from tests.waiting import until

from kvroute.http.server.exchange import Exchange


def test_a_disconnect_is_reported_once_and_later_writes_are_dropped() -> None:
    async def main() -> None:
        disconnected = asyncio.Event()
        started = asyncio.Event()
        count = 0

        def on_gone() -> None:
            nonlocal count
            count += 1
            disconnected.set()

        exchanges: list[Exchange] = []

        def handler(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.on_gone = on_gone
            exchange.start(200, [], None)
            exchange.write(b"first")
            started.set()

        async with run_server(handler) as (_, port):
            async with client(port) as (_reader, writer):
                writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
                await started.wait()
            await disconnected.wait()
            [exchange] = exchanges
            exchange.write(b"more")
            exchange.end()
            exchange.abort()
            assert exchange.gone
            assert not exchange.finished
        assert count == 1

    run(main())


PIPELINE = b"GET /a HTTP/1.1\r\n" + HOST + b"\r\nGET /b HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.mark.parametrize("how", ["at-once", "later", "streamed", "http10"])
def test_a_client_that_half_closes_gets_its_responses(how: str) -> None:
    """`nc -N` does this; pipelines are included. The connection closes after the last response."""
    version = b"1.0" if how == "http10" else b"1.1"
    requests = PIPELINE if how != "http10" else b"GET /b HTTP/1.0\r\n" + HOST + b"\r\n"

    async def main() -> bytes:
        waiting: asyncio.Queue[Exchange] = asyncio.Queue()

        async def respond() -> None:
            for _ in range(requests.count(b"GET")):
                exchange = await waiting.get()
                await ended.wait()
                await asyncio.sleep(0)
                if how == "streamed":
                    exchange.start(200, [], 4)
                    for _ in range(2):
                        exchange.write(b"ok")
                        await asyncio.sleep(0.01)
                    exchange.end()
                else:
                    echo(exchange)

        def handler(exchange: Exchange) -> None:
            if how == "at-once":
                echo(exchange)
            else:
                waiting.put_nowait(exchange)

        ended = asyncio.Event()
        async with run_server(handler) as (_, port), client(port) as (reader, writer):
            responding = asyncio.create_task(respond()) if how != "at-once" else None
            writer.write(requests)
            writer.write_eof()
            asyncio.get_running_loop().call_later(0.05, ended.set)
            received = await reader.read()
            if responding is not None:
                responding.cancel()  # without the cancellation it waits forever if the connection was closed
                await asyncio.gather(responding, return_exceptions=True)
            return received

    received = run(main())
    assert received.count(b"HTTP/1.1 200 OK\r\n") == requests.count(b"GET")
    assert version == b"1.0" or how == "streamed" or b'"/a"' in received.partition(b'"/b"')[0]


@pytest.mark.parametrize("started", [False, True])
def test_a_half_close_long_after_the_request_counts_as_a_disconnect(started: bool) -> None:
    """The server notices it without sending anything, before and after the start of the response."""

    async def main() -> None:
        exchanges: list[Exchange] = []
        disconnected = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.on_gone = disconnected.set
            if started:
                exchange.start(200, [], 2)

        async with run_server(handler) as (_, port), client(port) as (_, writer):
            writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
            await until(lambda: bool(exchanges))
            loop = asyncio.get_running_loop()
            await until(lambda: loop.time() > exchanges[0].received_s + 0.5)
            writer.write_eof()
            await disconnected.wait()

    run(main())


@pytest.mark.parametrize("started", [False, True])
def test_a_disconnect_is_distinguished_from_a_half_close(started: bool) -> None:
    """Both clients close their sending side in the same way. Data sent to the client that has gone causes a reset; the
    other client gets its response when it is ready, after interim responses."""

    async def main() -> None:
        disconnected: list[bytes] = []
        exchanges: dict[bytes, Exchange] = {}
        lost = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            path = exchanges.setdefault(exchange.path, exchange).path

            def on_gone() -> None:
                disconnected.append(path)
                lost.set()

            exchange.on_gone = on_gone
            if started:
                exchange.start(200, [], 2)

        async with run_server(handler) as (_, port), client(port) as (reader, writer):
            writer.write(b"GET /stays HTTP/1.1\r\n" + HOST + b"\r\n")
            writer.write_eof()
            async with client(port) as (_, leaving):
                leaving.write(b"GET /goes HTTP/1.1\r\n" + HOST + b"\r\n")
                while len(exchanges) < 2:
                    await asyncio.sleep(0)
            await lost.wait()
            if not started:
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                exchanges[b"/stays"].start(200, [], 2)
            exchanges[b"/stays"].write(b"ok")
            exchanges[b"/stays"].end()
            received = await reader.read()
            assert b"HTTP/1.1 200 OK\r\n" in received
            assert received.endswith(b"ok")
            assert disconnected == [b"/goes"]

    run(main())


def test_a_request_with_an_incomplete_body_is_dropped_at_the_disconnect() -> None:
    async def main() -> None:
        async with run_server(echo) as (_, port), client(port) as (reader, writer):
            writer.write(b"GET /a HTTP/1.1\r\n" + HOST + b"\r\nPOST /b HTTP/1.1\r\nHo")
            writer.write_eof()
            assert (await reader.read()).count(b"HTTP/1.1") == 1

    run(main())


def test_a_disconnect_after_the_response_is_not_reported() -> None:
    calls: list[str] = []

    def handler(exchange: Exchange) -> None:
        exchange.on_gone = lambda: calls.append("gone")
        echo(exchange)

    exchange_bytes(b"GET / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n", handler)
    assert calls == []


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(("how", "length"), [("abort", None), ("abort", 10), ("short", 10)])
def test_an_incomplete_response_can_be_recognised_as_incomplete(how: str, version: bytes, length: int | None) -> None:
    """Chunked: the last chunk is missing. With a length: bytes are missing. Until the connection closes: a reset."""

    async def main() -> None:
        written = asyncio.Event()
        exchanges: list[Exchange] = []

        def handler(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.start(200, [], length)
            exchange.write(b"half")
            written.set()

        async with run_server(handler) as (_, port), client(port) as (reader, writer):
            writer.write(b"GET / HTTP/" + version + b"\r\n" + HOST + b"\r\n")
            raw = await reader.readuntil(b"half")
            [exchange] = exchanges
            exchange.abort() if how == "abort" else exchange.end()
            assert exchange.finished
            if version == b"1.0" and length is None:
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            else:
                rest = await reader.read()
                assert b"0\r\n\r\n" not in rest
                assert raw.endswith(b"half")

    run(main())
