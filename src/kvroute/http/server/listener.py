"""A listening port: accepts connections for a protocol. With TLS it counts each connection before the handshake,
limits the time of the handshake, and sends an error response to clients that do not use TLS."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

from kvroute.http.deadlines import NEVER_S
from kvroute.http.headers import request_id_of
from kvroute.http.server.connection_limits import (
    BEGINNING,
    IDLE,
    UNREAD,
    AcceptedConnection,
    ConnectionOutcome,
    network_of,
)
from kvroute.http.server.exchange import own_lines
from kvroute_engine.addresses import bound

_BACKLOG = 4096
_AT_ONCE = 64
"""Connections accepted before other callbacks run."""
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_PAUSE_S = 1.0
"""Pause of a port that has no file descriptor for a new connection."""
_SHUTDOWN_S = 2.0
"""Time for the other side to close its TLS connection."""
_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection: that of a handshake record."""
_WHY = b"This port requires TLS; use https://\n"
_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n%%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
    % (len(_WHY), _WHY)
)


class Port(Protocol):
    """The owner of the accepted connections."""

    @property
    def times_s(self) -> tuple[float, float]:
        """Time limits for a TLS handshake, and for a client to read that it must use TLS."""
        ...

    def enter(self, new: AcceptedConnection) -> ConnectionOutcome:
        """Count a connection; `leave` is called for it in any case."""
        ...

    def leave(self, gone: AcceptedConnection) -> None:
        """Remove a closed connection from the count."""
        ...

    def accept_paused(self, reason: str, seconds: float) -> None:
        """No connection is accepted for so many seconds: the system has no resources for one."""
        ...

    def not_tls(self) -> None:
        """Record that a client was told to use TLS."""
        ...


class Listener:
    """Accepts connections from `listen` to `close`."""

    def __init__(self, port: Port, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None) -> None:
        """
        Args:
            port: counts TLS connections before their handshake; other connections are counted by their protocol.
            make: creates the protocol of a connection, after the handshake if there is one.
            context: TLS settings; None: no TLS.
        """
        self._port, self._make, self._context = port, make, context
        self._server: asyncio.Server | None = None
        self._tls: list[_Accepting] = []

    async def listen(self, host: str, port: int, *, shared: bool = False) -> int:
        """Accept connections at an address; return the port (chosen by the system if 0 was given).

        Args:
            host, port: the address.
            shared: other processes of the same user listen there too; the system distributes the connections.

        Raises:
            OSError: the address is in use, or does not belong to this machine.
        """
        loop = asyncio.get_running_loop()
        own = bound(host, port, shared=shared)
        if self._context is not None:
            found = [own] if own is not None else await _bound_by_name(host, port, shared=shared)
            self._tls = [_Accepting(sock, self._port, self._make, self._context) for sock in found]
            return int(found[0].getsockname()[1])
        if own is not None:
            self._server = await loop.create_server(self._make, sock=own, backlog=_BACKLOG)
        else:
            self._server = await loop.create_server(self._make, host, port, backlog=_BACKLOG, reuse_port=shared)
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def filenos(self) -> tuple[int, ...]:
        """File descriptors of the listening sockets."""
        own = self._server.sockets if self._server is not None else ()
        return (*(sock.fileno() for sock in own), *(accepting.fileno() for accepting in self._tls))

    def close(self) -> None:
        """Accept no more connections; existing ones stay open."""
        for accepting in self._tls:
            accepting.close()
        self._tls.clear()
        if self._server is not None:
            self._server.close()
            self._server = None


class _Accepting:
    """One listening socket of a TLS port."""

    def __init__(
        self, own: socket.socket, port: Port, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext
    ) -> None:
        self._own, self._port, self._make, self._context = own, port, make, context
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        own.listen(_BACKLOG)
        self._resume()

    def fileno(self) -> int:
        return self._own.fileno()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._own.fileno())
        self._own.close()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._own.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, peer = self._own.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._port.accept_paused(error.strerror or str(error), _PAUSE_S)
                self._loop.remove_reader(self._own.fileno())
                self._pause = self._loop.call_later(_PAUSE_S, self._resume)
                return
            accepted.setblocking(False)
            _Arriving(accepted, network_of(peer), self._port, self._make, self._context).begin()


class _Arriving(asyncio.Protocol):
    """A connection until its TLS handshake is complete; then the protocol for which it was accepted replaces it."""

    def __init__(
        self,
        own: socket.socket,
        address: str,
        port: Port,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
    ) -> None:
        self.address, self.deadline_s = address, NEVER_S
        self._own, self._port, self._make, self._context = own, port, make, context
        self._loop = asyncio.get_running_loop()
        self._waits_for = IDLE
        self._handshake: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Wait for the first byte. A connection over the limit is closed: before the handshake it can get no
        response."""
        self.deadline_s = self._loop.time() + self._port.times_s[0]
        if self._port.enter(self) is not ConnectionOutcome.TAKEN:
            self._end()
        else:
            self._loop.add_reader(self._own.fileno(), self._readable)

    # interface of a connection that the connection limit may close

    def waits_for(self) -> int:
        return self._waits_for

    def drain(self, idle_until_s: float) -> None:
        if self._waits_for == IDLE:
            self.deadline_s = min(self.deadline_s, idle_until_s)

    def expire(self, now: float) -> None:
        self.abort()

    def abort(self) -> None:
        if self._handshake is None:
            self._end()
        else:
            self._handshake.cancel()

    # the first byte and the handshake

    def _readable(self) -> None:
        try:
            first = self._own.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if first == _HANDSHAKE:
            self._loop.remove_reader(self._own.fileno())
            self._waits_for = BEGINNING
            self._handshake = self._loop.create_task(self._shake_hands())
            self._handshake.add_done_callback(self._handshake_over)
        elif first.isalpha():
            self._refuse()
        else:
            self._end()

    def _refuse(self) -> None:
        """Respond without TLS, and discard input until the client has had time to read the response."""
        with suppress(OSError):
            self._own.send(_PLAIN % own_lines(b"x-request-id: %b\r\n" % request_id_of([])))
            self._own.shutdown(socket.SHUT_WR)
        self._port.not_tls()
        self._waits_for = UNREAD
        self.deadline_s = self._loop.time() + self._port.times_s[1]
        self._loop.remove_reader(self._own.fileno())
        self._loop.add_reader(self._own.fileno(), self._drop)

    def _drop(self) -> None:
        try:
            if self._own.recv(1 << 16):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self._end()

    async def _shake_hands(self) -> None:
        left_s = max(0.001, self.deadline_s - self._loop.time())
        try:
            await self._loop.connect_accepted_socket(
                lambda: self,
                self._own,
                ssl=self._context,
                ssl_handshake_timeout=left_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # caused by the other side
            self._own.close()

    def _handshake_over(self, handshake: asyncio.Task[None]) -> None:
        """Release the connection. A callback, because a task cancelled before its first step runs none of its
        coroutine."""
        if handshake.cancelled():  # by `abort`
            self._own.close()
        self._port.leave(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Replace this protocol after the handshake."""
        self._port.leave(self)
        protocol = self._make()
        cast(asyncio.Transport, transport).set_protocol(protocol)
        protocol.connection_made(transport)

    def _end(self) -> None:
        self._loop.remove_reader(self._own.fileno())
        self._own.close()
        self._port.leave(self)


async def _bound_by_name(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Return one socket for each address of a name; at least one."""
    loop = asyncio.get_running_loop()
    places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found: list[socket.socket] = []
    try:
        for address in dict.fromkeys(str(place[0]) for *_, place in places):
            try:
                own = bound(address, port, shared=shared)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:  # a machine without IPv6 listens on the other addresses
                    raise
                continue
            assert own is not None, "a resolver returns addresses"
            found.append(own)
    except OSError:
        for own in found:
            own.close()
        raise
    if not found:
        raise OSError(errno.EADDRNOTAVAIL, "the name has no address on this machine")
    return found
