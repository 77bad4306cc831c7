"""Draining of the HTTP server: no request of a connected client is lost, and the drain timeout holds."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from tests.http.server_rig import HOST, client, echo, parse_responses, run, run_server

from kvroute.http.deadlines import Deadlines
from kvroute.http.loop_lag import LoopLag
from kvroute.http.server.exchange import Exchange
from kvroute.http.server.server import HttpServer


def test_draining_loses_no_request() -> None:
    """One response is being sent, one request is half received, one connection is idle and about to be used."""

    async def main() -> None:
        arrived = asyncio.Event()
        slow: list[Exchange] = []

        def handler(exchange: Exchange) -> None:
            if exchange.path == b"/slow":
                slow.append(exchange)
                arrived.set()
            else:
                echo(exchange)

        async with run_server(handler) as (http_server, port):
            async with (
                client(port) as (r1, w1),
                client(port) as (r2, w2),
                client(port) as (r3, w3),
                client(port) as (r4, _),
            ):
                w1.write(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\n")
                w2.write(b"POST /half HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n1")
                w3.write(b"GET /idle HTTP/1.1\r\n" + HOST + b"\r\n")
                await arrived.wait()
                await r3.readuntil(b"}")
                draining = asyncio.create_task(http_server.drain(10, idle_s=1.0))
                await asyncio.sleep(0)
                w2.write(b"2")
                w3.write(b"GET /late HTTP/1.1\r\n" + HOST + b"\r\n")
                [(_, headers, body)] = parse_responses(await r3.read())
                assert (json.loads(body)["path"], headers[b"connection"]) == ("/late", b"close")
                assert json.loads(parse_responses(await r2.read())[0][2])["body"] == "12"
                assert await r4.read() == b"", "a connection that stays idle is closed"
                assert not draining.done()
                slow[0].respond(200, b"{}")
                [(_, headers, body)] = parse_responses(await r1.read())
                assert (body, headers[b"connection"]) == (b"{}", b"close")
                await draining
            assert http_server.connections == 0
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    run(main())


def test_draining_answers_connections_that_are_not_accepted_yet() -> None:
    """The connections are established and the requests are sent, but the server has not accepted the connections
    yet. As in the gateway, the time for which the loop is late does not count."""

    async def main() -> list[bytes]:
        lag = LoopLag()
        lag.start()
        http_server = HttpServer(echo, deadlines=Deadlines(lag=lag))
        port = await http_server.listen("127.0.0.1", 0)
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for waiter in waiting:
            waiter.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        try:
            await http_server.drain(10)
            return [waiter.recv(4096) for waiter in waiting]
        finally:
            lag.close()
            for waiter in waiting:
                waiter.close()

    assert all(response.startswith(b"HTTP/1.1 200 OK\r\n") for response in run(main()))


def test_no_connected_client_is_lost_while_the_port_closes() -> None:
    """Clients in separate threads open a new connection for each request until the port refuses them."""
    responses: list[bytes] = []

    def send_requests(port: int) -> None:
        while True:
            try:
                client = socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                return
            with client:
                client.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
                responses.append(client.recv(4096))

    async def main() -> None:
        http_server = HttpServer(echo)
        port = await http_server.listen("127.0.0.1", 0)
        clients = [asyncio.create_task(asyncio.to_thread(send_requests, port)) for _ in range(4)]
        while len(responses) < 20:
            await asyncio.sleep(0)
        await http_server.drain(10, idle_s=1.0)
        await asyncio.gather(*clients)

    run(main())
    assert all(response.startswith(b"HTTP/1.1 200 OK\r\n") for response in responses)


def test_draining_aborts_requests_after_its_timeout() -> None:
    async def main() -> None:
        arrived = asyncio.Event()
        disconnected = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            exchange.on_gone = disconnected.set
            arrived.set()

        async with run_server(handler) as (http_server, port), client(port) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
            await arrived.wait()
            await http_server.drain(0.01)
            assert disconnected.is_set()
            assert await reader.read() == b""

    run(main())
