"""What an agent reports to the scheduler of all-reduce schemes, and the table that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvroute_engine.agent.files import GroupEntry, GroupTraffic

AgentKind: TypeAlias = Literal["server", "switch"]


@dataclass(frozen=True, slots=True)
class AgentName:
    """A server, by its node in the cluster file, or the switch of a rack, pod or datacenter."""

    kind: AgentKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class CounterReport:
    """Counters of an agent since it has started."""

    clock_s: float
    """Monotonic clock of the agent when it read the counters."""
    ports: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By port: bytes that left the server or switch, and bytes that entered it."""
    nvlinks: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By GPU: bytes per second out and in."""
    traffic: tuple[GroupTraffic, ...] = ()
    slots: tuple[int, int] | None = None
    """All slots of the switch, and free ones; None: it is no switch, or does not answer."""
    incarnation: int = 0
    """Differs after every start of the agent; counts of ports begin with 0 then."""


@dataclass(frozen=True, slots=True)
class AgentTable:
    """The entries for one agent."""

    version: int
    """Highest version of its entries; 0 if it has none."""
    groups: dict[str, GroupEntry]
