"""Bounds of the difference between an engine's clock and this machine's, from timestamps in the engine's answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from kvroute.doctor.report import ClockReport

DATE_SPAN_S = 2.0
"""A Date header names a whole second, and servers keep it for up to another one."""
OFFSET_MAX_S = 1.0
"""A clock that is certainly further away is a finding."""


@dataclass(frozen=True, slots=True)
class Offset:
    """The engine's clock minus this machine's is within these bounds."""

    least_s: float = -math.inf
    most_s: float = math.inf

    @property
    def known(self) -> bool:
        """Whether both bounds are finite."""
        return math.isfinite(self.least_s) and math.isfinite(self.most_s)

    def report(self) -> ClockReport | None:
        """Middle and half width; None without bounds."""
        if not self.known:
            return None
        return ClockReport((self.least_s + self.most_s) / 2.0, (self.most_s - self.least_s) / 2.0)


def from_date(date: str, sent_s: float, received_s: float) -> Offset:
    """Bounds by the Date header of an answer to a request of `sent_s` whose head came at `received_s`."""
    try:
        second = parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return Offset()
    return Offset(second - received_s, second + DATE_SPAN_S - sent_s)


def from_timestamp(timestamp_s: float, sent_s: float, received_s: float) -> Offset:
    """Bounds by a timestamp that the engine made after a request of `sent_s` had left and before `received_s`."""
    return Offset(timestamp_s - received_s, timestamp_s - sent_s)


def narrowest(offsets: Iterable[Offset]) -> Offset:
    """What all bounds have in common. Bounds that contradict the narrowest ones, because a clock was set meanwhile, are
    left out."""
    best = Offset()
    for offset in sorted(offsets, key=lambda each: (each.most_s - each.least_s, each.least_s)):
        least, most = max(best.least_s, offset.least_s), min(best.most_s, offset.most_s)
        if least <= most:
            best = Offset(least, most)
    return best


def wrong(clock: ClockReport) -> bool:
    """Whether the clock is certainly off by more than OFFSET_MAX_S."""
    return abs(clock.offset_s) - clock.error_s > OFFSET_MAX_S
