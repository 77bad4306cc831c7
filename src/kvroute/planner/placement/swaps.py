"""Local search over groups: swaps of GPUs between two groups, or between a group and free GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.place import Shards

Price: TypeAlias = Callable[[Shards], float]
"""Value per second of a group."""
_SEED = 15
_PER_GPU, _MAX = 100, 3000
"""Swaps that are tried: for each GPU of the groups that can become better, and in all."""


class Swaps:
    """Groups and free GPUs, whose sum of prices `run` increases. The draws are the same in every run."""

    def __init__(
        self,
        groups: Sequence[Shards],
        free: Sequence[Gpu],
        price: Price,
        domain: Callable[[int], int],
        best: float = math.inf,
    ) -> None:
        """Args:

        groups: groups of the same size.
        free: GPUs in no group.
        price: value of a group.
        domain: rack, pod or datacenter of a node; swaps stay inside one.
        best: highest price that a group can have; groups of this price only take part as partners.
        """
        self.groups, self.free = list(groups), list(free)
        self._price, self._domain = price, domain
        self._prices = [price(group) for group in groups]
        self._tried = [
            number
            for number, value in enumerate(self._prices)
            if value < best * (1.0 - 1e-9) and len({node for node, _ in self.groups[number]}) > 1
        ]
        self._beside: dict[int, set[int]] = {}
        for number, group in enumerate(self.groups):
            self._enter(number, group)
        self._draw = np.random.default_rng(_SEED)

    def run(self, tolerance: float = 0.0) -> None:
        """Try swaps of one or two GPUs, and keep the best groups found.

        Args:
            tolerance: share of the prices of both groups that a swap may cost at first; it decreases linearly to 0
                (threshold accepting).
        """
        if not self._tried or len(self.groups) + len(self.free) < 2:
            return
        total = kept_total = sum(self._prices)
        kept = list(self.groups), list(self.free)
        steps = min(_MAX, _PER_GPU * len(self._tried) * len(self.groups[0]))
        for step in range(steps):
            total += self._step(tolerance * max(0.0, 1.0 - 1.5 * step / steps))
            if tolerance and total > kept_total * (1.0 + 1e-12):
                kept_total, kept = total, (list(self.groups), list(self.free))
        if tolerance:
            self.groups, self.free = kept
        self.groups = [tuple(sorted(group)) for group in self.groups]

    def _step(self, tolerance: float) -> float:
        """Try one swap; return the change of the sum of prices."""
        one = self._tried[self._draw.integers(len(self._tried))]
        domains = {self._domain(node) for node, _ in self.groups[one]}
        near = sorted(set[int]().union(*(self._beside[domain] for domain in domains)) - {one})
        spare = [place for place, (node, _) in enumerate(self.free) if self._domain(node) in domains]
        count = int(self._draw.integers(1, 3)) if len(self.groups[one]) > 2 else 1
        if len(spare) >= count and (not near or self._draw.random() < 0.5):
            return self._with_free(one, spare, count, tolerance)
        return self._with_group(one, near[self._draw.integers(len(near))], count, tolerance) if near else 0.0

    def _with_free(self, one: int, spare: Sequence[int], count: int, tolerance: float) -> float:
        places = self._draw.choice(spare, count, replace=False).tolist()
        group, rest = self._swapped(self.groups[one], tuple(self.free[place] for place in places), count)
        before, after = self._prices[one], self._price(group)
        if after < before * (1.0 - tolerance) or _servers(group) == _servers(self.groups[one]):
            return 0.0
        self._replace(one, group, after)
        for place, gpu in zip(places, rest, strict=True):
            self.free[place] = gpu
        return after - before

    def _with_group(self, one: int, other: int, count: int, tolerance: float) -> float:
        first, second = self._swapped(self.groups[one], self.groups[other], count)
        before, after = self._prices[one] + self._prices[other], (self._price(first), self._price(second))
        if sum(after) < before * (1.0 - tolerance) or _servers(first) == _servers(self.groups[one]):
            return 0.0
        self._replace(one, first, after[0])
        self._replace(other, second, after[1])
        return sum(after) - before

    def _replace(self, number: int, group: Shards, price: float) -> None:
        for node, _ in self.groups[number]:
            self._beside[self._domain(node)].discard(number)
        self.groups[number], self._prices[number] = group, price
        self._enter(number, group)

    def _enter(self, number: int, group: Shards) -> None:
        for node, _ in group:
            self._beside.setdefault(self._domain(node), set()).add(number)

    def _swapped(self, one: Shards, other: Shards, count: int) -> tuple[Shards, Shards]:
        here = self._draw.choice(len(one), count, replace=False).tolist()
        there = self._draw.choice(len(other), count, replace=False).tolist()
        first, second = list(one), list(other)
        for a, b in zip(here, there, strict=True):
            first[a], second[b] = second[b], first[a]
        return tuple(first), tuple(second)


def _servers(group: Shards) -> list[int]:
    return sorted(node for node, _ in group)
