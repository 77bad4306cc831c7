"""Choice of the all-reduce scheme and path of a tensor-parallel group by load (HeroServe III-D), as pure state.

A group has options: schemes or paths with the bytes that each puts on every link. One scheduler decides for all groups,
so that no two decisions rest on the same old state. The slots of a switch are one more link, with a capacity in bytes
per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np

from kvroute.collectives import Collective, link_bytes
from kvroute.types import FloatArray, InputError, IntArray

CollectivePolicyName: TypeAlias = Literal[
    "outstanding", "corrected-table", "utilisation-table", "power-of-two", "ecmp", "static"
]
_BUSY_MAX = 0.95
"""Highest utilisation by other traffic that counts, so that a full link still has a finite cost."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way in which a group can reduce a tensor."""

    name: str
    links: IntArray
    """[n]: ids of the links that it uses, ascending."""
    share: FloatArray
    """[n]: bytes on each link for one byte of the tensor."""

    @classmethod
    def of(cls, collective: Collective, nbytes: float) -> Option:
        """Return the option of an all-reduce whose flows were made for a tensor of `nbytes`."""
        found = link_bytes(collective)
        links = np.fromiter(found, np.int64, len(found))
        return cls(collective.scheme, links, np.fromiter(found.values(), np.float64, len(found)) / nbytes)


class LinkLoads:
    """What the scheduler knows of the links: own bytes that are outstanding, and other traffic."""

    def __init__(self, capacity_bytes_per_s: FloatArray) -> None:
        """Start without load; `capacity_bytes_per_s`: [link], each greater than 0."""
        self.capacity_bytes_per_s = capacity_bytes_per_s
        self.outstanding_bytes: FloatArray = np.zeros(len(capacity_bytes_per_s))
        self.background: FloatArray = np.zeros(len(capacity_bytes_per_s))
        """[link]: utilisation by other traffic, from 0 to 1."""
        self._completed_bytes: FloatArray = np.zeros(len(capacity_bytes_per_s))
        self.measured_s = 0.0
        """Time of the last counters."""

    def add(self, option: Option, nbytes: float) -> None:
        """Record a tensor that starts."""
        self.outstanding_bytes[option.links] += option.share * nbytes

    def remove(self, option: Option, nbytes: float) -> None:
        """Record that a tensor is reduced; rounding leaves no negative bytes."""
        moved = option.share * nbytes
        left = self.outstanding_bytes[option.links] - moved
        self.outstanding_bytes[option.links] = np.where(left < 1e-9 * moved, 0.0, left)
        self._completed_bytes[option.links] += moved

    def measured(self, at: float, counted_bytes: FloatArray) -> None:
        """Derive the background from link counters: the bytes since the last call, [link], without those of tensors
        that were reduced in this time."""
        seconds = at - self.measured_s
        if seconds <= 0.0:
            return
        other = np.maximum(counted_bytes - self._completed_bytes, 0.0)
        self.background = np.minimum(other / (self.capacity_bytes_per_s * seconds), 1.0)
        self._completed_bytes[:] = 0.0
        self.measured_s = at

    def seconds(self, option: Option, nbytes: float) -> float:
        """Return the time in which the busiest link of an option sends its outstanding bytes and those of a new
        tensor beside the background."""
        links = option.links
        free = self.capacity_bytes_per_s[links] * (1.0 - np.minimum(self.background[links], _BUSY_MAX))
        return float(((self.outstanding_bytes[links] + option.share * nbytes) / free).max())


class CollectivePolicy(Protocol):
    """Chooses among the options of a group."""

    def choose(self, at: float, group: int, nbytes: float, loads: LinkLoads) -> int:
        """Return the number of the option for a tensor of `nbytes` that starts at `at`."""

    def measured(self, loads: LinkLoads, utilisation: FloatArray) -> None:
        """Take new link counters: utilisation by all traffic, [link]."""


@dataclass(slots=True)
class Outstanding:
    """The option whose busiest link is free first: outstanding bytes over the capacity that other traffic leaves. It
    needs no time constant."""

    options: Sequence[Sequence[Option]]

    def choose(self, at: float, group: int, nbytes: float, loads: LinkLoads) -> int:
        """Return the option that ends first; the first of several."""
        return _least([loads.seconds(option, nbytes) for option in self.options[group]])

    def measured(self, loads: LinkLoads, utilisation: FloatArray) -> None:
        """The background is part of the loads."""


@dataclass(slots=True)
class Static:
    """Always the same option: that with the group's number, modulo the number of options."""

    options: Sequence[Sequence[Option]]

    def choose(self, at: float, group: int, nbytes: float, loads: LinkLoads) -> int:
        """Return the group's option."""
        return group % len(self.options[group])

    def measured(self, loads: LinkLoads, utilisation: FloatArray) -> None:
        """Counters have no effect."""


@dataclass(slots=True)
class Ecmp:
    """A random option for every tensor, as flow hashing chooses one of equal paths."""

    options: Sequence[Sequence[Option]]
    draw: np.random.Generator

    def choose(self, at: float, group: int, nbytes: float, loads: LinkLoads) -> int:
        """Return a random option."""
        return int(self.draw.integers(len(self.options[group])))

    def measured(self, loads: LinkLoads, utilisation: FloatArray) -> None:
        """Counters have no effect."""


@dataclass(slots=True)
class PowerOfTwo:
    """The better one of two random options, by outstanding bytes without background."""

    options: Sequence[Sequence[Option]]
    draw: np.random.Generator

    def choose(self, at: float, group: int, nbytes: float, loads: LinkLoads) -> int:
        """Return the option of the two whose busiest link has less to send."""
        choices = self.options[group]
        drawn = self.draw.choice(len(choices), min(2, len(choices)), replace=False).tolist()
        costs = []
        for number in drawn:
            links = choices[number].links
            bytes_ = loads.outstanding_bytes[links] + choices[number].share * nbytes
            costs.append(float((bytes_ / loads.capacity_bytes_per_s[links]).max()))
        return int(drawn[_least(costs)])

    def measured(self, loads: LinkLoads, utilisation: FloatArray) -> None:
        """Counters have no effect."""


@dataclass(slots=True)
class CorrectedTable:
    """Virtual utilisation of every link, which decays: u <- u exp(-dt / T) + D / (T C), and the option with the lowest
    maximum of (u + D / (T C)) / (1 - background)."""

    options: Sequence[Sequence[Option]]
    links: int
    window_s: float = 5e-4
    _virtual: FloatArray = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._virtual = np.zeros(self.links)

    def choose(self, at: float, group: int, nbytes: float, loads: LinkLoads) -> int:
        """Return the option with the lowest virtual utilisation, and add the tensor to it."""
        self._virtual *= math.exp(-(at - self._at) / self.window_s)
        self._at = at
        costs, added = [], []
        for option in self.options[group]:
            more = option.share * nbytes / (self.window_s * loads.capacity_bytes_per_s[option.links])
            free = 1.0 - np.minimum(loads.background[option.links], _BUSY_MAX)
            costs.append(float(((self._virtual[option.links] + more) / free).max()))
            added.append(more)
        best = _least(costs)
        self._virtual[self.options[group][best].links] += added[best]
        return best

    def measured(self, loads: LinkLoads, utilisation: FloatArray) -> None:
        """The background is part of the loads."""


@dataclass(slots=True)
class UtilisationTable:
    """The table as published (eq. 16 to 18), errors included: the cost J = b + D / (T b) of an option prefers the
    busier one while b is below sqrt(D / T), nothing decays, and the weights W count links with little traffic most.

    D is in units of the capacity of the option's fastest link, because the published quotient has no unit otherwise.
    """

    options: Sequence[Sequence[Option]]
    window_s: float = 1e-3
    smoothing: float = 0.2
    """gamma of eq. 18."""
    first: float = 0.1
    """b of an unused option, which eq. 16 divides by."""
    _cost: list[FloatArray] = field(init=False)
    _penalty: dict[tuple[int, int], list[FloatArray]] = field(init=False)
    _shared: dict[tuple[int, int], list[list[IntArray]]] = field(init=False)
    """Links that two options share."""

    def __post_init__(self) -> None:
        self._cost = [np.full(len(choices), self.first) for choices in self.options]
        self._penalty, self._shared = {}, {}
        for group, choices in enumerate(self.options):
            for number, chosen in enumerate(choices):
                self._penalty[group, number] = [np.zeros(len(others)) for others in self.options]
                self._shared[group, number] = [
                    [np.intersect1d(chosen.links, option.links, assume_unique=True) for option in others]
                    for others in self.options
                ]

    def choose(self, at: float, group: int, nbytes: float, loads: LinkLoads) -> int:
        """Return the option with the lowest J (eq. 16), and update the cost of all options (eq. 17)."""
        increments = [
            nbytes / (self.window_s * float(loads.capacity_bytes_per_s[option.links].max()))
            for option in self.options[group]
        ]
        costs = [
            float(cost) + increment / float(cost) for cost, increment in zip(self._cost[group], increments, strict=True)
        ]
        best = _least(costs)
        for other, penalty in enumerate(self._penalty[group, best]):
            share = penalty.copy()
            if other == group:
                share[best] = 1.0
            self._cost[other] += increments[best] / self._cost[other] * share
        return best

    def measured(self, loads: LinkLoads, utilisation: FloatArray) -> None:
        """Update the penalties (eq. 18) with the available bandwidth of shared links."""
        available = np.maximum(loads.capacity_bytes_per_s * (1.0 - utilisation), 1.0)
        whole = [[float(available[option.links].sum()) for option in choices] for choices in self.options]
        for key, penalties in self._penalty.items():
            for other, shared in enumerate(self._shared[key]):
                weights = [float(available[links].sum()) for links in shared]
                penalties[other] *= 1.0 - self.smoothing
                penalties[other] += self.smoothing * np.array(weights) / np.array(whole[other])


def _least(costs: Sequence[float]) -> int:
    return min(range(len(costs)), key=costs.__getitem__)


_Options: TypeAlias = Sequence[Sequence[Option]]
_MAKE: dict[CollectivePolicyName, Callable[[_Options, int, int], CollectivePolicy]] = {
    "outstanding": lambda options, links, seed: Outstanding(options),
    "corrected-table": lambda options, links, seed: CorrectedTable(options, links),
    "utilisation-table": lambda options, links, seed: UtilisationTable(options),
    "power-of-two": lambda options, links, seed: PowerOfTwo(options, np.random.default_rng(seed)),
    "ecmp": lambda options, links, seed: Ecmp(options, np.random.default_rng(seed)),
    "static": lambda options, links, seed: Static(options),
}
COLLECTIVE_POLICIES: tuple[CollectivePolicyName, ...] = tuple(_MAKE)
DEFAULT_COLLECTIVE_POLICY: CollectivePolicyName = "outstanding"


class CollectiveScheduler:
    """Decides for all groups of a cluster, and keeps the loads of its links."""

    def __init__(
        self,
        options: Sequence[Sequence[Option]],
        capacity_bytes_per_s: FloatArray,
        policy: str = DEFAULT_COLLECTIVE_POLICY,
        seed: int = 0,
    ) -> None:
        """Args:

        options: options of each group, at least one.
        capacity_bytes_per_s: by link id; slots of a switch count as a link.
        policy: one of COLLECTIVE_POLICIES.
        seed: of `ecmp` and `power-of-two`.

        Raises:
            InputError: an unknown policy, or a group without options.
        """
        if policy not in _MAKE:
            hint = f"use one of: {', '.join(COLLECTIVE_POLICIES)}"
            raise InputError(f"{policy!r} is not a policy for all-reduces", hint=hint)
        for group, choices in enumerate(options):
            if not choices:
                raise InputError(f"group {group} has no option", hint="give it a ring scheme")
        self.options = options
        self.loads = LinkLoads(capacity_bytes_per_s)
        self._policy = _MAKE[policy](options, len(capacity_bytes_per_s), seed)
        self._running: dict[int, tuple[Option, float]] = {}
        self._tickets = 0

    def start(self, at: float, group: int, nbytes: float) -> tuple[int, int]:
        """Decide for a tensor of `nbytes` that a group reduces now; return a ticket and the number of the option."""
        number = self._policy.choose(at, group, nbytes, self.loads)
        option = self.options[group][number]
        self.loads.add(option, nbytes)
        self._tickets += 1
        self._running[self._tickets] = option, nbytes
        return self._tickets, number

    def finish(self, ticket: int) -> None:
        """Record that the tensor of a ticket is reduced; unknown tickets are ignored."""
        running = self._running.pop(ticket, None)
        if running is not None:
            self.loads.remove(*running)

    def measured(self, at: float, counted_bytes: FloatArray) -> None:
        """Take the counters of all links: bytes of all traffic since the last call, [link]."""
        seconds = max(at - self.loads.measured_s, 1e-12)
        utilisation = np.minimum(counted_bytes / (self.loads.capacity_bytes_per_s * seconds), 1.0)
        self.loads.measured(at, counted_bytes)
        self._policy.measured(self.loads, utilisation)
