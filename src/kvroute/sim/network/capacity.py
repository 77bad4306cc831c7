"""Capacity of each link for kvroute's own transfers over time: nominal less other traffic, cuts and fluctuation.

It moves no bytes: `next_s` is the time of the next change, and `step` applies it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from kvroute.sim.settings import Background, CapacityChange, Fluctuation
from kvroute.topology import Cluster
from kvroute.types import CROSS_DATACENTER, TIER_COUNT, FloatArray, InputError, IntArray

_BURST = -1
"""Entry of the schedule: a burst starts or ends. Fluctuations and changes are numbered from 0."""


class LinkCapacities:
    """Current capacity of every link. A burst takes its share of the capacity that remains after cuts."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        seed: int,
        *,
        changes: Sequence[CapacityChange] = (),
        fluctuations: Sequence[Fluctuation] = (),
    ) -> None:
        """Start with nominal capacity less the steady background. Random times and shares are drawn from `seed`.

        Raises:
            InputError: a change or fluctuation names a link that the cluster does not have.
        """
        self._background, self._bursting = background, False
        self._whole = cluster.capacity_bytes_per_s
        self._tier = np.array([link.tier if link.tier >= 0 else TIER_COUNT for link in cluster.links], dtype=np.int64)
        self._bursts = random.Random(f"bursts {seed}")
        self._changed = np.ones(len(self._whole))
        self._fluctuating = np.ones(len(self._whole))
        self._changes = tuple(sorted(changes, key=lambda change: change.at_s))
        self._fluctuations = tuple(fluctuations)
        self._draws = [random.Random(f"fluctuation {number} {seed}") for number in range(len(fluctuations))]
        names = [fluctuation.link for fluctuation in self._fluctuations] + [change.link for change in self._changes]
        self._links = [links_named(cluster, name) for name in names]
        self._schedule: list[tuple[float, int]] = []
        self._fill_schedule()

    def _fill_schedule(self) -> None:
        if self._background.burst_every_s:
            heappush(self._schedule, (self._burst_gap_s(), _BURST))
        for number, fluctuation in enumerate(self._fluctuations):
            self._fluctuate(number, fluctuation, 0.0)
        for number, change in enumerate(self._changes):
            heappush(self._schedule, (change.at_s, len(self._fluctuations) + number))

    @property
    def next_s(self) -> float:
        """Time of the next change; infinity if there is none."""
        return self._schedule[0][0] if self._schedule else float("inf")

    def step(self) -> None:
        """Apply the change that is due at `next_s`."""
        at_s, number = heappop(self._schedule)
        if number == _BURST:
            self._bursting = not self._bursting
            heappush(self._schedule, (at_s + self._burst_gap_s(), _BURST))
        elif number < len(self._fluctuations):
            self._fluctuate(number, self._fluctuations[number], at_s)
        else:
            self._changed[self._links[number]] = self._changes[number - len(self._fluctuations)].share

    def _fluctuate(self, number: int, fluctuation: Fluctuation, at_s: float) -> None:
        draw = self._draws[number]
        self._fluctuating[self._links[number]] = draw.uniform(fluctuation.share_min, fluctuation.share_max)
        heappush(self._schedule, (at_s + draw.expovariate(1 / fluctuation.every_s), number))

    def _burst_gap_s(self) -> float:
        return self._bursts.expovariate(1 / self._background.burst_every_s)

    @property
    def bytes_per_s(self) -> FloatArray:
        """Capacity for own transfers now, [link]."""
        left: FloatArray = self._whole * (1.0 - np.append(self.background_share(), 0.0)[self._tier])
        return left if self._is_whole() else left * self._changed * self._fluctuating

    def background_share(self) -> FloatArray:
        """Share of each tier's capacity that other traffic takes now, [TIER_COUNT]."""
        share = np.array(self._background.per_tier)
        return share + np.array(self._background.burst_per_tier) if self._bursting else share

    def missing_per_tier(self) -> FloatArray:
        """Share of each tier's nominal capacity that own transfers cannot use now, [TIER_COUNT]."""
        share = self.background_share()
        if self._is_whole():
            return share
        whole = np.bincount(self._tier, self._whole, TIER_COUNT + 1)[:TIER_COUNT]
        there = np.bincount(self._tier, self._whole * self._changed * self._fluctuating, TIER_COUNT + 1)[:TIER_COUNT]
        gone = 1.0 - there / np.where(whole > 0, whole, 1.0)
        missing: FloatArray = share + (1.0 - share) * np.where(whole > 0, gone, 0.0)
        return missing

    def missing_per_link(self) -> FloatArray:
        """Share of each link's nominal capacity that own transfers cannot use now, [link]."""
        share: FloatArray = np.append(self.background_share(), 0.0)[self._tier]
        return share if self._is_whole() else share + (1.0 - share) * (1.0 - self._changed * self._fluctuating)

    def cut_for_good(self) -> IntArray:
        """Ids of the links that have no capacity after the last change."""
        last = np.ones(len(self._whole))
        for number, change in enumerate(self._changes):
            last[self._links[len(self._fluctuations) + number]] = change.share
        return np.flatnonzero(last == 0.0)

    def _is_whole(self) -> bool:
        return not (self._changes or self._fluctuations)


def links_named(cluster: Cluster, name: str) -> IntArray:
    """Ids of the links that `name` selects: a link's own name, `A to B`, or `wan`.

    Raises:
        InputError: no link matches.
    """
    if name == "wan":
        found = cluster.links_of_tier(CROSS_DATACENTER)
    else:
        found = tuple(
            number
            for number, link in enumerate(cluster.links)
            if name in (link.name, f"{link.source} to {link.target}")
        )
    if not found:
        known = dict.fromkeys(
            f"{link.source} to {link.target}" for link in cluster.links if link.tier == CROSS_DATACENTER
        )
        examples = (
            f"use the name of a link or one of wan, {', '.join(known)}"
            if known
            else "use the name of a link of the cluster"
        )
        raise InputError(f"{cluster.name} has no link {name!r}", where="link", hint=examples)
    return np.array(found, dtype=np.int64)
