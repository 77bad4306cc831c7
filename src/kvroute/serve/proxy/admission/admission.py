"""Admission control: a bounded number of requests in flight and a bounded queue before it.

Pure: the caller passes the time, keeps a timer for `expires_at` and responds to rejected requests. A request is
rejected with 429 if its key is at its limit, and with 503 if the queue is full or the wait in it is too long. The limit
of a key counts waiting requests too, so that one client cannot fill the queue.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

Ticket: TypeAlias = int
"""Number by which the caller identifies a request; used once."""

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1, 60
_RATE_S = 10.0
"""Time constant of the measured departure rate, in seconds."""
_DEPARTURES_MIN = 1.0
"""With fewer departures in that time, the rate follows from the number of requests and the time that each takes."""
_DURATION_FADES = 0.95
"""Weight of the earlier mean duration when it is updated with a request that is over."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request may start; the caller calls `release` when it is over."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits until `release` or `expire` returns its ticket."""

    expires_at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is rejected and not counted; the caller sends this response."""

    status: int
    """429: too many requests of this key; 503: too many requests in total."""
    reason: str
    retry_after_s: int


Entry: TypeAlias = Accepted | Queued | Refused


class PeerCounts(Protocol):
    """Requests that other processes count against the same limits."""

    shared: bool
    """Whether there are such processes."""

    @property
    def in_flight(self) -> int:
        """Number of requests that they have admitted and that are not over."""
        ...

    @property
    def queued(self) -> int:
        """Number of requests that wait there."""
        ...

    def held_by(self, key: str) -> int:
        """Return the number of requests of a key there, in flight and waiting."""
        ...

    def locked(self) -> AbstractContextManager[None]:
        """Keep the others from changing their counts."""
        ...

    def write(self, in_flight: int, queued: int) -> None:
        """Publish the own counts."""
        ...

    def write_key(self, key: str, held: int) -> None:
        """Publish the own count of a key."""
        ...


class NoPeers:
    """A `PeerCounts` without other processes."""

    shared = False
    in_flight = queued = 0

    def held_by(self, key: str) -> int:
        """See PeerCounts."""
        return 0

    def locked(self) -> AbstractContextManager[None]:
        """See PeerCounts."""
        return nullcontext()

    def write(self, in_flight: int, queued: int) -> None:
        """See PeerCounts."""

    def write_key(self, key: str, held: int) -> None:
        """See PeerCounts."""


ADMITTED: Final = Accepted()


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on number and waiting time. The limits per key do not apply to requests without a key."""

    in_flight: int = 2048
    queue: int = 512
    """Largest number of waiting requests; 0: no queue."""
    queue_wait_s: float = 30.0
    per_key: int = 256
    """Largest number of requests of one key, in flight and waiting."""
    of_key: Mapping[str, int] = field(default_factory=dict)
    """Limits that replace `per_key` for single keys, by key name."""

    def __post_init__(self) -> None:
        assert self.in_flight >= 1, "at least one request must be admitted"
        assert self.queue >= 0


class AdmissionController:
    """Admits requests in order of arrival; each that leaves makes room for the one that has waited longest."""

    __slots__ = (
        "_begins_s",
        "_duration_s",
        "_in_flight",
        "_keys",
        "_limits",
        "_peers",
        "_queue",
        "_rate",
        "_rate_at",
        "_seen_at",
        "_started_at",
    )

    def __init__(self, limits: AdmissionLimits, now: float = 0.0, peers: PeerCounts | None = None) -> None:
        """Args: `peers`: what other processes count against the same limits; None: there are none."""
        self._limits = limits
        self._peers: PeerCounts = peers if peers is not None else NoPeers()
        self._in_flight: dict[Ticket, tuple[str | None, float]] = {}
        """Key and time of admission."""
        self._begins_s = 0.0
        """Sum of these times."""
        self._duration_s = 0.0
        """Mean time from admission to departure; 0: nothing has left yet."""
        self._queue: OrderedDict[Ticket, tuple[str | None, float]] = OrderedDict()
        """Key and time of expiry, longest waiting first."""
        self._keys: dict[str, int] = {}
        self._rate = 0.0
        """Number of departures, decaying with time constant _RATE_S; divided by the time that it covers, a rate."""
        self._rate_at = self._started_at = self._seen_at = now
        """`_seen_at`: the last time that a caller has passed."""

    @property
    def shared(self) -> bool:
        """Whether other processes count requests against the same limits."""
        return self._peers.shared

    @property
    def in_flight(self) -> int:
        """Number of admitted requests that are not over."""
        return len(self._in_flight)

    @property
    def queued(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def expires_at(self) -> float | None:
        """Time when the request that has waited longest expires; None: no request waits."""
        return next(iter(self._queue.values()))[1] if self._queue else None

    def held_by(self, key: str) -> int:
        """Return the number of requests of a key, in flight and waiting."""
        return self._keys.get(key, 0)

    def acquire(self, ticket: Ticket, key: str | None, now: float) -> Entry:
        """Admit, queue or reject a new request. `key` is the name of its API key if keys are in use."""
        assert ticket not in self._in_flight, "a ticket is used once"
        assert ticket not in self._queue, "a ticket is used once"
        self._seen_at = now
        with self._peers.locked():
            return self._entry(ticket, key, now)

    def _entry(self, ticket: Ticket, key: str | None, now: float) -> Entry:
        limits, peers = self._limits, self._peers
        if key is not None:
            held = self._keys.get(key, 0) + peers.held_by(key)
            most = limits.of_key.get(key, limits.per_key)
            if held >= most:
                reason = f"this key has {held} requests in flight or queued, and its limit is {most}"
                return Refused(429, reason, self._whole_s(self.in_flight + self.queued, held, now))
        # The queue is empty while there is room: every change that makes room admits the first waiting requests. Room
        # that another process makes is first for requests that wait here.
        if self._has_room() and not self._queue:
            self._begin(ticket, key, now)
            entry: Entry = ADMITTED
        elif len(self._queue) + peers.queued < limits.queue:
            self._queue[ticket] = (key, now + limits.queue_wait_s)
            entry = Queued(now + limits.queue_wait_s)
        else:
            return self._full("the gateway is full", now)
        if key is not None:
            self._keys[key] = self._keys.get(key, 0) + 1
            peers.write_key(key, self._keys[key])
        peers.write(len(self._in_flight), len(self._queue))
        return entry

    def release(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Remove a request that is over or whose client has left, waiting or not. An unknown ticket changes nothing.

        Returns:
            the tickets that are admitted now, in order of arrival.
        """
        if ticket not in self._in_flight:
            self.cancel(ticket)
            return []
        self._seen_at = now
        key, began_at = self._in_flight.pop(ticket)
        self._drop_key(key)
        self._count_departure(now, began_at)
        if self._queue:
            return self.admit()
        self._peers.write(len(self._in_flight), 0)
        return []

    def cancel(self, ticket: Ticket) -> None:
        """Remove a waiting request whose client has left. Does nothing if the request does not wait."""
        waiting = self._queue.pop(ticket, None)
        if waiting is not None:
            self._drop_key(waiting[0])
            self._peers.write(len(self._in_flight), len(self._queue))

    def expire(self, now: float) -> list[Ticket]:
        """Remove and return the requests that have waited too long, longest first; `overdue` gives their response."""
        self._seen_at = now
        tickets = []
        while self._queue:
            ticket, (key, expires_at) = next(iter(self._queue.items()))
            if expires_at > now:
                break
            del self._queue[ticket]
            self._drop_key(key)
            tickets.append(ticket)
        self._peers.write(len(self._in_flight), len(self._queue))
        return tickets

    def overdue(self, now: float) -> Refused:
        """Return the response to a request that `expire` has returned."""
        return self._full(f"the gateway is full: the request waited {self._limits.queue_wait_s:g} s in the queue", now)

    def change(self, limits: AdmissionLimits) -> list[Ticket]:
        """Set new limits. No request is rejected because of them, and waiting requests keep their expiry times.

        Returns:
            the tickets that are admitted now.
        """
        self._limits = limits
        return self.admit()

    def admit(self) -> list[Ticket]:
        """Admit the first waiting requests as far as there is room, which another process may have made.

        Returns:
            their tickets.
        """
        tickets = []
        with self._peers.locked():
            while self._queue and self._has_room():
                ticket, (key, _) = self._queue.popitem(last=False)
                self._begin(ticket, key, self._seen_at)
                tickets.append(ticket)
            self._peers.write(len(self._in_flight), len(self._queue))
        return tickets

    def _begin(self, ticket: Ticket, key: str | None, now: float) -> None:
        if not self._in_flight:  # the rate is measured while there are requests
            self._begins_s = self._rate = 0.0
            self._started_at = self._rate_at = now
        self._in_flight[ticket] = (key, now)
        self._begins_s += now

    def _has_room(self) -> bool:
        return len(self._in_flight) + self._peers.in_flight < self._limits.in_flight

    def _drop_key(self, key: str | None) -> None:
        if key is None:
            return
        if self._keys[key] == 1:
            del self._keys[key]
        else:
            self._keys[key] -= 1
        self._peers.write_key(key, self._keys.get(key, 0))

    def _full(self, reason: str, now: float) -> Refused:
        return Refused(503, reason, self._whole_s(self.queued + 1, 1, now))

    def _count_departure(self, now: float, began_at: float) -> None:
        self._begins_s -= began_at
        lasted_s = max(0.0, now - began_at)
        kept = _DURATION_FADES if self._duration_s else 0.0
        self._duration_s = kept * self._duration_s + (1.0 - kept) * lasted_s
        self._rate = self._rate * math.exp(-max(0.0, now - self._rate_at) / _RATE_S) + 1.0
        self._rate_at = max(now, self._rate_at)

    def _whole_s(self, leaving: int, shared_by: int, now: float) -> int:
        """Return whole seconds until `leaving / shared_by` requests have left, within limits."""
        wait_s = leaving / shared_by / max(self._departures_per_s(now), 1e-9)
        return math.ceil(min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S))

    def _departures_per_s(self, now: float) -> float:
        """Return the measured rate of the last seconds. If hardly anything has left in that time, it is the number of
        requests in flight over the time that one takes: the mean of earlier ones, or longer if those in flight are
        older."""
        departures = self._rate * math.exp(-max(0.0, now - self._rate_at) / _RATE_S)
        if departures >= _DEPARTURES_MIN:
            return departures / (_RATE_S * -math.expm1(-max(now - self._started_at, 1e-3) / _RATE_S))
        present = max(len(self._in_flight), 1)
        age_s = now - self._begins_s / present if self._in_flight else 0.0
        return present / max(self._duration_s, age_s, 1e-3)
