"""The connections of a port: how many there are, in all and by address, and which one closes to make room."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from enum import Enum
from math import inf
from typing import Protocol
from weakref import ReferenceType, ref

IDLE, BEGINNING, UNREAD, BUSY = range(4)
"""What a connection waits for: a request (or a TLS handshake); the rest of a request's head; its client to read an
answer, or to close. Connections close in this order when room is needed; BUSY ones have a request and stay."""
_SEARCH_S = 1e-5
"""Time between two searches, for each connection: a search looks at all of them."""


class Connection(Protocol):
    """One accepted connection, from before its TLS handshake to its end."""

    address: str
    """The address under which it counts: see `network_of`."""
    deadline_s: float
    """By the loop's clock."""

    def waits_for(self) -> int:
        """IDLE, BEGINNING, UNREAD or BUSY."""
        ...

    def expire(self, now: float) -> None:
        """The deadline has passed."""
        ...

    def drain(self, idle_until_s: float) -> None:
        """End after the request under way; without one at the time given."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...


class Entry(Enum):
    """The outcome for a new connection."""

    TAKEN = "taken"
    FULL = "full"
    """There are too many, and none that may be closed: answer so."""
    ADDRESS_FULL = "address_full"
    """The same of its address."""
    DROPPED = "dropped"
    """Even an answer is too much."""


class Connections:
    """Counts connections from `enter` to `leave`; closes the longest idle one where a new one needs room."""

    def __init__(self) -> None:
        self._counted: dict[Connection, None] = {}
        self._of_address: dict[str, int] = {}
        self._ending: dict[Connection, None] = {}
        """Refused or closed for want of room, and not yet gone."""
        self._idle: dict[str, deque[tuple[int, float, ReferenceType[Connection]]]] = {}
        """Candidates of the last search, by address ("": any), the first to close first. Weak references: a connection
        that has closed must not wait here for the next search."""
        self._searched_s: dict[str, float] = {}
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        """All that are open."""
        return len(self._counted) + len(self._ending)

    def all(self) -> tuple[Connection, ...]:
        """All that are open."""
        return (*self._counted, *self._ending)

    def enter(self, new: Connection, most: int, most_per_address: int, now: float) -> Entry:
        """Count a new connection, or say why there is no room for it; it must `leave` in either case."""
        of_address = self._of_address.get(new.address, 0)
        if of_address >= most_per_address and not self._make_room(new.address, now):
            return self._refuse(new, Entry.ADDRESS_FULL, most)
        if len(self._counted) >= most and not self._make_room("", now):
            return self._refuse(new, Entry.FULL, most)
        self._counted[new] = None
        self._of_address[new.address] = self._of_address.get(new.address, 0) + 1
        return Entry.TAKEN

    def leave(self, gone: Connection) -> None:
        """A connection is closed; again: nothing."""
        self._ending.pop(gone, None)
        self._uncount(gone)
        if not len(self):
            self._empty.set()

    async def until_empty(self) -> None:
        """Wait until none is open."""
        while len(self):
            self._empty.clear()
            await self._empty.wait()

    def _refuse(self, new: Connection, entry: Entry, most: int) -> Entry:
        dropped = len(self._ending) >= most // 8 + 64
        self._ending[new] = None
        return Entry.DROPPED if dropped else entry

    def _uncount(self, gone: Connection) -> None:
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
        """Close the first candidate of an address ("": of any); False where there is none."""
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
    """The address under which a connection counts, from its socket's peer name: an IPv4 address, the first 64 bits of
    an IPv6 one (a host has all that follow), or "" where it has none."""
    if not isinstance(peer, tuple) or not peer:
        return ""
    text = str(peer[0])
    if ":" not in text:
        return text
    packed = socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))
