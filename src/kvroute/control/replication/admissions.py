"""What several gateways count against common limits of admission; without I/O and clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvroute.types import AdmissionCounts, PeerReport


@dataclass(slots=True)
class _Counted:
    """Last counts of another gateway."""

    sequence: int = 0
    in_flight: int = 0
    queued: int = 0
    keys: dict[str, int] = field(default_factory=dict)


class Admissions:
    """The own counts, for the next report, and those that the other gateways have reported.

    The counts of others are as old as their reports, so the gateways together may admit more than the limits: at most
    what arrives at the others in that time.
    """

    def __init__(self, group: str = "") -> None:
        """Args: `group`: the others of this group are left out; empty: this gateway is in no group."""
        self._group = group
        self._in_flight = self._queued = 0
        self._keys: dict[str, int] = {}
        self._changed_keys: dict[str, None] = {}
        self._changed = False
        self._others: dict[str, _Counted] = {}

    # Own counts

    @property
    def changed(self) -> bool:
        """Whether own counts have changed since the last report."""
        return self._changed

    def write(self, in_flight: int, queued: int) -> None:
        """Set the own counts."""
        if (in_flight, queued) != (self._in_flight, self._queued):
            self._in_flight, self._queued, self._changed = in_flight, queued, True

    def write_key(self, key: str, held: int) -> None:
        """Set the own count of a key, 0 if it has no request."""
        if held:
            self._keys[key] = held
        else:
            self._keys.pop(key, None)
        self._changed_keys[key] = None
        self._changed = True

    def take(self, *, whole: bool) -> AdmissionCounts | None:
        """Return the counts for the next report; None if nothing has changed, unless it is a whole report."""
        if not (whole or self._changed):
            return None
        keys = self._keys.copy() if whole else {key: self._keys.get(key, 0) for key in self._changed_keys}
        self._changed_keys.clear()
        self._changed = False
        return AdmissionCounts(self._group, self._in_flight, self._queued, keys)

    # Other gateways

    @property
    def in_flight(self) -> int:
        """Number of requests that the others have admitted and that are not over."""
        return sum([other.in_flight for other in self._others.values()])

    @property
    def queued(self) -> int:
        """Number of requests that wait at the others."""
        return sum([other.queued for other in self._others.values()])

    def held_by(self, key: str) -> int:
        """Return the number of requests of a key at the others, in flight and waiting."""
        return sum([other.keys.get(key, 0) for other in self._others.values()])

    def received(self, report: PeerReport) -> None:
        """Process the counts in another gateway's report; one that comes late or again changes nothing."""
        counts = report.admissions
        if counts is None or (self._group and counts.group == self._group):
            return
        other = self._others.get(report.gateway)
        if other is not None and report.sequence <= other.sequence:
            return
        if other is None or report.whole:
            other = self._others[report.gateway] = _Counted()
        other.sequence = report.sequence
        other.in_flight, other.queued = counts.in_flight, counts.queued
        for key, held in counts.keys.items():
            if held:
                other.keys[key] = held
            else:
                other.keys.pop(key, None)

    def lost(self, gateway: str) -> None:
        """Forget the counts of a gateway whose lease has expired."""
        self._others.pop(gateway, None)
