"""Panic threshold, as in Envoy: if health checks and breakers leave too few instances of a role available, both are
ignored, and requests go to all instances that are not administratively down.

A set is the instances of one model that serve one role now, in all datacenters. An instance of role `both` is in both
sets of its model. Instances that are held (drained, switching roles, behind a closed path between datacenters) and
instances without a listening process are in no set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from kvroute.serve.engines.client import EngineClient

Serves: TypeAlias = Literal["prefill", "decode"]

CALM_S = 5.0
"""A panic ends when enough instances have been available for this time, so that a set near the threshold does not
flap."""
_ROLES: tuple[Serves, ...] = ("prefill", "decode")


@dataclass(slots=True)
class PanicState:
    """The panic state of one set; pure."""

    share: float
    """Share of the instances that must be available, 0 to 1; 0 disables panic."""
    active: bool = False
    available: int = 0
    instances: int = 0
    _enough_since: float | None = None
    """While active: time since which enough instances have been available."""

    def update(self, available: int, instances: int, now: float) -> bool:
        """Update the number of available instances of the set; return whether `active` has changed."""
        self.available, self.instances = available, instances
        if available < self.share * instances:
            self._enough_since = None
            changed, self.active = not self.active, True
            return changed
        if not self.active:
            return False
        if self._enough_since is None:
            self._enough_since = now
        if now - self._enough_since < CALM_S:
            return False
        self.active, self._enough_since = False, None
        return True


@dataclass(slots=True)
class PanicSet:
    """The instances of one model that may serve one role."""

    model: str
    role: Serves
    state: PanicState
    clients: list[EngineClient] = field(default_factory=list)

    def members(self) -> list[EngineClient]:
        """Return the instances that serve the role now."""
        return [engine for engine in self.clients if engine.role in (self.role, "both")]


class Panics:
    """All sets of one cluster. Availabilities report changes to it; it makes them ignore or use checks and breakers."""

    def __init__(
        self, clients: Mapping[str, EngineClient], share: float, on_change: Callable[[PanicSet], None]
    ) -> None:
        """Args: `share` as in PanicState; `on_change` is called when a panic begins or ends."""
        self._on_change = on_change
        self._sets: dict[tuple[str, Serves], PanicSet] = {}
        self._share = share
        for engine in clients.values():
            self.add(engine)
        for panic_set in self._sets.values():
            panic_set.state.instances = panic_set.state.available = len(panic_set.members())

    def add(self, engine: EngineClient) -> None:
        """Include an instance."""
        model = engine.instance.model
        for role in _ROLES:
            self._sets.setdefault((model, role), PanicSet(model, role, PanicState(self._share))).clients.append(engine)
        engine.availability.on_available = lambda now: self._refresh(model, now)

    def remove(self, engine: EngineClient, now: float) -> None:
        """Leave out an instance from now on."""
        model = engine.instance.model
        engine.availability.on_available = None
        for role in _ROLES:
            self._sets[model, role].clients.remove(engine)
        self._refresh(model, now)

    @property
    def sets(self) -> tuple[PanicSet, ...]:
        """Sets that have instances now."""
        return tuple(panic_set for panic_set in self._sets.values() if panic_set.members())

    def refresh(self, now: float) -> None:
        """Update the sets whose state changes with time alone."""
        for model in {panic_set.model for panic_set in self._sets.values() if panic_set.state.active}:
            self._refresh(model, now)

    def close(self) -> None:
        """Stop the reports of availabilities."""
        for panic_set in self._sets.values():
            for engine in panic_set.clients:
                engine.availability.on_available = None
        self._sets.clear()

    def inherit(self, before: Panics) -> None:
        """Carry over panics on reload, without counting them as new."""
        for key, own in self._sets.items():
            if key in before._sets:
                own.state.active = before._sets[key].state.active
                for engine in own.members() if own.state.active else ():
                    engine.availability.ignored = True

    def _refresh(self, model: str, now: float) -> None:
        sets = [self._sets[model, role] for role in _ROLES]
        changed = []
        for panic_set in sets:
            counted = [engine.availability for engine in panic_set.members() if engine.availability.counted]
            if panic_set.state.update(sum(availability.available for availability in counted), len(counted), now):
                changed.append(panic_set)
        for panic_set in changed:
            self._on_change(panic_set)
        if changed or any(panic_set.state.active for panic_set in sets):
            panicking = {engine.name for panic_set in sets if panic_set.state.active for engine in panic_set.members()}
            for engine in sets[0].clients:
                engine.availability.ignore_checks(engine.name in panicking, now)
