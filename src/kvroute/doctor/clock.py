"""Bounds of the difference between an engine's clock and this machine's, from timestamps in the engine's responses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from kvroute.doctor.report import ClockReport

DATE_SPAN_S = 2.0
"""Uncertainty of a Date header, in seconds: it has whole seconds, and servers reuse it for up to another one."""
OFFSET_MAX_S = 1.0
"""A clock that is certainly off by more than this, in seconds, is a finding."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Bounds of the engine's clock minus this machine's."""

    least_s: float = -math.inf
    most_s: float = math.inf

    @property
    def known(self) -> bool:
        """True if both bounds are finite."""
        return math.isfinite(self.least_s) and math.isfinite(self.most_s)

    def report(self) -> ClockReport | None:
        """Return middle and half width of the bounds; None without bounds."""
        if not self.known:
            return None
        return ClockReport((self.least_s + self.most_s) / 2.0, (self.most_s - self.least_s) / 2.0)


def from_date(date: str, sent_s: float, received_s: float) -> Offset:
    """Return bounds from the Date header of a response.

    Args:
        date: value of the header.
        sent_s: time at which the request was sent.
        received_s: time at which the response's headers arrived.
    """
    try:
        second = parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return Offset()
    return Offset(second - received_s, second + DATE_SPAN_S - sent_s)


def from_timestamp(timestamp_s: float, sent_s: float, received_s: float) -> Offset:
    """Return bounds from a timestamp that the engine made after the request (`sent_s`) and before `received_s`."""
    return Offset(timestamp_s - received_s, timestamp_s - sent_s)


def narrowest(offsets: Iterable[Offset]) -> Offset:
    """Return the intersection of all bounds. Bounds that contradict the narrowest ones, because a clock was set in
    between, are left out."""
    best = Offset()
    for offset in sorted(offsets, key=lambda bounds: (bounds.most_s - bounds.least_s, bounds.least_s)):
        least, most = max(best.least_s, offset.least_s), min(best.most_s, offset.most_s)
        if least <= most:
            best = Offset(least, most)
    return best


def wrong(clock: ClockReport) -> bool:
    """Return whether the clock is certainly off by more than OFFSET_MAX_S."""
    return abs(clock.offset_s) - clock.error_s > OFFSET_MAX_S
