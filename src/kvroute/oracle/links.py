"""The oracle's view by link: free bandwidth on the path of a pair, and the congestion per tier that follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvroute.oracle.telemetry import CONGESTION_MAX
from kvroute.topology import Cluster
from kvroute.types import SAME_RACK, TIER_COUNT, FloatArray, InputError, IntArray, TierArray

Groups = Sequence[Sequence[int]]
"""A path as ECMP groups of link ids: one link of each group carries the flow."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The groups of several pairs as flat arrays: the links of each group in turn, the groups of each pair in turn."""

    links: IntArray
    group_starts: IntArray
    group_sizes: IntArray
    shares: FloatArray
    """Per group: number of links that a transfer can fill there, over the part of the transfer that passes there."""
    pair_starts: IntArray


class LinkView:
    """Capacities and paths of the cluster, for evaluating telemetry by link. Holds no measurement."""

    def __init__(
        self,
        capacity_bytes_per_s: FloatArray,
        link_tier: TierArray,
        tier_bytes_per_s: FloatArray,
        hops: Callable[[int, int, int], Groups],
        flows_per_transfer: Callable[[int, int], int],
        ecmp: Literal["flow", "transfer"] = "flow",
    ) -> None:
        """Store the links and paths of a cluster.

        Args:
            capacity_bytes_per_s: by link, > 0.
            link_tier: by link, the lowest tier of transfers that pass it; negative if no transfer passes it.
            tier_bytes_per_s: [TIER_COUNT] rate of a transfer alone in each tier.
            hops: (source, target, shard) -> the path of that shard as ECMP groups.
            flows_per_transfer: (source, target) -> number of shards.
            ecmp: whether each flow draws its link or all flows of a transfer share one draw.
        """
        self._capacity_bytes_per_s = np.asarray(capacity_bytes_per_s, dtype=np.float64)
        self._link_tier = np.asarray(link_tier, dtype=np.int64)
        self._tier_bytes_per_s = np.asarray(tier_bytes_per_s, dtype=np.float64)
        if self._capacity_bytes_per_s.shape != self._link_tier.shape:
            raise InputError(
                "the numbers of link capacities and link tiers differ",
                where="link_tier",
                hint="give both for every link",
            )
        self._hops, self._flows_per_transfer, self._ecmp = hops, flows_per_transfer, ecmp
        self._plans: dict[tuple[int, bytes], _Plan] = {}

    @classmethod
    def of(cls, cluster: Cluster) -> LinkView:
        """The view of a loaded cluster."""
        return cls(
            cluster.capacity_bytes_per_s,
            np.array([link.tier for link in cluster.links], dtype=np.int8),
            cluster.tier_bytes_per_s,
            cluster.hops,
            cluster.flows_per_transfer,
            cluster.ecmp,
        )

    @property
    def link_count(self) -> int:
        """Number of links, which is the number of values in telemetry by link."""
        return len(self._link_tier)

    def aggregate(self, utilisation: FloatArray) -> FloatArray:
        """Congestion per tier, [TIER_COUNT], from utilisation by link, both in [0, 1).

        A transfer of tier k leaves its node and passes links of the tiers 1 to k up and down again, so the tightest of
        these tiers decides: c_k = 1 - min_j B_j (1 - u_j) / B_k over j <= k, at least 0, where u_j is the mean
        utilisation of tier j weighted by capacity. Tier 0 stays inside the node and has links of its own.
        """
        tiered = self._link_tier >= 0
        tier, capacity = self._link_tier[tiered], self._capacity_bytes_per_s[tiered]
        total = np.bincount(tier, capacity, TIER_COUNT)
        used = np.bincount(tier, capacity * utilisation[tiered], TIER_COUNT)
        mean = np.divide(used, total, out=np.zeros(TIER_COUNT), where=total > 0)
        # A tier without links limits no transfer, whatever its declared bandwidth is.
        left = np.where(total > 0, self._tier_bytes_per_s * (1.0 - mean), np.inf)[SAME_RACK:]
        tightest = np.minimum.accumulate(left) / self._tier_bytes_per_s[SAME_RACK:]
        congestion = mean.copy()
        congestion[SAME_RACK:] = np.clip(1.0 - tightest, 0.0, CONGESTION_MAX)
        return congestion

    def residual_bytes_per_s(self, source: int, targets: IntArray, utilisation: FloatArray) -> FloatArray:
        """Rate that the links leave to a transfer alone of each pair, [m].

        Each group offers the mean free bandwidth of its links, which is the expected value of an even ECMP draw (an
        unlucky draw gets less). All flows of a transfer carry equal parts, so the slowest one sets the pace: with F
        flows, of which f pass a group and can fill w of its links, the pace is the minimum over groups of residual * w
        * F / f.
        """
        if not len(targets):
            return np.zeros(0)
        key = (source, targets.tobytes())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(source, targets)
        left = (self._capacity_bytes_per_s * (1.0 - utilisation)).take(plan.links)
        per_group = np.add.reduceat(left, plan.group_starts) / plan.group_sizes * plan.shares
        residual: FloatArray = np.minimum.reduceat(per_group, plan.pair_starts)
        return residual

    def _plan(self, source: int, targets: IntArray) -> _Plan:
        links: list[int] = []
        sizes: list[int] = []
        shares: list[float] = []
        pair_starts: list[int] = []
        for target in targets.tolist():
            flows = self._flows_per_transfer(source, target)
            paths = (dict.fromkeys(tuple(group) for group in self._hops(source, target, n)) for n in range(flows))
            passing = Counter(group for path in paths for group in path)
            pair_starts.append(len(sizes))
            for group, count in passing.items():
                width = min(count, len(group)) if self._ecmp == "flow" else 1
                links.extend(group)
                sizes.append(len(group))
                shares.append(width * flows / count)
        group_sizes = np.array(sizes, dtype=np.int64)
        return _Plan(
            links=np.array(links, dtype=np.int64),
            group_starts=np.cumsum(group_sizes) - group_sizes,
            group_sizes=group_sizes,
            shares=np.array(shares),
            pair_starts=np.array(pair_starts, dtype=np.int64),
        )
