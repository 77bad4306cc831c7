"""What several gateways charge to API keys with common rate limits; without I/O and clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvroute.types import PeerReport, UsageCounts

Amounts = tuple[int, int]
"""Requests and tokens."""


@dataclass(slots=True)
class _Known:
    """Last charges of another gateway, by key."""

    sequence: int = 0
    complete: bool = False
    """Whether a whole report has come: a key without an entry had no charges then."""
    keys: dict[str, Amounts] = field(default_factory=dict)


class ChargedUsage:
    """The own charges, for the next report, and those that the other gateways have reported.

    The charges of others are as old as their reports. What is charged meanwhile is taken from the buckets later, so
    over a longer time all gateways together keep to the rate. Only charges that another gateway makes while it is
    known count, because those before may be older than a minute.
    """

    def __init__(self, group: str = "", *, within_group: bool = False) -> None:
        """Args: `group`: gateways of one machine, empty for a gateway alone; `within_group`: only those of this
        group count."""
        self._group, self._within_group = group, within_group
        self._own: dict[str, Amounts] = {}
        self._changed: dict[str, None] = {}
        self._others: dict[str, _Known] = {}
        self._total: dict[str, Amounts] = {}

    @property
    def changed(self) -> bool:
        """Whether own charges have changed since the last report."""
        return bool(self._changed)

    def write(self, key: str, requests: int, tokens: int) -> None:
        """Set the own charges of a key since the start."""
        self._own[key] = (requests, tokens)
        self._changed[key] = None

    def take(self, *, whole: bool) -> UsageCounts | None:
        """Return the charges for the next report; None if nothing has changed, unless it is a whole report."""
        if not (whole or self._changed):
            return None
        keys = self._own.copy() if whole else {key: self._own[key] for key in self._changed}
        self._changed.clear()
        return UsageCounts(self._group, keys)

    def by_others(self, key: str) -> Amounts:
        """Return what the others have charged to a key since they are known; refunds reduce it."""
        return self._total.get(key, (0, 0))

    def keys_of_others(self) -> tuple[str, ...]:
        """Return the keys to which the others have charged something."""
        return tuple(self._total)

    def received(self, report: PeerReport) -> None:
        """Process the charges in another gateway's report; one that comes late or again changes nothing."""
        usage = report.usage
        if usage is None or (self._within_group and not self._same_machine(usage)):
            return
        other = self._others.setdefault(report.gateway, _Known())
        if report.sequence <= other.sequence:
            return
        other.sequence = report.sequence
        for key, charged in usage.keys.items():
            before = other.keys.get(key, (0, 0) if other.complete else charged)
            total = self._total.get(key, (0, 0))
            self._total[key] = total[0] + charged[0] - before[0], total[1] + charged[1] - before[1]
            other.keys[key] = charged
        other.complete = other.complete or report.whole

    def _same_machine(self, usage: UsageCounts) -> bool:
        return bool(self._group) and usage.group == self._group

    def lost(self, gateway: str) -> None:
        """Forget a gateway whose lease has expired; what it has charged stays charged."""
        self._others.pop(gateway, None)
