"""Own transfers on the links, for a policy that asks what they do to each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvroute.oracle import NetworkOracle
from kvroute.policies import Foresight, InFlight, LinkModel, Sight
from kvroute.topology import Cluster
from kvroute.types import TIER_COUNT, IntArray, NetworkCosts


class Flight:
    """Keeps foresight's table and hands it to the policy at each decision."""

    def __init__(self, cluster: Cluster, policy: Foresight, oracle: NetworkOracle) -> None:
        self._policy, self._oracle = policy, oracle
        spec = policy.spec
        links = LinkModel.of(cluster).taken_for(spec.source_nic_factor, spec.target_nic_factor, spec.uplink_factor)
        self.table = InFlight(links, spec)

    def policy(self, source: int, targets: IntArray, costs: NetworkCosts, at: float) -> Foresight:
        """The policy as it sees this moment."""
        return replace(self._policy, sight=self.sight(source, targets, costs, at))

    def sight(self, source: int, targets: IntArray, costs: NetworkCosts, at: float, starts_s: float = 0.0) -> Sight:
        """What it may know of a transfer that starts `starts_s` from now."""
        # Telemetry that counts our own transfers would count them twice.
        others = costs.congestion if self._oracle.separates_own_traffic else np.zeros(TIER_COUNT)
        self.table.congested(at, others)
        return self.table.sight(at, source, targets, starts_s)
