"""One client's connection: its requests are answered one after the other, and its waits are bounded; parses nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol, TypeAlias, cast

from kvroute.gateway.answers import error_body
from kvroute.gateway.connections import BEGINNING, BUSY, UNREAD, Entry, network_of
from kvroute.gateway.connections import IDLE as NO_REQUEST
from kvroute.gateway.deadlines import NEVER_S
from kvroute.gateway.exchange import Exchange, Headers, status_line
from kvroute.gateway.reading import BODY, BODY_MEMORY_RATIO, HEAD, IDLE, LIGHT_BYTES, Fault, Limits, RequestReader
from kvroute.gateway.web_pages import WebPages

_HELD_BYTES = 64 * 1024
"""Reading stops when a pipeline has more bytes waiting. Below, it goes on, so that a client's leaving is seen."""
_NEITHER = -1
_PROBE_S, _PROBE_MOST_S = 0.5, 30.0
"""When a half-closed connection is looked at first, and how seldom at last: twice as late each time."""
_END_OF_SIDE_S = 0.5
"""A client that sends no more and waits for its answer ends its side with its request; a later end means that it has
left. This is the time for the event loop to read both."""

_RETRY = b"retry-after: 1\r\n"
_BUSY = Fault(503, "the gateway has as many connections as it may; try again later", headers=_RETRY)
_BUSY_ADDRESS = Fault(503, "your address has as many connections as it may; try again later", headers=_RETRY)
_FULL = Fault(503, "the gateway holds as many large bodies as it may; try again later", headers=_RETRY)
_SLOW_HEAD = Fault(408, "the request's headers took too long")
_SLOW_BODY = Fault(408, "the request's body took too long")


Handler: TypeAlias = Callable[[Exchange], None]
"""What answers requests. Called once the whole body is there; must neither block nor raise."""
Guard: TypeAlias = Callable[[bytes, bytes, Headers], Fault | None]
"""Looks at method, path and headers of a request whose body is still to come, and may refuse to read that."""


class Frontage(Protocol):
    """What the connections of one door share."""

    handler: Handler
    guard: Guard | None
    refused: Callable[[int, bytes], None] | None
    """Hears the status and path (empty: not known) of what the door itself refuses."""
    limits: Limits
    pages: WebPages | None
    """Which web pages may send requests; None: all."""
    bodies_bytes: int
    """Memory of the bodies that clients have weighed in."""
    server: bytes
    """A whole header line, or nothing."""
    draining: bool

    def enter(self, new: Client) -> Entry:
        """A client has connected; whether there is room for it."""
        ...

    def leave(self, gone: Client) -> None:
        """A client's connection is closed."""
        ...


class Client(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, door: Frontage) -> None:
        self.deadline_s = NEVER_S
        self._door = door
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._transport: asyncio.Transport
        self._peer = self.address = ""
        self._reader = RequestReader(door.limits, door.pages)
        self._current: Exchange | None = None
        self._held = b""
        self._timed = _NEITHER
        """The reader's phase that the deadline is for."""
        self._weight = 0
        """Memory that a large body takes, counted at the door."""
        self._unsent_bytes = -1
        """-1: the client reads as fast as it is written to."""
        self._reading_paused = self._advancing = self._leaving = False
        self._half_closed = False
        """The client sends no more, and may be waiting for its answers."""
        self._probe_s = _PROBE_S

    def drain(self, idle_until_s: float) -> None:
        """Close after the answer under way; between requests wait until then: one may be on its way."""
        if self._current is not None:
            self._current.keep_alive = False
        elif not self._leaving and self._unsent_bytes < 0 and self._reader.phase == IDLE:
            self.deadline_s = min(self.deadline_s, idle_until_s)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def waits_for(self) -> int:
        """What would be lost by closing now: see `connections`."""
        phase = self._reader.phase
        if self._current is not None:
            return BUSY
        if self._leaving or self._unsent_bytes >= 0:
            return UNREAD
        return NO_REQUEST if phase == IDLE else BEGINNING if phase == HEAD else BUSY

    def expire(self, now: float) -> None:
        """A deadline has passed: close, or answer that the client is too slow."""
        if self._leaving:
            self._transport.abort()
        elif self._unsent_bytes >= 0:
            unsent = self._transport.get_write_buffer_size()
            if unsent >= self._unsent_bytes:
                self._transport.abort()
            else:  # slow, but there
                self._unsent_bytes = unsent
                self.deadline_s = now + self._door.limits.stall_s
        elif self._current is not None:
            self._probe(now)
        elif self._reader.phase == IDLE:
            self._leave()
        else:
            self._refuse(_SLOW_HEAD if self._reader.phase == HEAD else _SLOW_BODY)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else ""
        self.address = network_of(peer)
        self.deadline_s = self._now() + self._door.limits.header_s
        self._timed = IDLE
        entry = self._door.enter(self)
        if entry is Entry.DROPPED:
            self._leaving = True
            self._transport.abort()
        elif entry is not Entry.TAKEN:
            self._refuse(_BUSY if entry is Entry.FULL else _BUSY_ADDRESS)

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
        """The client sends no more. It may have left, or wait for its answers; TLS knows no such half of an end."""
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
        """Learn whether a client that sends no more is there: one that has left resets the connection when it is sent
        anything. Before the answer begins, HTTP/1.1 has `100 Continue` for that."""
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
        self._door.leave(self)
        self._reader.forget()
        self._weigh(0)
        current, self._current = self._current, None
        if current is not None:
            current.lose()

    def pause_writing(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self.deadline_s = self._now() + self._door.limits.stall_s
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

    # one request after the other

    def _advance(self) -> None:
        """Go on as far as can be without waiting. A loop, lest a pipeline become a recursion."""
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
        """Hand the next request over."""
        door = self._door
        exchange = Exchange(
            *self._reader.ready.popleft(),
            self._now(),
            self._peer,
            self._transport,
            door.server,
            self._answered,
            self._body_released,
        )
        self._current = exchange
        if self._weight or len(exchange.body) > LIGHT_BYTES:
            self._weigh(len(exchange.body))
        self.deadline_s = self._now() + self._probe_s if self._half_closed else NEVER_S
        self._timed = _NEITHER
        if door.draining:
            exchange.keep_alive = False
        try:
            door.handler(exchange)
        except Exception as error:
            self._mourn(error)
            if exchange.started:
                exchange.abort()
            else:
                exchange.respond(500, error_body("the gateway failed", "server_error"))

    def _mourn(self, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "the handler raised", "exception": error})

    def _body_released(self) -> None:
        self._weigh(0)

    def _answered(self, exchange: Exchange) -> None:
        self._current = None
        if self._weight:
            self._weigh(0)
        if self._leaving:
            return
        if exchange.keep_alive:
            self._advance()
        else:
            self._leave()

    def _wait(self) -> None:
        """For the next request, or for the rest of one."""
        if self._half_closed:
            self._leave()
            return
        phase, door = self._reader.phase, self._door
        if phase == BODY and not self._may_send():
            return
        if phase == self._timed:
            return
        self._timed = phase
        limits = door.limits
        if phase == BODY:
            self.deadline_s = self._now() + limits.body_s
            if self._reader.awaits_continue:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif phase == HEAD:
            self.deadline_s = self._now() + limits.header_s
        elif door.draining:
            self._leave()
        else:
            self.deadline_s = self._now() + limits.keep_alive_s

    def _may_send(self) -> bool:
        """Whether the body that is under way may go on; otherwise it is refused."""
        reader, door = self._reader, self._door
        fault = None
        if self._timed != BODY and door.guard is not None:
            fault = door.guard(*reader.head)
        if fault is None and reader.body_bytes > LIGHT_BYTES:
            self._weigh(reader.body_bytes)
            if door.bodies_bytes > door.limits.bodies_bytes:
                fault = _FULL
        if fault is not None:
            self._refuse(fault)
        return fault is None

    def _weigh(self, nbytes: int) -> None:
        weight = nbytes * BODY_MEMORY_RATIO
        self._door.bodies_bytes += weight - self._weight
        self._weight = weight

    def _leave(self) -> None:
        """Close as soon as the client has read everything."""
        self._leaving = True
        self._held = b""
        self._reader.forget()
        self._transport.close()
        self.deadline_s = self._now() + self._door.limits.stall_s

    def _refuse(self, fault: Fault) -> None:
        """Answer with an error and close, but not before the client has had time to read it.

        What it still sends is read and dropped meanwhile: closing with unread bytes resets the connection, and a reset
        may overtake the answer.
        """
        self._leaving = True
        self._held = b""
        door, (method, path, _) = self._door, self._reader.head
        self._reader.forget()
        self._weigh(0)
        kind = fault.type or ("server_error" if fault.status >= 500 else "invalid_request_error")
        body = error_body(fault.message, kind, code=fault.code)
        head = b"%b%b%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        text = head % (status_line(fault.status), door.server, fault.headers, len(body))
        self._transport.write(text if method == b"HEAD" else text + body)
        if door.refused is not None:
            door.refused(fault.status, path)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._read_on()
        self.deadline_s = self._now() + self._door.limits.linger_s

    def _read_on(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
