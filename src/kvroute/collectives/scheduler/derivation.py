"""Choice of a scheme for every group and size of tensor from the load of a period, as a pure function.

Demand is placed largest first, on the option that ends first by `LinkLoads.seconds`, the cost of the policy
`outstanding`. Latency counts once for each all-reduce, so small tensors can get another scheme than large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvroute.collectives.policy import LinkLoads, Option
from kvroute.types import FloatArray

EXPONENTS = range(12, 31)
"""Size classes: class e has tensors of more than 2^(e - 1) and up to 2^e bytes. The first one has all smaller tensors,
too, and the last one all larger ones."""
WINDOW_PERIODS = 3
"""Loads are means over this number of periods."""
HYSTERESIS = 0.1
"""Share of the time that another option must save before a choice changes."""
Cell: TypeAlias = tuple[int, int]
"""Number of a group, and size class."""


@dataclass(frozen=True, slots=True)
class SchemeOption:
    """An option of a group with what does not depend on the load."""

    option: Option
    latency_s: float = 0.0
    """Latency of one all-reduce, without the time of the bytes."""
    extra_s_per_byte: float = 0.0
    """Time per byte beyond that of the busiest link, such as the limit of a switch's slots."""
    slots: tuple[tuple[str, int], ...] = ()
    """Slots that it needs in each switch on its way."""

    def seconds(self, loads: LinkLoads, demand: AllReduceDemand) -> float:
        """Return the time until all-reduces end that start now, beside the loads."""
        fixed_s = demand.calls * self.latency_s + demand.nbytes * self.extra_s_per_byte
        return fixed_s + loads.seconds(self.option, demand.nbytes)


@dataclass(frozen=True, slots=True)
class AllReduceDemand:
    """All-reduces of one group and size class in a period."""

    calls: float
    nbytes: float
    """Bytes of their tensors on one rank."""


@dataclass(frozen=True, slots=True)
class Period:
    """What is known at the end of a period."""

    demand: Mapping[Cell, AllReduceDemand]
    """Cells without demand are left out."""
    capacity_bytes_per_s: FloatArray
    """[link]: each greater than 0."""
    background: FloatArray
    """[link]: utilisation by other traffic, from 0 to 1."""
    seconds: float
    slots: Mapping[str, int]
    """Slots that groups may use, by switch that answers."""


def size_class(exponent: int) -> int:
    """Return the size class of tensors with this `files.size_exponent`."""
    return min(max(exponent, EXPONENTS.start), EXPONENTS.stop - 1)


def derive(
    groups: Sequence[Sequence[SchemeOption]],
    period: Period,
    previous: Mapping[Cell, int],
    hysteresis: float = HYSTERESIS,
) -> dict[Cell, int]:
    """Return the number of the option for each group and size class.

    Cells without demand get the option that is fastest for one tensor beside the mean load of all demand, large sizes
    first.

    Args:
        groups: options of each group; at least one needs no slots.
        period: loads of the last period.
        previous: the last result; empty: none.
        hysteresis: see HYSTERESIS.
    """
    loads = LinkLoads(period.capacity_bytes_per_s)
    loads.background = period.background
    demand = period.demand
    busiest = sorted(
        (cell for cell in demand if demand[cell].nbytes > 0), key=lambda cell: (-demand[cell].nbytes, cell)
    )
    slots = _Slots.of(groups, period.slots, busiest, previous)
    chosen: dict[Cell, int] = {}
    for cell in busiest:
        chosen[cell] = _best(groups, cell, demand[cell], loads, slots, previous.get(cell), hysteresis)
        loads.add(groups[cell[0]][chosen[cell]].option, demand[cell].nbytes)
    mean = LinkLoads(period.capacity_bytes_per_s)
    used = loads.outstanding_bytes / (period.capacity_bytes_per_s * period.seconds)
    mean.background = np.minimum(period.background + used, 1.0)
    for cell in ((group, exponent) for exponent in reversed(EXPONENTS) for group in range(len(groups))):
        if cell not in chosen:
            unit = AllReduceDemand(1.0, float(1 << cell[1]))
            chosen[cell] = _best(groups, cell, unit, mean, slots, previous.get(cell), hysteresis)
    return chosen


def _best(
    groups: Sequence[Sequence[SchemeOption]],
    cell: Cell,
    demand: AllReduceDemand,
    loads: LinkLoads,
    slots: _Slots,
    previous: int | None,
    hysteresis: float,
) -> int:
    """Return the option that ends first among those whose slots fit, and take its slots; keep the previous one unless
    another one saves enough."""
    group, choices = cell[0], groups[cell[0]]
    costs = {
        number: choice.seconds(loads, demand)
        for number, choice in enumerate(choices)
        if slots.fit(group, number, choice)
    }
    best = min(costs, key=lambda number: (costs[number], number))
    if previous is not None and previous in costs and costs[best] >= (1.0 - hysteresis) * costs[previous]:
        best = previous
    slots.take(group, best, choices[best])
    return best


@dataclass(slots=True)
class _Slots:
    """Slots of each switch that no group has, and the options whose slots are taken."""

    free: dict[str, int]
    taken: set[tuple[int, int]]
    """Group and option."""

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[SchemeOption]],
        slots: Mapping[str, int],
        busiest: Iterable[Cell],
        previous: Mapping[Cell, int],
    ) -> _Slots:
        """Return the slots beside those that groups with demand use already, so that groups do not take them from each
        other in turn."""
        found = cls(dict(slots), set())
        for cell in busiest:
            number = previous.get(cell)
            if number is not None and found.fit(cell[0], number, groups[cell[0]][number]):
                found.take(cell[0], number, groups[cell[0]][number])
        return found

    def fit(self, group: int, number: int, choice: SchemeOption) -> bool:
        """Return whether a group has the slots of an option, or can get them."""
        return (group, number) in self.taken or all(self.free.get(name, 0) >= count for name, count in choice.slots)

    def take(self, group: int, number: int, choice: SchemeOption) -> None:
        """Take the slots of an option once for all sizes."""
        if choice.slots and (group, number) not in self.taken:
            self.taken.add((group, number))
            for name, count in choice.slots:
                self.free[name] -= count
