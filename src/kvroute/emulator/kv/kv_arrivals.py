"""Connections to an instance's KV port that have not sent a request yet, limited in number and in time."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from kvroute.emulator.clock import Alarm, Clock

ARRIVALS_MAX = 1024
"""Maximum number of connections without a request."""
ORDER_S = 10.0
"""Time within which a connection must send its request, in seconds."""


class AbortableConnection(Protocol):
    """A connection that can be aborted."""

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class HandshakeBounds:
    """Aborts the oldest connection when there are too many, and every connection after `order_s` without a request."""

    def __init__(self, clock: Clock, most: int = ARRIVALS_MAX, order_s: float = ORDER_S) -> None:
        self._clock, self._most, self._order_s = clock, most, order_s
        self._waiting: dict[AbortableConnection, Alarm] = {}
        """Alarms of the connections, in order of arrival."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, connection: AbortableConnection) -> None:
        """Add a new connection."""
        alarm = self._clock.at(self._clock.now() + self._order_s, partial(self._give_up, connection))
        self._waiting[connection] = alarm
        if len(self._waiting) > self._most:
            self._give_up(next(iter(self._waiting)))

    def end(self, connection: AbortableConnection) -> None:
        """Remove a connection that has sent its request or is closed. No effect if it has been removed before."""
        alarm = self._waiting.pop(connection, None)
        if alarm is not None:
            alarm.cancel()

    def _give_up(self, connection: AbortableConnection) -> None:
        self.end(connection)
        connection.abort()
