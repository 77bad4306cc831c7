"""Own transfers in flight, for a policy that predicts how they slow each other down."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import structs

from kvroute.control.state.transfer_table import InFlight
from kvroute.oracle import NetworkOracle
from kvroute.policies import DecodePolicy, LinkModel, NetworkView, NetworkViewPolicy, TierLearned
from kvroute.topology import Cluster
from kvroute.types import TIER_COUNT, FloatArray, IntArray, NetworkCosts

_NOTHING: FloatArray = np.zeros(TIER_COUNT)


class TransferTracker:
    """Maintains the table of transfers of one policy and gives the policy its current state at each decision.

    It is a `PolicyState`, a `ResponseObserver` and a `CapacityLearner`.
    """

    def __init__(self, cluster: Cluster, policy: NetworkViewPolicy, oracle: NetworkOracle) -> None:
        self._policy, self._oracle, self._cluster = policy, oracle, cluster
        spec = policy.spec
        links = LinkModel.of(cluster).taken_for(spec.source_nic_factor, spec.target_nic_factor, spec.uplink_factor)
        self.table = table = InFlight(links, spec)
        # Bound methods, so that a report costs no second call.
        self.started, self.finished, self.answered = table.started, table.finished, table.answers.finished
        self.known_at, self.resume = table.known_at, table.resume

    def take_over(self, old: TransferTracker, after: IntArray) -> None:
        """See `InFlight.take_over`."""
        self.table.take_over(old.table, after)

    def links_after(self, old: TransferTracker, before: IntArray) -> IntArray:
        """See `LinkModel.after`."""
        return self.table.links.after(old.table.links, before)

    def policy(self, source: int, targets: IntArray, costs: NetworkCosts, at: float) -> DecodePolicy:
        """The policy with its view of the network at this time."""
        return self._policy.informed(self.network_view(source, targets, costs, at))

    def network_view(
        self, source: int, targets: IntArray, costs: NetworkCosts, at: float, starts_s: float = 0.0
    ) -> NetworkView:
        """What the policy may use to predict a transfer that starts `starts_s` from now."""
        self.table.congested(at, self._others(costs.congestion))
        return self.table.network_view(at, source, targets, starts_s)

    def learned(self, at: float) -> tuple[TierLearned, ...]:
        """What own transfers have taught about each tier. Changes nothing."""
        congestion, seen = self._others(self._oracle.congestion(at)), self.table.learned.seen(at)
        factor = np.array([tier.factor for tier in seen])
        uncontended = (pair and self.table.uncontended_bytes_per_s(*pair, congestion, factor) for pair in self._pairs)
        return tuple(structs.replace(tier, bytes_per_s=speed) for tier, speed in zip(seen, uncontended, strict=True))

    @cached_property
    def _pairs(self) -> list[tuple[int, int] | None]:
        """For each tier the first pair of a prefill and a decode instance, or None if there is no such pair."""
        instances = self._cluster.instances
        sources = np.array([k for k, instance in enumerate(instances) if instance.role != "decode"], dtype=np.int64)
        targets = np.array([k for k, instance in enumerate(instances) if instance.role != "prefill"], dtype=np.int64)
        tier = self._cluster.tier[np.ix_(sources, targets)]
        first = (np.argwhere(tier == level)[:1].tolist() for level in range(TIER_COUNT))
        return [(int(sources[found[0][0]]), int(targets[found[0][1]])) if found else None for found in first]

    def _others(self, congestion: FloatArray) -> FloatArray:
        # Telemetry that includes our own transfers would count them twice.
        return congestion if self._oracle.separates_own_traffic else _NOTHING
