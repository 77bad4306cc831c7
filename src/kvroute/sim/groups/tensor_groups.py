"""The instances of a run whose all-reduces share links with other traffic, and the bytes of these all-reduces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvroute.collectives import InstanceTraffic, instance_traffic, unshared_links
from kvroute.topology import Cluster
from kvroute.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class TensorGroups:
    """All-reduces by instance; all other instances have the times of the timing model."""

    traffic: dict[int, InstanceTraffic]
    carried_bytes: FloatArray
    """[link]: bytes of all-reduces so far; `Iterations` adds to it."""
    unshared: IntArray
    """Links that only one instance uses. Its all-reduces on them have no flows in the network."""

    @classmethod
    def of(cls, cluster: Cluster) -> TensorGroups:
        """Return those of a cluster file. Raises InputErrors for an `all_reduce` that does not fit its instance."""
        traffic = instance_traffic(cluster)
        unshared = sorted(unshared_links(cluster)) if traffic else []
        return cls(traffic, np.zeros(len(cluster.links)), np.array(unshared, dtype=np.int64))

    def with_unshared(self, link_bytes: FloatArray) -> FloatArray:
        """Return the bytes carried by the flow network plus those of all-reduces on links without flows, [link]."""
        if not self.traffic:
            return link_bytes
        whole: FloatArray = link_bytes.copy()
        whole[self.unshared] += self.carried_bytes[self.unshared]
        return whole
