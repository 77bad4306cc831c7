"""What own transfers may use of each link over time: nominal capacity less others' traffic, cuts and fluctuation.

It moves no bytes: `next_s` says when something changes, `step` makes that change.
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
"""In the schedule: a burst starts or ends; fluctuations and changes have the numbers from 0."""


class Capacity:
    """Every link's capacity now, and what changes it. A burst takes its share of what a cut has left."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        seed: int,
        *,
        changes: Sequence[CapacityChange] = (),
        fluctuations: Sequence[Fluctuation] = (),
    ) -> None:
        """All capacity is there, less steady background. Random times and shares are drawn from `seed`.

        Raises:
            InputError: a change or fluctuation of a link that the cluster does not have.
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
        names = [each.link for each in self._fluctuations] + [each.link for each in self._changes]
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
        """When the next change is due; inf if there is none."""
        return self._schedule[0][0] if self._schedule else float("inf")

    def step(self) -> None:
        """Make the change that is due at `next_s`."""
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
        """[link] what own transfers may use now."""
        left: FloatArray = self._whole * (1.0 - np.append(self.background_share(), 0.0)[self._tier])
        return left if self._is_whole() else left * self._changed * self._fluctuating

    def background_share(self) -> FloatArray:
        """[TIER_COUNT] what others take of each tier now."""
        share = np.array(self._background.per_tier)
        return share + np.array(self._background.burst_per_tier) if self._bursting else share

    def missing_per_tier(self) -> FloatArray:
        """[TIER_COUNT] share of each tier's nominal capacity that is not there for own transfers."""
        share = self.background_share()
        if self._is_whole():
            return share
        whole = np.bincount(self._tier, self._whole, TIER_COUNT + 1)[:TIER_COUNT]
        there = np.bincount(self._tier, self._whole * self._changed * self._fluctuating, TIER_COUNT + 1)[:TIER_COUNT]
        gone = 1.0 - there / np.where(whole > 0, whole, 1.0)
        missing: FloatArray = share + (1.0 - share) * np.where(whole > 0, gone, 0.0)
        return missing

    def missing_per_link(self) -> FloatArray:
        """[link] the same for each link."""
        share: FloatArray = np.append(self.background_share(), 0.0)[self._tier]
        return share if self._is_whole() else share + (1.0 - share) * (1.0 - self._changed * self._fluctuating)

    def cut_for_good(self) -> IntArray:
        """Links that have no capacity once all changes are over."""
        last = np.ones(len(self._whole))
        for number, change in enumerate(self._changes):
            last[self._links[len(self._fluctuations) + number]] = change.share
        return np.flatnonzero(last == 0.0)

    def _is_whole(self) -> bool:
        return not (self._changes or self._fluctuations)


def links_named(cluster: Cluster, name: str) -> IntArray:
    """Ids of the links that a change names: one by its own name, `A to B`, or `wan`. Raises InputError for none."""
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
        examples = f"name a link, or one of wan, {', '.join(known)}" if known else "name a link of the cluster"
        raise InputError(f"{cluster.name} has no link {name!r}", where="link", mend=examples)
    return np.array(found, dtype=np.int64)
