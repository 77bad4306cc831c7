"""Connections to an instance's KV port that have not said yet what they want: bounded in number and in time."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from kvroute.emulator.clock import Alarm, Clock

ARRIVALS_MAX = 1024
"""As many as may be accepted at once."""
ORDER_S = 10.0
"""An order that has not come by then does not come any more."""


class Connection(Protocol):
    """What can be broken off."""

    def abort(self) -> None:
        """Break off."""
        ...


class Arrivals:
    """The oldest has to go when there are too many, and everyone after `order_s`."""

    def __init__(self, clock: Clock, most: int = ARRIVALS_MAX, order_s: float = ORDER_S) -> None:
        self._clock, self._most, self._order_s = clock, most, order_s
        self._waiting: dict[Connection, Alarm] = {}
        """In the order of their arrival."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, connection: Connection) -> None:
        """One more has come."""
        alarm = self._clock.at(self._clock.now() + self._order_s, partial(self._give_up, connection))
        self._waiting[connection] = alarm
        if len(self._waiting) > self._most:
            self._give_up(next(iter(self._waiting)))

    def end(self, connection: Connection) -> None:
        """It has said what it wants, or has left; nothing if it had before."""
        alarm = self._waiting.pop(connection, None)
        if alarm is not None:
            alarm.cancel()

    def _give_up(self, connection: Connection) -> None:
        self.end(connection)
        connection.abort()
