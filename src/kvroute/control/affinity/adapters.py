"""Which LoRA adapters each instance has loaded, as far as the router knows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.offers import BOTH_LEGS, Feature, Offer, Placed
from kvroute.types import FloatArray, Request

KNOWN_MAX = 1024
"""Largest number of adapters that are stored for an instance that does not report how many it has room for."""


class LoadedAdapters(Feature[FloatArray]):
    """Adapters by instance, the last used one at the end: those that requests have used there, and those that the
    engine reports as in use. An engine that needs room drops the one that was used longest ago (vLLM: `--max-loras`).
    """

    legs = BOTH_LEGS
    __slots__ = ("_load_s", "_loaded", "_slots")

    def __init__(self, load_s: Mapping[str, float]) -> None:
        """Args: `load_s`: seconds that an instance needs to load each adapter, by name."""
        self._load_s = load_s
        self._loaded: dict[str, dict[str, None]] = {}
        self._slots: dict[str, int] = {}

    def load_s(self, adapter: str, names: Sequence[str]) -> FloatArray | None:
        """Seconds to load an adapter on each of these instances, 0 where it is loaded; None if it takes no time."""
        seconds = self._load_s.get(adapter, 0.0)
        if not seconds:
            return None
        return np.array([0.0 if adapter in self._loaded.get(name, ()) else seconds for name in names])

    def offer(self, offer: Offer) -> FloatArray | None:
        """Add the time to load the request's adapter to each prefill, and return it; None: nothing is to be loaded."""
        adapter = offer.booking.request.adapter
        load_s = self.load_s(adapter, offer.candidates.names) if adapter else None
        if load_s is not None:
            prefill_s = offer.candidates.prefill_s + load_s
            offer.candidates = msgspec.structs.replace(offer.candidates, prefill_s=prefill_s)
        return load_s

    def decode_term(self, request: Request, names: Sequence[str]) -> tuple[str, FloatArray] | None:
        """Return the time to load the request's adapter, as `adapter_s`."""
        load_s = self.load_s(request.adapter, names) if request.adapter else None
        return None if load_s is None else ("adapter_s", load_s)

    def attach(self, booking: Booking, placed: Placed, load_s: FloatArray | None) -> None:
        """See Feature."""
        if booking.request.adapter:
            self.used(placed.instance, booking.request.adapter)
        if load_s is not None:
            placed.add_term("adapter_s", load_s)

    def take_over(self, old: LoadedAdapters, instances: Collection[str]) -> None:
        """Continue with what is known of these instances. Args: `old`: of the cluster before, not used any more."""
        self._loaded = {name: loaded for name, loaded in old._loaded.items() if name in instances}
        self._slots = {name: slots for name, slots in old._slots.items() if name in instances}

    def used(self, instance: str, adapter: str) -> None:
        """Record that a request for an adapter was sent to an instance, which loads it."""
        self._use(instance, (adapter,))

    def measured(self, instance: str, adapters: Iterable[str], slots: int) -> None:
        """Record the adapters that an instance uses now, and for how many it has room (0: not known)."""
        if slots:
            self._slots[instance] = slots
        self._use(instance, adapters)

    def _use(self, instance: str, adapters: Iterable[str]) -> None:
        loaded = self._loaded.setdefault(instance, {})
        for adapter in adapters:
            loaded.pop(adapter, None)
            loaded[adapter] = None
        for adapter in list(loaded)[: -self._slots.get(instance, KNOWN_MAX)]:
            del loaded[adapter]

    def forget(self, instance: str) -> None:
        """Record that an instance has restarted."""
        self._loaded.pop(instance, None)

    def known(self) -> dict[str, tuple[tuple[str, ...], int]]:
        """The adapters of each instance, the last used one at the end, and for how many it has room (0: not known)."""
        return {name: (tuple(loaded), self._slots.get(name, 0)) for name, loaded in self._loaded.items()}
