"""Own KV transfers by pair of instances. They say between which instances an engine has moved the KV that its connector
counts without naming the other instance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvroute.types import Decode, MeasuredBy, TransferMeasured

_KEPT = 1024
"""Maximum number of ended transfers of one instance that wait for the next page of its engine."""
_FRESH_S = 60.0
"""Time after its end for which an engine may still report a transfer. The engine at the other end does not count it."""


@dataclass(slots=True)
class _Own:
    source: str
    target: str
    kv_bytes: float
    uncontended_s: float
    """Duration of the transfer alone, by the cluster file."""
    seconds: float | None = None
    """Duration that the gateway has observed; None: it has not."""
    ended_at: float = 0.0

    @property
    def ends(self) -> tuple[str, str]:
        return self.source, self.target


@dataclass(frozen=True, slots=True)
class Counted:
    """Transfers that an engine has counted between two of its pages."""

    measured_by: MeasuredBy
    kv_bytes: float
    seconds: float
    """Sum over transfers."""
    transfers: int
    """Every tensor-parallel rank counts its part of the KV as a transfer of its own."""


class OwnTransfers:
    """The transfers of this gateway in progress, and those that have ended since their engines' last pages."""

    def __init__(self, uncontended_s: Callable[[int, float], float], ranks_of: Callable[[str], int]) -> None:
        """Args:

        uncontended_s: (tier, bytes) -> duration of a transfer alone, by the cluster file.
        ranks_of: name of an instance -> its tensor-parallel ranks.
        """
        self._uncontended_s, self._ranks_of = uncontended_s, ranks_of
        self._moving: dict[int, _Own] = {}
        """By request."""
        self._ended: dict[str, deque[_Own]] = {}
        """By each of the two instances."""

    def started(self, decision: Decode) -> None:
        """Record the start of a request's transfer."""
        uncontended_s = self._uncontended_s(decision.tier, decision.kv_bytes)
        self._moving[decision.request_id] = _Own(decision.source, decision.target, decision.kv_bytes, uncontended_s)

    def ended(self, decision: Decode, seconds: float | None, now: float) -> None:
        """Record its end, even if it has failed: the engine may have counted it.

        Args:
            decision: as at its start.
            seconds: its duration; None: not observed.
            now: gateway clock.
        """
        own = self._moving.pop(decision.request_id, None)
        if own is not None:
            own.seconds, own.ended_at = seconds, now
            for instance in own.ends:
                self._ended.setdefault(instance, deque(maxlen=_KEPT)).append(own)

    def forget(self, instance: str) -> None:
        """Forget the ended transfers of an instance that has left the cluster."""
        self._ended.pop(instance, None)

    def measured(self, at: float, instance: str, counted: Counted) -> list[TransferMeasured]:
        """Attribute what an engine has counted to pairs of instances, in the order of their names.

        If all own transfers of this time had the same source and target, everything is theirs. Otherwise bytes are
        divided by the bytes of the transfers, and seconds by their durations as observed, or as expected if one was not
        observed. Nothing is attributed if the engine has counted more transfers than this gateway has made: the others
        are unknown.

        Args:
            at: time of the page, gateway clock.
            instance: the engine; it may be the source or the target of its transfers.
            counted: at least one transfer.
        """
        found = [own for own in self._ended.pop(instance, ()) if at - own.ended_at <= _FRESH_S]
        ranks = max([self._ranks_of(instance), *(self._ranks_of(name) for own in found for name in own.ends)])
        transfers = max(1, round(counted.transfers / ranks))
        if len(found) < transfers:  # an engine may count a transfer before its first token reaches the gateway
            found += [own for own in self._moving.values() if instance in own.ends]
        if len(found) < transfers:
            return []
        seconds = counted.seconds / counted.transfers * transfers
        return _shares(at, found, counted, transfers, seconds)


def _shares(
    at: float, found: Sequence[_Own], counted: Counted, transfers: int, seconds: float
) -> list[TransferMeasured]:
    observed = all(own.seconds for own in found)
    groups: dict[tuple[str, str], list[_Own]] = {}
    for own in found:
        groups.setdefault(own.ends, []).append(own)
    all_bytes = sum(own.kv_bytes for own in found)
    all_s = sum(_weight_s(own, observed) for own in found)
    if not (all_bytes > 0 and all_s > 0):
        return []
    return [
        TransferMeasured(
            at,
            source,
            target,
            counted.kv_bytes * sum(own.kv_bytes for own in group) / all_bytes,
            seconds * sum(_weight_s(own, observed) for own in group) / all_s,
            max(1, round(transfers * len(group) / len(found))),
            counted.measured_by,
        )
        for (source, target), group in sorted(groups.items())
    ]


def _weight_s(own: _Own, observed: bool) -> float:
    return (own.seconds or 0.0) if observed else own.uncontended_s
