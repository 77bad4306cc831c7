"""Limits of admission that hold over all gateways of a cluster, as far as their reports tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from kvroute.control import Admissions, ChargedUsage
from kvroute.serve.proxy.admission.admission import NoPeers, PeerCounts
from kvroute.serve.proxy.admission.rate_limits import KeyCharges


class CommonLimits:
    """A `PeerCounts`: requests at the other gateways, and at the other workers of this machine."""

    shared = True

    def __init__(self, admissions: Admissions, workers: PeerCounts | None, on_change: Callable[[], None]) -> None:
        """
        Args:
            admissions: own counts, and those that other gateways have reported.
            workers: counts of the other workers of this machine; None: this process is no worker.
            on_change: called when own counts may have changed.
        """
        self._admissions, self._on_change = admissions, on_change
        self._workers: PeerCounts = workers if workers is not None else NoPeers()

    @property
    def in_flight(self) -> int:
        """See PeerCounts."""
        return self._workers.in_flight + self._admissions.in_flight

    @property
    def queued(self) -> int:
        """See PeerCounts."""
        return self._workers.queued + self._admissions.queued

    def held_by(self, key: str) -> int:
        """See PeerCounts."""
        return self._workers.held_by(key) + self._admissions.held_by(key)

    def locked(self) -> AbstractContextManager[None]:
        """Keep the other workers of this machine from changing their counts; other gateways cannot be kept from it."""
        return self._workers.locked()

    def write(self, in_flight: int, queued: int) -> None:
        """See PeerCounts."""
        self._workers.write(in_flight, queued)
        self._admissions.write(in_flight, queued)
        self._on_change()

    def write_key(self, key: str, held: int) -> None:
        """See PeerCounts."""
        self._workers.write_key(key, held)
        self._admissions.write_key(key, held)
        self._on_change()


class CommonUsage:
    """An `OtherUsage`: what the other gateways and workers charge to keys, as far as their reports tell."""

    def __init__(self, usage: ChargedUsage, on_change: Callable[[], None]) -> None:
        """Args: `on_change`: called when own charges have changed."""
        self._usage, self._on_change = usage, on_change

    def used_by(self, key: str) -> KeyCharges:
        """See OtherUsage."""
        return KeyCharges(*self._usage.by_others(key))

    def known_keys(self) -> Iterable[str]:
        """See OtherUsage."""
        return self._usage.keys_of_others()

    def write_used(self, key: str, used: KeyCharges) -> None:
        """See OtherUsage."""
        self._usage.write(key, used.requests, used.tokens)
        self._on_change()
