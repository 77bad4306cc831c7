"""Links between single GPUs, and between GPUs and the switches above them, for groups that are not instances yet."""

from __future__ import annotations

from typing import TypeAlias

from kvroute.topology.cluster import Cluster
from kvroute.topology.place import Shards, card_of
from kvroute.types import CROSS_DATACENTER, SAME_NODE, SAME_POD, SAME_RACK, InputError

Gpu: TypeAlias = tuple[int, int]
"""Node number and GPU index."""
Links: TypeAlias = tuple[int, ...]
"""Link ids in the order in which bytes cross them."""


class GpuPaths:
    """Paths of one group of GPUs. A fixed uplink of each bundle is used: the NICs of a domain take its uplinks in
    turn."""

    def __init__(self, cluster: Cluster, gpus: Shards) -> None:
        """Args: `gpus`: the members; NICs of scope `instance` belong to the first member on their node.

        Raises:
            InputError: the members are on several nodes and cannot reach each other.
        """
        self._cluster, self._gpus = cluster, gpus
        self._position = {gpu: position for position, gpu in enumerate(gpus)}
        places = cluster.places
        self.level = max(places.level(gpus[0][0], node) for node, _ in gpus)
        """Nearest common domain of all members, as a tier."""
        if self.level == CROSS_DATACENTER:
            raise InputError("the GPUs of a group are in several datacenters", hint="choose GPUs of one datacenter")
        for node in dict.fromkeys(node for node, _ in gpus):
            if self.level > places.reach[node]:
                name = places.nodes[node].name
                raise InputError(f"{name} has no network to the other nodes of the group", hint="add NICs or uplinks")

    def card(self, gpu: Gpu) -> int:
        """Return the compute NIC of its node that a member uses."""
        return card_of(self._cluster.places, self._gpus, self._position[gpu])

    def between(self, source: Gpu, target: Gpu) -> Links:
        """Return the path from one member to another: NVLink on the same node, otherwise both NICs."""
        level = self._cluster.places.level(source[0], target[0])
        if level == SAME_NODE:
            nvlink = self._cluster.cables.nvlink
            return nvlink[source[0]][source[1]][0], nvlink[target[0]][target[1]][1]
        return self.up(source, level) + self.down(target, level)

    def up(self, gpu: Gpu, level: int) -> Links:
        """Return the links from a member's NIC up to the switch that joins `level` (SAME_RACK or higher)."""
        return tuple(self._step(gpu, step)[0] for step in self._steps(gpu, level))

    def down(self, gpu: Gpu, level: int) -> Links:
        """Return the links from the switch that joins `level` down to a member's NIC."""
        return tuple(self._step(gpu, step)[1] for step in reversed(self._steps(gpu, level)))

    def latency_s(self, source: Gpu, target: Gpu) -> float:
        """Return the one-way latency between two members."""
        return float(self._cluster.tier_latency_s[self._cluster.places.level(source[0], target[0])])

    def domain(self, gpu: Gpu, level: int) -> int:
        """Return the number of the member's domain of this tier; equal numbers are the same domain."""
        return self._cluster.places.domains[gpu[0]][level]

    def _steps(self, gpu: Gpu, level: int) -> list[int]:
        """Return the tiers whose links a path up to `level` uses; a missing rack or pod has none."""
        places, node = self._cluster.places, gpu[0]
        exists = {SAME_RACK: True, SAME_POD: places.racks[node] is not None}
        return [step for step in range(SAME_RACK, level + 1) if exists.get(step, places.pods[node] is not None)]

    def _step(self, gpu: Gpu, step: int) -> tuple[int, int]:
        """Return the (up, down) links of one tier on the way of a member."""
        cables, places, node = self._cluster.cables, self._cluster.places, gpu[0]
        card = self.card(gpu)
        if step == SAME_RACK:
            return cables.nic[node][card]
        domain = places.racks[node] if step == SAME_POD else places.pods[node]
        assert domain is not None
        up, down = (cables.rack if step == SAME_POD else cables.pod)[domain.name]
        turn = (node * len(cables.nic[node]) + card) % len(up)
        return up[turn], down[turn]
