"""Which LoRA adapters each instance has loaded, as far as the router knows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from kvroute.types import FloatArray

KNOWN_MAX = 1024
"""Largest number of adapters that are stored for an instance that does not report how many it has room for."""


class LoadedAdapters:
    """Adapters by instance, the last used one at the end: those that requests have used there, and those that the
    engine reports as in use. An engine that needs room drops the one that was used longest ago (vLLM: `--max-loras`).
    """

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

    def keep(self, instances: Collection[str]) -> None:
        """Forget all other instances."""
        for known in (self._loaded, self._slots):
            for name in [name for name in known if name not in instances]:
                del known[name]

    def known(self) -> dict[str, tuple[tuple[str, ...], int]]:
        """The adapters of each instance, the last used one at the end, and for how many it has room (0: not known)."""
        return {name: (tuple(loaded), self._slots.get(name, 0)) for name, loaded in self._loaded.items()}
