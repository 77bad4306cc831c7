"""A scheduler of simulated all-reduces that decides once per period, as `kvroute scheduler` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvroute.collectives.policy import LinkLoads, Option
from kvroute.collectives.scheduler.derivation import (
    WINDOW_PERIODS,
    AllReduceDemand,
    Cell,
    Period,
    SchemeOption,
    derive,
    size_class,
)
from kvroute.types import FloatArray
from kvroute_engine.agent.files import size_exponent


class PeriodicTable:
    """A table of options by group and size class, derived from the load of the last periods.

    It learns of tensors when they are reduced, and of other traffic from the counters, as agents report them.
    """

    def __init__(self, options: Sequence[Sequence[Option]], capacity_bytes_per_s: FloatArray, period_s: float) -> None:
        """Args: `options` of each group; capacities by link; time between two tables."""
        self._choices = [[SchemeOption(option) for option in choices] for choices in options]
        self._period_s = period_s
        self._loads = LinkLoads(capacity_bytes_per_s)
        self._counted: FloatArray = np.zeros(len(capacity_bytes_per_s))
        self._reduced: dict[Cell, AllReduceDemand] = {}
        self._periods: deque[tuple[dict[Cell, AllReduceDemand], FloatArray]] = deque(maxlen=WINDOW_PERIODS)
        """Demand and background of the last periods."""
        self._running: dict[int, tuple[Cell, Option, float]] = {}
        self._tickets = 0
        self._chosen: dict[Cell, int] = {}
        self._derive()

    def start(self, at: float, group: int, nbytes: float) -> tuple[int, int]:
        """Return a ticket and the option of the table."""
        cell = group, size_class(size_exponent(round(nbytes)))
        number = self._chosen[cell]
        option = self._choices[group][number].option
        self._loads.add(option, nbytes)
        self._tickets += 1
        self._running[self._tickets] = cell, option, nbytes
        return self._tickets, number

    def finish(self, ticket: int) -> None:
        """Count a tensor that is reduced."""
        cell, option, nbytes = self._running.pop(ticket)
        self._loads.remove(option, nbytes)
        before = self._reduced.get(cell, AllReduceDemand(0.0, 0.0))
        self._reduced[cell] = AllReduceDemand(before.calls + 1, before.nbytes + nbytes)

    def measured(self, at: float, counted_bytes: FloatArray) -> None:
        """Take the counters of all links; derive a table at the end of a period."""
        self._counted += counted_bytes
        if at - self._loads.measured_s < self._period_s * (1 - 1e-9):
            return
        self._loads.measured(at, self._counted)
        self._periods.append((self._reduced, self._loads.background))
        self._reduced, self._counted = {}, np.zeros_like(self._counted)
        self._derive()

    def _derive(self) -> None:
        count = max(len(self._periods), 1)
        demand: dict[Cell, AllReduceDemand] = {}
        background = np.zeros(len(self._counted))
        for reduced, other in self._periods:
            background += other / count
            for cell, added in reduced.items():
                before = demand.get(cell, AllReduceDemand(0.0, 0.0))
                demand[cell] = AllReduceDemand(before.calls + added.calls / count, before.nbytes + added.nbytes / count)
        period = Period(demand, self._loads.capacity_bytes_per_s, background, self._period_s, {})
        self._chosen = derive(self._choices, period, self._chosen)
