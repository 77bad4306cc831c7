"""Connection limits: idle connections are closed first, requests are kept, and one address cannot use all
connections."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.http.server_rig import (
    HOST,
    HOST_AND_CLOSE,
    client,
    echo,
    parse_responses,
    run,
    run_server,
    send_and_read,
)
from tests.waiting import becomes_true

from kvroute.http.deadlines import Deadlines
from kvroute.http.server.connection_limits import (
    BEGINNING,
    BUSY,
    IDLE,
    UNREAD,
    AcceptedConnection,
    ConnectionOutcome,
    Connections,
    network_of,
)
from kvroute.http.server.exchange import Exchange
from kvroute.http.server.listener import Listener
from kvroute.http.server.server import HttpServer, RequestLimits, ServerHooks
from kvroute.serve.observe.logs import log_accept_paused

GET = b"GET / HTTP/1.1\r\n"


@dataclass(eq=False)
class StubConnection:
    """A stub connection in the state that the test sets."""

    address: str = "10.0.0.1"
    state: int = IDLE
    deadline_s: float = 0.0
    closed: list[StubConnection] = field(default_factory=list)

    def waits_for(self) -> int:
        return self.state

    def expire(self, now: float) -> None: ...

    def drain(self, idle_until_s: float) -> None: ...

    def abort(self) -> None:
        self.closed.append(self)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([IDLE, BEGINNING, UNREAD, BUSY]), st.integers(0, 5)),
        max_size=40,
    ),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_the_longest_idle_connection_is_closed_and_never_one_with_a_request(
    arrivals: list[tuple[str, int, int]], most: int, per_address: int
) -> None:
    """For arrivals one second apart in any order: counts stay within the limits; a closed connection has the lowest
    state and the earliest deadline of all that may make room; a rejection means that all of these are busy."""
    connections = Connections()
    closed: list[StubConnection] = []
    counted: list[StubConnection] = []
    for second, (address, state, deadline_s) in enumerate(arrivals):
        new = StubConnection(address, state, float(deadline_s), closed)
        before = len(closed)
        entry = connections.enter(new, most, per_address, float(second))
        same = [held for held in counted if held.address == address]
        candidates = same if len(same) >= per_address else counted
        for connection in closed[before:]:
            assert connection.state != BUSY
            assert (connection.state, connection.deadline_s) == min(
                (held.state, held.deadline_s) for held in candidates
            )
            counted.remove(connection)
        if entry is ConnectionOutcome.TAKEN:
            counted.append(new)
        else:
            assert all(held.state == BUSY for held in candidates)
        assert len(counted) <= most
        assert sum(held.address == address for held in counted) <= per_address
    for held in [*counted, *connections.all()]:
        connections.leave(held)
    assert len(connections) == 0


def test_connections_being_rejected_are_bounded_too() -> None:
    connections = Connections()
    assert connections.enter(StubConnection(state=BUSY), 1, 9, 0.0) is ConnectionOutcome.TAKEN
    entries = [connections.enter(StubConnection(state=BUSY), 1, 9, 0.0) for _ in range(66)]
    assert entries == [ConnectionOutcome.FULL] * 64 + [ConnectionOutcome.DROPPED] * 2
    full: AcceptedConnection = StubConnection(state=BUSY)
    assert Connections().enter(full, 1, 0, 0.0) is ConnectionOutcome.ADDRESS_FULL


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%lo", 1, 0, 1), "fe80::"),
        ("", ""),
        (None, ""),
    ],
)
def test_all_addresses_of_an_ipv6_host_count_as_one(peer: object, network: str) -> None:
    assert network_of(peer) == network


def test_idle_connections_do_not_block_new_ones() -> None:
    """The limit is a hundred, and a hundred connections are idle after a response; the oldest one is closed first."""

    async def main() -> None:
        async with run_server(echo, RequestLimits(connections=100)) as (http_server, port):
            idle = []
            for _ in range(100):
                streams = await asyncio.open_connection("127.0.0.1", port)
                streams[1].write(GET + HOST + b"\r\n")
                await streams[0].readuntil(b"}")
                idle.append(streams)
            for _ in range(5):
                assert parse_responses(await send_and_read(port, GET + HOST_AND_CLOSE + b"\r\n"))[0][0] == 200
            assert await idle[0][0].read() == b""
            idle[-1][1].write(GET + HOST_AND_CLOSE + b"\r\n")
            assert parse_responses(await idle[-1][0].read())[0][0] == 200
            assert http_server.connections <= 100
            for _, writer in idle:
                writer.close()

    run(main())


def test_connections_with_requests_are_kept_and_further_clients_get_retry_after() -> None:
    async def main() -> None:
        waiting: list[Exchange] = []
        async with (
            run_server(waiting.append, RequestLimits(connections=2)) as (_, port),
            client(port) as (first, one),
            client(port) as (second, two),
        ):
            for writer in (one, two):
                writer.write(GET + HOST_AND_CLOSE + b"\r\n")
            assert await becomes_true(lambda: len(waiting) == 2)
            [(status, headers, body)] = parse_responses(await send_and_read(port, GET + HOST_AND_CLOSE + b"\r\n"))
            assert (status, headers[b"retry-after"]) == (503, b"1")
            assert b"has reached its connection limit" in body
            for exchange in waiting:
                echo(exchange)
            assert parse_responses(await first.read())[0][0] == parse_responses(await second.read())[0][0] == 200

    run(main())


def test_one_address_cannot_take_all_connections() -> None:
    """The idle connections of an address make room for it; without any it is rejected, while another address is
    accepted."""

    async def main() -> None:
        waiting: list[Exchange] = []
        async with (
            run_server(waiting.append, RequestLimits(connections=9, connections_per_address=2)) as (_, port),
            client(port) as (idle, _),
            client(port) as (_, one),
            client(port) as (_, two),
        ):
            assert await idle.read() == b""
            for writer in (one, two):
                writer.write(GET + HOST_AND_CLOSE + b"\r\n")
            assert await becomes_true(lambda: len(waiting) == 2)
            [(status, _, body)] = parse_responses(await send_and_read(port, GET + HOST_AND_CLOSE + b"\r\n"))
            assert status == 503
            assert b"your address" in body
            other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            other[1].write(GET + HOST_AND_CLOSE + b"\r\n")
            assert await becomes_true(lambda: len(waiting) == 3)
            for exchange in waiting:
                echo(exchange)
            assert parse_responses(await other[0].read())[0][0] == 200
            other[1].close()

    run(main())


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return TLS contexts of a server on 127.0.0.1 and of a client that trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return server, ssl.create_default_context(cafile=str(folder / "cert.pem"))


async def gets_response(port: int, trusting: ssl.SSLContext) -> None:
    """Get a response over TLS, at once or after the flood has been accepted."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        except ConnectionError:
            continue
        writer.write(GET + HOST_AND_CLOSE + b"\r\n")
        assert parse_responses(await reader.read())[0][0] == 200
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
        return


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "incomplete-hello"])
def test_handshakes_count_as_connections(tls: tuple[ssl.SSLContext, ssl.SSLContext], sent: bytes) -> None:
    """Many handshakes never end and the limit is ten; a client that completes its handshake is served."""
    server, trusting = tls

    async def main() -> None:
        http_server = HttpServer(echo, RequestLimits(connections=10), deadlines=Deadlines(0.01))
        port = await http_server.listen("127.0.0.1", 0, server)
        silent = []
        for _ in range(50):
            each = socket.create_connection(("127.0.0.1", port))
            each.sendall(sent)
            silent.append(each)
            await asyncio.sleep(0)
        assert await becomes_true(lambda: 0 < http_server.connections <= 10)
        await gets_response(port, trusting)
        for connection in silent:
            connection.close()
        assert await becomes_true(lambda: http_server.connections == 0)
        await http_server.drain(0)

    run(main())


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "incomplete-hello"])
def test_a_handshake_has_a_deadline(tls: tuple[ssl.SSLContext, ssl.SSLContext], sent: bytes) -> None:
    async def main() -> None:
        http_server = HttpServer(echo, RequestLimits(header_s=0.05), deadlines=Deadlines(0.01))
        port = await http_server.listen("127.0.0.1", 0, tls[0])
        async with client(port) as (reader, writer):
            writer.write(sent)
            with suppress(ConnectionError):
                assert await reader.read() == b""
        assert await becomes_true(lambda: http_server.connections == 0)
        await http_server.drain(0)

    run(main())


@dataclass
class StubListener:
    """A stub port without a limit."""

    times_s: tuple[float, float] = (60.0, 60.0)
    open: list[AcceptedConnection] = field(default_factory=list)

    def enter(self, new: AcceptedConnection) -> ConnectionOutcome:
        self.open.append(new)
        return ConnectionOutcome.TAKEN

    def leave(self, connection: AcceptedConnection) -> None:
        if connection in self.open:
            self.open.remove(connection)

    def accept_paused(self, reason: str, seconds: float) -> None:
        pass

    def not_tls(self) -> None: ...


def test_a_handshake_aborted_before_its_first_step_is_not_counted(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """The connection is aborted in the same turn of the loop in which its first byte is read."""

    async def main() -> None:
        port = StubListener()
        listener = Listener(port, asyncio.Protocol, tls[0])
        async with client(await listener.listen("127.0.0.1", 0)) as (reader, writer):
            assert await becomes_true(lambda: len(port.open) == 1)
            [connection] = port.open
            writer.write(b"\x16\x03\x01")
            while connection.waits_for() != BEGINNING:
                await asyncio.sleep(0)
            connection.abort()
            assert await becomes_true(lambda: not port.open)
            with suppress(ConnectionError):
                assert await reader.read() == b""
        listener.close()

    asyncio.run(main())  # uvloop may take the first step of the handshake before the test continues


def test_draining_ends_handshakes(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def main() -> None:
        http_server = HttpServer(echo, deadlines=Deadlines(0.01))
        port = await http_server.listen("127.0.0.1", 0, tls[0])
        async with client(port) as (_, one), client(port) as (_, _two):
            one.write(b"\x16\x03\x01")
            assert await becomes_true(lambda: http_server.connections == 2)
            await http_server.drain(0.05, idle_s=0.0)
            assert http_server.connections == 0

    run(main())


def test_a_host_name_can_be_listened_on_with_tls(tls: tuple[ssl.SSLContext, ssl.SSLContext], tmp_path: Path) -> None:
    async def main() -> None:
        http_server = HttpServer(echo)
        port = await http_server.listen("localhost", 0, tls[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls[1])
        writer.write(GET + HOST_AND_CLOSE + b"\r\n")
        assert parse_responses(await reader.read())[0][0] == 200
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
        await http_server.drain(1, idle_s=0)

    run(main())


def test_a_tls_port_waits_for_free_file_descriptors(
    tls: tuple[ssl.SSLContext, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    """The port reports the shortage, and serves the waiting client afterwards."""

    async def main() -> None:
        http_server = HttpServer(echo, hooks=ServerHooks(accept_paused=log_accept_paused), deadlines=Deadlines(0.01))
        port = await http_server.listen("127.0.0.1", 0, tls[0])
        waiting = socket.create_connection(("127.0.0.1", port))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(waiting.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            assert await becomes_true(lambda: any(record.message == "accept_paused" for record in caplog.records))
            assert http_server.connections == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert await becomes_true(lambda: http_server.connections == 1)
        waiting.close()
        await gets_response(port, tls[1])
        await http_server.drain(0)

    run(main())
