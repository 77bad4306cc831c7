"""One client's connection: it serves requests one after the other and limits every wait. It parses nothing itself."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvroute.http.deadlines import NEVER_S
from kvroute.http.error_format import ErrorFormat
from kvroute.http.forwarding.turn_writes import TurnTransport
from kvroute.http.headers import Headers, request_id_of
from kvroute.http.server.connection_limits import BEGINNING, BUSY, UNREAD, ConnectionOutcome, network_of
from kvroute.http.server.connection_limits import IDLE as NO_REQUEST
from kvroute.http.server.exchange import Exchange, own_lines, status_line
from kvroute.http.server.request_parser import (
    BODY,
    BODY_MEMORY_RATIO,
    HEAD,
    IDLE,
    LIGHT_BYTES,
    HttpError,
    RequestLimits,
    RequestParser,
)
from kvroute.http.server.web_pages import WebPages

_HELD_BYTES = 64 * 1024
"""Limit on held bytes of pipelined requests. Above it, reading stops; below it, reading goes on to detect a close."""
_NEITHER = -1
_PROBE_S, _PROBE_MOST_S = 0.5, 30.0
"""First and longest interval between two probes of a half-closed connection, in seconds; the interval doubles."""
_END_OF_SIDE_S = 0.5
"""Longest time between a request and the end of the client's side, in seconds. A client that only half-closes does so
directly after its request; a later end means that the client has left."""

_RETRY = b"retry-after: 1\r\n"
_BUSY = HttpError(503, "the gateway has reached its connection limit; try again later", headers=_RETRY)
_BUSY_ADDRESS = HttpError(503, "your address has reached its connection limit; try again later", headers=_RETRY)
_FULL = HttpError(503, "the gateway has reached its memory limit for request bodies; try again later", headers=_RETRY)
_WHY_NO_HTTP2 = b"HTTP/2 is not supported; send HTTP/1.1"
_NO_HTTP2 = b"".join(
    (
        struct.pack(">HBBBL", 0, 0, 4, 0, 0),  # SETTINGS without a value
        struct.pack(">HBBBLLL", 0, 8 + len(_WHY_NO_HTTP2), 7, 0, 0, 0, 13),  # GOAWAY, HTTP_1_1_REQUIRED
        _WHY_NO_HTTP2,
    )
)
"""The answer to a client that uses HTTP/2, in its frames (RFC 9113, 6.5 and 6.8)."""
_SLOW_HEAD = HttpError(408, "the request's headers did not arrive in time")
_SLOW_BODY = HttpError(408, "the request's body did not arrive in time")


Handler: TypeAlias = Callable[[Exchange], None]
"""Handles a request. It is called once the whole body has arrived, and must neither block nor raise."""
PreBodyCheck: TypeAlias = Callable[[bytes, bytes, Headers], HttpError | None]
"""Checks method, path and headers of a request before its body is read; returns an error to reject it, or None."""


@dataclass(frozen=True, slots=True)
class ServerHooks:
    """Functions that the HTTP server calls beside its handler; None: not called."""

    guard: PreBodyCheck | None = None
    """Refuses requests before their body is read. It does not see a request whose body arrives with its head."""
    refused: Callable[[int, bytes, bytes, str], None] | None = None
    """Receives status, path, request id and client address (each empty: not known) of each response that the server
    gives by itself."""
    accept_paused: Callable[[str, float], None] | None = None
    """Receives the reason and the seconds for which no connection is accepted."""


class ServerCallbacks(Protocol):
    """The state and callbacks that all connections of one server share."""

    handler: Handler
    hooks: ServerHooks
    errors: ErrorFormat
    limits: RequestLimits
    pages: WebPages | None
    """Which web pages may send requests; None: all."""
    bodies_bytes: int
    """Memory that large request bodies take, in bytes."""
    server: bytes
    """The whole Server header line, or empty."""
    draining: bool

    def enter(self, new: ClientConnection) -> ConnectionOutcome:
        """Count a new connection; return whether there is room for it."""
        ...

    def leave(self, gone: ClientConnection) -> None:
        """Remove a closed connection."""
        ...


class ClientConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: ServerCallbacks) -> None:
        self.deadline_s = NEVER_S
        self._server = server
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._transport: TurnTransport
        self._peer = self.address = ""
        self._reader = RequestParser(server.limits, server.pages)
        self._current: Exchange | None = None
        self._held = b""
        self._timed = _NEITHER
        """The parser phase for which the deadline is set."""
        self._weight = 0
        """Memory that this connection's large body takes, in bytes; part of the server's `bodies_bytes`."""
        self._unsent_bytes = -1
        """Unsent bytes when writing paused or was last checked; -1: writing is not paused."""
        self._reading_paused = self._advancing = self._leaving = False
        self._half_closed = False
        """The client has closed its side, and may be waiting for responses."""
        self._probe_s = _PROBE_S

    def drain(self, idle_until_s: float) -> None:
        """Close after the response in flight. An idle connection stays open until `idle_until_s`, because the client
        may have sent a request already."""
        if self._current is not None:
            self._current.keep_alive = False
        elif not self._leaving and self._unsent_bytes < 0 and self._reader.phase == IDLE:
            self.deadline_s = min(self.deadline_s, idle_until_s)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def waits_for(self) -> int:
        """Return what a close would interrupt now: see `connections`."""
        phase = self._reader.phase
        if self._current is not None:
            return BUSY
        if self._leaving or self._unsent_bytes >= 0:
            return UNREAD
        return NO_REQUEST if phase == IDLE else BEGINNING if phase == HEAD else BUSY

    def expire(self, now: float) -> None:
        """Handle the end of a deadline: close, or respond that the client is too slow."""
        if self._leaving:
            self._transport.abort()
        elif self._unsent_bytes >= 0:
            unsent = self._transport.get_write_buffer_size()
            if unsent >= self._unsent_bytes:
                self._transport.abort()
            else:  # slow, but still reading
                self._unsent_bytes = unsent
                self.deadline_s = now + self._server.limits.stall_s
        elif self._current is not None:
            self._probe(now)
        elif self._reader.phase == IDLE:
            self._leave()
        else:
            self._refuse(_SLOW_HEAD if self._reader.phase == HEAD else _SLOW_BODY)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = TurnTransport(transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]).removeprefix("::ffff:") if peer else ""  # IPv4 on a port for both kinds
        self.address = network_of(peer)
        self.deadline_s = self._now() + self._server.limits.header_s
        self._timed = IDLE
        entry = self._server.enter(self)
        if entry is ConnectionOutcome.DROPPED:
            self._leaving = True
            self._transport.abort()
        elif entry is not ConnectionOutcome.TAKEN:
            self._refuse(_BUSY if entry is ConnectionOutcome.FULL else _BUSY_ADDRESS)

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        if self._current is None and not self._held and self._unsent_bytes < 0:
            self._held = self._reader.feed(data)
            self._advance()
            return
        self._held += data
        if len(self._held) > _HELD_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Handle the end of the client's side: it has left or waits for its responses. TLS has no half-closed state."""
        if (self._current is None and not (self._held or self._reader.ready)) or self._leaving:
            return False
        current = self._current
        late = current is not None and self._now() > current.received_s + _END_OF_SIDE_S
        if late or self._transport.get_extra_info("sslcontext") is not None:
            self._transport.abort()
            return False
        self._half_closed = True
        if self._current is not None and not (self._held or self._reader.ready):
            self._current.keep_alive = False
        if self._unsent_bytes < 0:
            self.deadline_s = self._now() + self._probe_s
        return True

    def _probe(self, now: float) -> None:
        """Check whether a half-closed client is still connected: if not, any sent byte makes it reset the connection.
        Before the response begins, HTTP/1.1 allows `100 Continue` for this purpose."""
        current, own = self._current, self._transport.get_extra_info("socket")
        assert current is not None
        if own is not None and own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        if not current.started and not current.http10:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.deadline_s = now + self._probe_s
        self._probe_s = min(2 * self._probe_s, _PROBE_MOST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leaving = True
        self.deadline_s = NEVER_S
        self._server.leave(self)
        self._reader.forget()
        self._count_body_bytes(0)
        current, self._current = self._current, None
        if current is not None:
            current.connection_lost()

    def pause_writing(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self.deadline_s = self._now() + self._server.limits.stall_s
        if self._current is not None:
            self._current.pause()

    def resume_writing(self) -> None:
        self._unsent_bytes = -1
        if self._leaving:
            return
        self.deadline_s = self._now() + self._probe_s if self._half_closed else NEVER_S
        self._timed = _NEITHER
        if self._current is not None:
            self._current.resume()
        else:
            self._advance()

    # requests, one after the other

    def _advance(self) -> None:
        """Process what can be processed without waiting. It is a loop, so that pipelined requests do not recurse."""
        if self._advancing:
            return
        self._advancing = True
        reader = self._reader
        while self._current is None and not self._leaving and self._unsent_bytes < 0:
            if reader.ready:
                self._begin()
            elif reader.fault is not None:
                self._refuse(reader.fault)
            elif self._held:
                self._read_on()
                self._held = reader.feed(self._held)
            else:
                self._wait()
                break
        self._advancing = False

    def _begin(self) -> None:
        """Pass the next request to the handler."""
        server = self._server
        exchange = Exchange(
            *self._reader.ready.popleft(),
            self._now(),
            self._peer,
            self._transport,
            server.server,
            server.errors,
            self._answered,
            self._body_resized,
        )
        self._current = exchange
        if self._weight or len(exchange.body) > LIGHT_BYTES:
            self._count_body_bytes(len(exchange.body))
        self.deadline_s = self._now() + self._probe_s if self._half_closed else NEVER_S
        self._timed = _NEITHER
        if server.draining:
            exchange.keep_alive = False
        try:
            server.handler(exchange)
        except Exception as error:
            self._report_handler_error(error)
            if exchange.started:
                exchange.abort()
            else:
                body = server.errors.body(b"", 500, "internal error in the gateway", "server_error", None)
                exchange.respond(500, body)

    def _report_handler_error(self, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a request handler failed with an internal error", "exception": error}
        )

    def _body_resized(self, nbytes: int) -> bool:
        self._count_body_bytes(nbytes if nbytes > LIGHT_BYTES else 0)
        return not self._weight or self._server.bodies_bytes <= self._server.limits.bodies_bytes

    def _answered(self, exchange: Exchange) -> None:
        self._current = None
        if self._weight:
            self._count_body_bytes(0)
        if self._leaving:
            return
        if exchange.keep_alive:
            self._advance()
        else:
            self._leave()

    def _wait(self) -> None:
        """Set the deadline for the next request or for the rest of one, or close."""
        if self._half_closed:
            self._leave()
            return
        phase, server = self._reader.phase, self._server
        if phase == BODY and not self._may_send():
            return
        if phase == self._timed:
            return
        self._timed = phase
        limits = server.limits
        if phase == BODY:
            self.deadline_s = self._now() + limits.body_s
            if self._reader.awaits_continue:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif phase == HEAD:
            self.deadline_s = self._now() + limits.header_s
        elif server.draining:
            self._leave()
        else:
            self.deadline_s = self._now() + limits.keep_alive_s

    def _may_send(self) -> bool:
        """Return whether the client may send its body; otherwise reject the request."""
        reader, server = self._reader, self._server
        fault = None
        if self._timed != BODY and server.hooks.guard is not None:
            fault = server.hooks.guard(*reader.head)
        if fault is None and reader.body_bytes > LIGHT_BYTES:
            self._count_body_bytes(reader.body_bytes)
            if server.bodies_bytes > server.limits.bodies_bytes:
                fault = _FULL
        if fault is not None:
            self._refuse(fault)
        return fault is None

    def _count_body_bytes(self, nbytes: int) -> None:
        weight = nbytes * BODY_MEMORY_RATIO
        self._server.bodies_bytes += weight - self._weight
        self._weight = weight

    def _leave(self) -> None:
        """Close once the client has read everything."""
        self._leaving = True
        self._held = b""
        self._reader.forget()
        self._transport.close()
        self.deadline_s = self._now() + self._server.limits.stall_s

    def _refuse(self, fault: HttpError) -> None:
        """Respond with an error, and close after the client has had time to read it.

        Until then, what the client sends is read and dropped: closing with unread bytes resets the connection, and the
        client may see the reset before the response.
        """
        self._leaving = True
        self._held = b""
        server, (method, path, headers) = self._server, self._reader.head
        http2 = self._reader.speaks_http2
        shown, request_id = self._reader.path_so_far, request_id_of(headers)
        self._reader.forget()
        self._count_body_bytes(0)
        body = server.errors.body(shown, fault.status, fault.message, fault.type, fault.code)
        head = b"%b%b%b%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        own = own_lines(server.errors.id_lines(shown, request_id))
        text = head % (status_line(fault.status), server.server, own, fault.headers, len(body))
        self._transport.write(_NO_HTTP2 if http2 else text if method == b"HEAD" else text + body)
        if server.hooks.refused is not None:
            server.hooks.refused(fault.status, path, request_id, self._peer)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._read_on()
        self.deadline_s = self._now() + self._server.limits.linger_s

    def _read_on(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
