"""Copies of cached prefixes in progress between instances, and their load on the links between datacenters.

This module makes no choice: copies for a request are decided with the request, copies ahead of demand by `Rebalancing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvroute.control.offload.offloader import Offloader
from kvroute.control.state.datacenters import Egress
from kvroute.control.view import ClusterView


@dataclass(frozen=True, slots=True)
class CopyInFlight:
    """One copy; instances are indices in the cluster."""

    source: int
    target: int
    nbytes: float
    chain_end: int | None
    """Last block of a prefix that is copied ahead of demand; None: a request waits for the copy."""


class Copies:
    """Copies that have started and not finished.

    A copy that a request waits for counts like a KV transfer: in the oracle, in foresight's table of transfers and in
    the backlog of the links. A copy ahead of demand has lower priority than all other transfers, so it is not counted.
    """

    def __init__(self, view: ClusterView, offloader: Offloader | None) -> None:
        self._view, self._offloader = view, offloader
        self._in_flight: dict[int, CopyInFlight] = {}
        self._last = 0

    def begin(self, at: float, source: int, target: int, nbytes: float, chain_end: int | None = None) -> int:
        """Start a copy and return its number. Args: `chain_end`: last block of a prefix copied ahead of demand."""
        self._last += 1
        self._in_flight[self._last] = CopyInFlight(source, target, nbytes, chain_end)
        if chain_end is None:
            self._view.oracle.transfer_started(source, target)
            for state in self._view.states.all:
                state.started(at, -self._last, source, target, nbytes)
            for link in self._links(source, target):
                link.started(-self._last, nbytes)
        return self._last

    def end(self, at: float, number: int, *, landed: bool) -> bool:
        """End a copy that is complete (`landed`) or has failed. Return False if no such copy is in progress."""
        copy = self._in_flight.pop(number, None)
        if copy is not None and copy.chain_end is None:
            self._view.oracle.transfer_finished(copy.source, copy.target)
            for state in self._view.states.all:
                state.finished(at, -number, landed=landed)
            for link in self._links(copy.source, copy.target):
                link.ended(at, -number, landed=landed)
        return copy is not None

    def in_progress(self, number: int) -> bool:
        """Whether a copy has started and not ended."""
        return number in self._in_flight

    def ahead(self) -> Iterator[CopyInFlight]:
        """Copies that no request waits for, in the order of their start."""
        return (copy for copy in self._in_flight.values() if copy.chain_end is not None)

    def _links(self, source: int, target: int) -> tuple[Egress, ...]:
        if self._offloader is None:
            return ()
        sites = self._offloader.site_of(source), self._offloader.site_of(target)
        return self._offloader.wan_links(*sites)
