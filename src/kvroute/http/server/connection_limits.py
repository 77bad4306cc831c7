"""The connections of a port: their number, in total and by address, and the choice of one to close for a new one."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from enum import Enum
from math import inf
from typing import Protocol
from weakref import ReferenceType, ref

IDLE, BEGINNING, UNREAD, BUSY = range(4)
"""State of a connection. IDLE: it waits for a request or a TLS handshake. BEGINNING: it waits for the rest of a
request's head. UNREAD: it waits until the client reads a response or closes. BUSY: it has a request. For a new
connection, existing ones are closed in this order, except BUSY ones."""
_SEARCH_S = 1e-5
"""Time between two searches, in seconds per connection, because a search examines all connections."""


class AcceptedConnection(Protocol):
    """An accepted connection, from before its TLS handshake until it is closed."""

    address: str
    """The address under which it is counted: see `network_of`."""
    deadline_s: float
    """Time of the deadline, on the loop's clock."""

    def waits_for(self) -> int:
        """Return IDLE, BEGINNING, UNREAD or BUSY."""
        ...

    def expire(self, now: float) -> None:
        """Handle the end of the deadline."""
        ...

    def drain(self, idle_until_s: float) -> None:
        """Close after the request in flight, or at the given time if there is none."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...


class ConnectionOutcome(Enum):
    """The outcome for a new connection."""

    TAKEN = "taken"
    FULL = "full"
    """There are too many connections, and none may be closed: send an error response."""
    ADDRESS_FULL = "address_full"
    """There are too many connections of its address, and none of them may be closed: send an error response."""
    DROPPED = "dropped"
    """There are too many rejected connections already: close it without a response."""


class Connections:
    """Counts connections from `enter` to `leave`; at the limit it closes the longest idle one for a new one."""

    def __init__(self) -> None:
        self._counted: dict[AcceptedConnection, None] = {}
        self._of_address: dict[str, int] = {}
        self._ending: dict[AcceptedConnection, None] = {}
        """Connections that were rejected, or closed for a new one, and are not closed yet."""
        self._idle: dict[str, deque[tuple[int, float, ReferenceType[AcceptedConnection]]]] = {}
        """Candidates of the last search, by address ("": any), in the order of closing. The references are weak, so
        that a closed connection is not kept in memory until the next search."""
        self._searched_s: dict[str, float] = {}
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        """Number of open connections."""
        return len(self._counted) + len(self._ending)

    def all(self) -> tuple[AcceptedConnection, ...]:
        """Return all open connections."""
        return (*self._counted, *self._ending)

    def enter(self, new: AcceptedConnection, most: int, most_per_address: int, now: float) -> ConnectionOutcome:
        """Count a new connection, or return why there is no room for it. The caller must call `leave` in both cases."""
        of_address = self._of_address.get(new.address, 0)
        if of_address >= most_per_address and not self._make_room(new.address, now):
            return self._refuse(new, ConnectionOutcome.ADDRESS_FULL, most)
        if len(self._counted) >= most and not self._make_room("", now):
            return self._refuse(new, ConnectionOutcome.FULL, most)
        self._counted[new] = None
        self._of_address[new.address] = self._of_address.get(new.address, 0) + 1
        return ConnectionOutcome.TAKEN

    def leave(self, gone: AcceptedConnection) -> None:
        """Remove a closed connection; a second call does nothing."""
        self._ending.pop(gone, None)
        self._uncount(gone)
        if not len(self):
            self._empty.set()

    async def until_empty(self) -> None:
        """Wait until no connection is open."""
        while len(self):
            self._empty.clear()
            await self._empty.wait()

    def _refuse(self, new: AcceptedConnection, entry: ConnectionOutcome, most: int) -> ConnectionOutcome:
        dropped = len(self._ending) >= most // 8 + 64
        self._ending[new] = None
        return ConnectionOutcome.DROPPED if dropped else entry

    def _uncount(self, gone: AcceptedConnection) -> None:
        if gone not in self._counted:
            return
        del self._counted[gone]
        left = self._of_address[gone.address] - 1
        if left:
            self._of_address[gone.address] = left
        else:
            del self._of_address[gone.address]
            self._idle.pop(gone.address, None)
            self._searched_s.pop(gone.address, None)

    def _make_room(self, address: str, now: float) -> bool:
        """Close the first candidate of an address ("": of any address); False if there is none."""
        if now >= self._searched_s.get(address, -inf) + _SEARCH_S * len(self._counted):
            self._search(address, now)
        idle = self._idle.get(address, ())
        while idle:
            waits_for, deadline_s, reference = idle.popleft()
            oldest = reference()
            if oldest is None or oldest not in self._counted:
                continue
            if oldest.deadline_s == deadline_s and oldest.waits_for() == waits_for:
                self._uncount(oldest)
                self._ending[oldest] = None
                oldest.abort()
                return True
        return False

    def _search(self, address: str, now: float) -> None:
        self._searched_s[address] = now
        found = [
            (waits_for, held.deadline_s, ref(held))
            for held in self._counted
            if address in ("", held.address) and (waits_for := held.waits_for()) != BUSY
        ]
        found.sort(key=lambda candidate: candidate[:2])
        self._idle[address] = deque(found)


def network_of(peer: object) -> str:
    """Return the address under which a connection is counted, from its socket's peer name.

    It is an IPv4 address, the first 64 bits of an IPv6 address (one host may use all addresses below them), or "" if
    the peer has no address.
    """
    if not isinstance(peer, tuple) or not peer:
        return ""
    text = str(peer[0])
    if ":" not in text:
        return text
    packed = socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))
