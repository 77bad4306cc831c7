"""Bounds of what another gateway may report: every number that a core adds, multiplies or takes the logarithm of.

The bounds are far beyond what a gateway counts or learns, so that only a faulty or foreign writer exceeds them, and far
below those at which sums over all requests lose digits or overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvroute.types import (
    BandwidthLearned,
    CapacityLearned,
    InputError,
    KvStored,
    PeerReport,
    RoleDraining,
    RoleSwitched,
    ScaleEnded,
    SessionsServed,
    ThresholdKnown,
    TransferMeasured,
)

SECONDS_MAX = 1e10
"""Largest duration, and largest absolute time; seconds since 1970 have a fifth of it."""
PREFILL_S_MAX = 86_400.0
"""Longest prefill of one request."""
BYTES_MAX = 1e18
"""Largest number of bytes of one request or of all transfers of a measurement."""
COUNT_MAX = 1 << 53
"""Largest count; floats represent it exactly."""
LOG_MAX = 20.0
"""Largest absolute logarithm of a ratio of bandwidths."""
_HASH_MAX = (1 << 64) - 1
_Numbers = Iterator[tuple[float, float, float]]
"""Values with their lower and upper bounds."""


def check_counts(report: PeerReport) -> None:
    """Raise InputError if the time of a report, or a count for a limit, is impossible."""
    values = [(report.at, -SECONDS_MAX, SECONDS_MAX)]
    if (counts := report.admissions) is not None:
        values += [(count, 0, COUNT_MAX) for count in (counts.in_flight, counts.queued, *counts.keys.values())]
    if report.usage is not None:
        values += [(tokens, -COUNT_MAX, COUNT_MAX) for pair in report.usage.keys.values() for tokens in pair]
    _check(report, "", values)


def check_report(report: PeerReport) -> None:
    """Raise InputError if a booking or an event of a report has an impossible number."""
    for booking in report.bookings:
        values = ((booking.prefill_s, PREFILL_S_MAX), (booking.need_bytes, BYTES_MAX), (booking.kv_bytes, BYTES_MAX))
        for value, most in values:
            if not 0.0 <= value <= most:
                raise _impossible(report, f"for request {booking.request_id}", value, 0, most)
    for event in report.events:
        _check(report, f"in {type(event).__name__}", _NUMBERS[type(event)](event))


def _check(report: PeerReport, where: str, values: Any) -> None:
    for value, least, most in values:
        if not least <= value <= most:
            raise _impossible(report, where, value, least, most)


def _impossible(report: PeerReport, where: str, value: float, least: float, most: float) -> InputError:
    what = f"gateway {report.gateway} reports {value}"
    return InputError(f"{what} {where}" if where else what, hint=f"give numbers from {least:g} to {most:g}")


def _of_blocks(event: KvStored) -> _Numbers:
    yield event.block_tokens, 1, COUNT_MAX
    if event.blocks:
        yield min(event.blocks), 0, _HASH_MAX
        yield max(event.blocks), 0, _HASH_MAX


def _of_transfers(event: TransferMeasured) -> _Numbers:
    yield event.kv_bytes, 0, BYTES_MAX
    yield event.seconds, 0, SECONDS_MAX
    yield event.transfers, 1, COUNT_MAX


def _of_threshold(event: ThresholdKnown) -> _Numbers:
    yield event.tokens, 0, COUNT_MAX
    yield event.base_tokens, 0, COUNT_MAX


def _of_bandwidth(event: BandwidthLearned) -> _Numbers:
    for known in (*event.tiers, *(pair[2] for pair in event.pairs)):
        if known is not None:
            yield known.log, -LOG_MAX, LOG_MAX
            yield known.transfers, 0, COUNT_MAX
            yield known.ratio, 1e-9, 1e9
            yield known.at, -SECONDS_MAX, SECONDS_MAX


def _of_capacity(event: CapacityLearned) -> _Numbers:
    for log_sum, weight in zip(event.log_sums, event.weights, strict=False):
        yield weight, 0, COUNT_MAX
        yield log_sum, -LOG_MAX * (weight + 1), LOG_MAX * (weight + 1)
    for count in event.transfers:
        yield count, 0, COUNT_MAX
    for age_s in event.ages_s:
        yield age_s or 0, 0, SECONDS_MAX
    for tokens in event.answers:
        yield tokens, 0, COUNT_MAX


def _of_sessions(event: SessionsServed) -> _Numbers:
    if event.sessions:
        yield min(event.sessions)[0], 0, _HASH_MAX
        yield max(event.sessions)[0], 0, _HASH_MAX


def _none(event: RoleDraining | RoleSwitched | ScaleEnded) -> _Numbers:
    yield from ()


_NUMBERS: dict[type, Callable[[Any], _Numbers]] = {
    KvStored: _of_blocks,
    TransferMeasured: _of_transfers,
    ThresholdKnown: _of_threshold,
    BandwidthLearned: _of_bandwidth,
    CapacityLearned: _of_capacity,
    SessionsServed: _of_sessions,
    RoleDraining: _none,
    RoleSwitched: _none,
    ScaleEnded: _none,
}
"""By kind of event; those that change an instance are checked where they are applied."""
