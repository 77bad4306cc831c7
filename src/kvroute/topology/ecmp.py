"""ECMP choice of a transfer: drawn from a seed and the request's number, identical in simulated and real time."""

from __future__ import annotations

import numpy as np

from kvroute.topology.cluster import Cluster
from kvroute.types import FloatArray

DRAWN_HOPS = 16
"""Draws per flow; a path over many WAN hops reuses them from the start."""
CHUNK = 4096
"""Number of requests for which draws are made at a time."""
CHUNKS_KEPT = 8


class EcmpPaths:
    """Paths of a cluster's transfers. Draws depend on the request only, so that every policy gets the same draws for
    the same request, simulated or live."""

    def __init__(self, cluster: Cluster, seed: int, *, flows_max: int = 1) -> None:
        """`flows_max`: maximum number of flows that a transfer may use beyond the cluster's own number."""
        self._cluster, self._seed = cluster, seed
        instances = range(len(cluster.instances))
        flows = max((cluster.flows_per_transfer(index, index) for index in instances), default=1)
        self._drawn_flows = 1 if cluster.ecmp == "transfer" else max(flows, flows_max)
        self._draws: dict[int, FloatArray] = {}
        """Most recent chunks of draws: [CHUNK, flows, hops] in [0, 1)."""

    def of(self, request: int, source: int, target: int, flows: int = 0) -> list[list[int]]:
        """Return the links of each flow of a transfer between two instances (indices); default: `flows_per_transfer`
        flows.

        Raises:
            InputError: the two cannot reach each other.
        """
        draws = self._drawn(request)
        paths = []
        for shard in range(flows or self._cluster.flows_per_transfer(source, target)):
            drawn = draws[shard % len(draws)]
            paths.append(
                [
                    group[0] if len(group) == 1 else group[int(drawn[hop % DRAWN_HOPS] * len(group))]
                    for hop, group in enumerate(self._cluster.hops(source, target, shard))
                ]
            )
        return paths

    def _drawn(self, request: int) -> list[list[float]]:
        """Return the request's own draws, [flows][hops]; they do not depend on the time or order of calls."""
        chunk, row = divmod(request, CHUNK)
        if chunk not in self._draws:
            if len(self._draws) == CHUNKS_KEPT:
                del self._draws[next(iter(self._draws))]
            shape = (CHUNK, self._drawn_flows, DRAWN_HOPS)
            self._draws[chunk] = np.random.default_rng((self._seed, chunk)).random(shape)
        draws: list[list[float]] = self._draws[chunk][row].tolist()
        return draws
