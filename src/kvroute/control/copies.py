"""Cached prefixes on their way between instances: their numbers, and what they put on the links between datacenters.

It chooses nothing: what is copied for a request is decided with the request, what is copied ahead by `Rebalancing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvroute.control.datacenters import Egress
from kvroute.control.offloading import Offloading
from kvroute.control.view import View


@dataclass(frozen=True, slots=True)
class CopyUnderWay:
    """One copy, by indices in the cluster."""

    source: int
    target: int
    nbytes: float
    chain_end: int | None
    """Last block of a prefix that is copied ahead of demand; None: for a request that waits for it."""


class Copies:
    """Copies that have started and not finished.

    One that a request waits for counts like its KV transfer: with the oracle, in foresight's table and in the backlog
    of the links. One that is made ahead goes behind all others' bytes, so nobody has to reckon with it.
    """

    def __init__(self, view: View, offloading: Offloading | None) -> None:
        self._view, self._offloading = view, offloading
        self._under_way: dict[int, CopyUnderWay] = {}
        self._last = 0

    def begin(self, at: float, source: int, target: int, nbytes: float, chain_end: int | None = None) -> int:
        """The number of a copy that starts now; `chain_end`: last block of what is copied ahead of demand."""
        self._last += 1
        self._under_way[self._last] = CopyUnderWay(source, target, nbytes, chain_end)
        if chain_end is None:
            self._view.oracle.transfer_started(source, target)
            for flight in self._view.flights:
                flight.table.started(at, -self._last, source, target, nbytes)
            for link in self._links(source, target):
                link.started(-self._last, nbytes)
        return self._last

    def end(self, at: float, number: int, *, landed: bool) -> bool:
        """It has arrived, or will not; False where no copy of this number was under way."""
        copy = self._under_way.pop(number, None)
        if copy is not None and copy.chain_end is None:
            self._view.oracle.transfer_finished(copy.source, copy.target)
            for flight in self._view.flights:
                flight.table.finished(at, -number, landed=landed)
            for link in self._links(copy.source, copy.target):
                link.ended(at, -number, landed=landed)
        return copy is not None

    def ahead(self) -> Iterator[CopyUnderWay]:
        """Those that no request waits for, in the order of their start."""
        return (copy for copy in self._under_way.values() if copy.chain_end is not None)

    def _links(self, source: int, target: int) -> tuple[Egress, ...]:
        if self._offloading is None:
            return ()
        sites = self._offloading.site_of(source), self._offloading.site_of(target)
        return self._offloading.way(*sites)
