"""The network in the foresight model: one link for all uplinks of a rack or pod, and one for each instance's NIC in
each direction.

It holds no traffic. Everything except the tier map may be unknown: an unknown uplink is no limit, and an unknown NIC is
assumed to have the speed of its rack's tier, which errs on the low side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvroute.topology import Cluster
from kvroute.topology.place import card_of
from kvroute.types import (
    CROSS_DATACENTER,
    SAME_DATACENTER,
    SAME_POD,
    SAME_RACK,
    TIER_COUNT,
    FloatArray,
    InputError,
    IntArray,
    TierArray,
)

NIC_UP, NIC_DOWN, RACK_UP, RACK_DOWN, POD_UP, POD_DOWN, SITE = range(7)
"""Columns of `LinkModel.attached`."""
_SENDERS, _RECEIVERS, _UPLINKS = (NIC_UP,), (NIC_DOWN,), (RACK_UP, RACK_DOWN, POD_UP, POD_DOWN)
UNKNOWN = -1


@dataclass(frozen=True, slots=True, eq=False)
class LinkModel:
    """Aggregated links by number, and the links that each instance uses; n instances, m links."""

    tier: TierArray
    """Tier of each ordered pair, [n, n]."""
    tier_bytes_per_s: FloatArray
    """Rate of a transfer alone in the tier, [TIER_COUNT]."""
    attached: IntArray
    """An instance's links (UNKNOWN if there is none) and the number of its datacenter, [n, 7], column by column in
    memory: a decision reads one kind of link of all instances."""
    wan: IntArray
    """Link of each ordered pair of datacenters, or UNKNOWN, [sites, sites]."""
    capacity_bytes_per_s: FloatArray
    """Capacity of all cables of the link together, [m]."""
    cable_bytes_per_s: FloatArray
    """Capacity of one cable: the limit of one hashed path, [m]."""
    cables: IntArray
    """Number of equal cables that a path is hashed onto; 1 if there is no choice, [m]."""
    link_tier: IntArray
    """Tier whose congestion reduces the link's capacity; SAME_RACK (the NICs): none, [m]."""
    hashed_paths: int
    """Number of flows of one transfer that are hashed separately."""

    @classmethod
    def of(cls, cluster: Cluster) -> LinkModel:
        """The links of a loaded cluster. An instance over several nodes is assigned to the rack of its first GPU."""
        made = _Links()
        count = len(cluster.instances)
        attached = np.full((count, 7), UNKNOWN, dtype=np.int64)
        places, cables = cluster.places, cluster.cables
        sites = {site: number for number, site in enumerate(sorted(set(places.datacenters)))}
        for instance in range(count):
            first = cluster.shards[instance][0][0]
            attached[instance, SITE] = sites[places.datacenters[first]]
            hops = [_nics(cluster, instance, down) for down in (False, True)]
            for column, links in zip((NIC_UP, NIC_DOWN), hops, strict=True):
                attached[instance, column] = made.link(cluster, links, SAME_RACK) if links else made.free(cluster)
            rack, pod = places.racks[first], places.pods[first]
            if rack is not None and rack.name in cables.rack:
                attached[instance, RACK_UP : RACK_DOWN + 1] = made.pair(cluster, cables.rack[rack.name], SAME_POD)
            if pod is not None and pod.name in cables.pod:
                attached[instance, POD_UP : POD_DOWN + 1] = made.pair(cluster, cables.pod[pod.name], SAME_DATACENTER)
        wan = np.full((len(sites), len(sites)), UNKNOWN, dtype=np.int64)
        for (source, target), route in sorted(cluster.routes.items()):
            groups = [cables.wan[entry][0 if forward else 1] for entry, forward in route]
            capacity = [float(cluster.capacity_bytes_per_s[list(group)].sum()) for group in groups]
            if groups and source != target:
                narrowest = groups[int(np.argmin(capacity))]
                wan[sites[source], sites[target]] = made.link(cluster, narrowest, CROSS_DATACENTER)
        flows = [cluster.flows_per_transfer(instance, instance) for instance in range(count)]
        hashed = 1 if cluster.ecmp == "transfer" else int(np.median(flows or [1]))
        return made.model(cluster.tier, cluster.tier_bytes_per_s, attached, wan, hashed)

    @classmethod
    def of_tiers(
        cls, tier: TierArray, bytes_per_s: FloatArray, nic_bytes_per_s: float = 0.0, hashed_paths: int = 1
    ) -> LinkModel:
        """The links that follow from a tier map alone: a NIC for each instance, and no uplinks.

        Raises InputError if the tier map is not square or a number is out of range.
        """
        count = len(tier)
        if tier.shape != (count, count):
            raise InputError(f"the tier map has shape {tier.shape}", where="tier", hint="give an [n, n] array")
        nic = nic_bytes_per_s or float(bytes_per_s[SAME_RACK])
        if not (0 < nic < np.inf and hashed_paths >= 1):
            raise InputError(f"a NIC of {nic} bytes per second", where="nic_bytes_per_s", hint="give a positive number")
        made = _Links()
        attached = np.full((count, 7), UNKNOWN, dtype=np.int64)
        attached[:, SITE] = 0
        for instance in range(count):
            attached[instance, NIC_UP] = made.add(nic, nic, 1, SAME_RACK)
            attached[instance, NIC_DOWN] = made.add(nic, nic, 1, SAME_RACK)
        return made.model(tier, bytes_per_s, attached, np.full((1, 1), UNKNOWN, dtype=np.int64), hashed_paths)

    def taken_for(self, source_nic: float, target_nic: float, uplinks: float) -> LinkModel:
        """A copy with factors on the speed of sending NICs, receiving NICs, and uplinks (all cables together). A factor
        of 0 means that this kind is no limit."""
        if source_nic == target_nic == uplinks == 1.0:
            return self
        attached, capacity, cable = (
            self.attached.copy(order="F"),
            self.capacity_bytes_per_s.copy(),
            self.cable_bytes_per_s.copy(),
        )
        for columns, factor in ((_SENDERS, source_nic), (_RECEIVERS, target_nic), (_UPLINKS, uplinks)):
            if factor == 0.0:
                attached[:, columns] = UNKNOWN
                continue
            links = np.unique(self.attached[:, columns])
            links = links[links != UNKNOWN]
            capacity[links] *= factor
            if columns != _UPLINKS:
                cable[links] *= factor
        return replace(self, attached=attached, capacity_bytes_per_s=capacity, cable_bytes_per_s=cable)

    def after(self, old: LinkModel, before: IntArray) -> IntArray:
        """Return the number of each link of another cluster's model in this one, [old m]; -1: it is not here.

        Args:
            old: the links of the cluster before.
            before: [n] earlier index of each instance; -1: it is new.
        """
        after = np.full(len(old.capacity_bytes_per_s) + 1, UNKNOWN, dtype=np.int64)
        stays = before >= 0
        sites = np.full(len(old.wan), UNKNOWN, dtype=np.int64)
        sites[old.attached[before[stays], SITE]] = self.attached[stays, SITE]
        # An unknown link is the last entry, which is dropped.
        after[old.attached[before[stays], :SITE]] = self.attached[stays, :SITE]
        kept = np.flatnonzero(sites >= 0)
        after[old.wan[np.ix_(kept, kept)]] = self.wan[np.ix_(sites[kept], sites[kept])]
        return after[:-1]

    def capacities(self, congestion: FloatArray) -> FloatArray:
        """Bytes per second that other traffic leaves free, [m]. Args: `congestion`: its share of each tier,
        [TIER_COUNT] in [0, 1)."""
        left: FloatArray = self.capacity_bytes_per_s * self.left(congestion)
        return left

    def nic_factors(self, factor: float) -> FloatArray:
        """Return this factor for NICs and 1 for other links, [m]."""
        factors: FloatArray = np.where(self.link_tier > SAME_RACK, 1.0, factor)
        return factors

    def left(self, congestion: FloatArray) -> FloatArray:
        """Share of each link that other traffic leaves free, [m]."""
        share: FloatArray = np.where(self.link_tier > SAME_RACK, 1.0 - congestion[self.link_tier], 1.0)
        return share


class _Links:
    """Collects links; a link that several instances share is entered once."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, int, int]] = []
        self._known: dict[tuple[int, ...], int] = {}

    def add(self, capacity: float, cable: float, cables: int, tier: int) -> int:
        self._rows.append((capacity, cable, cables, tier))
        return len(self._rows) - 1

    def link(self, cluster: Cluster, cables: tuple[int, ...], tier: int) -> int:
        number = self._known.get(cables)
        if number is None:
            bytes_per_s = cluster.capacity_bytes_per_s[list(cables)]
            number = self._known[cables] = self.add(
                float(bytes_per_s.sum()), float(bytes_per_s.mean()), len(cables), tier
            )
        return number

    def pair(self, cluster: Cluster, attached: tuple[tuple[int, ...], tuple[int, ...]], tier: int) -> list[int]:
        return [self.link(cluster, cables, tier) if cables else UNKNOWN for cables in attached]

    def free(self, cluster: Cluster) -> int:
        """Add a link for an instance without NICs, which sends nothing through the network."""
        return self.add(float(cluster.tier_bytes_per_s[SAME_RACK]), float(cluster.tier_bytes_per_s[SAME_RACK]), 1, 1)

    def model(
        self, tier: TierArray, bytes_per_s: FloatArray, attached: IntArray, wan: IntArray, hashed: int
    ) -> LinkModel:
        assert len(bytes_per_s) == TIER_COUNT
        table: npt.NDArray[np.float64] = np.array(self._rows, dtype=np.float64).reshape(-1, 4)
        return LinkModel(
            tier=np.ascontiguousarray(tier, dtype=np.int8),
            tier_bytes_per_s=np.array(bytes_per_s, dtype=np.float64),
            attached=np.asfortranarray(attached),
            wan=wan,
            capacity_bytes_per_s=table[:, 0].copy(),
            cable_bytes_per_s=table[:, 1].copy(),
            cables=table[:, 2].astype(np.int64),
            link_tier=table[:, 3].astype(np.int64),
            hashed_paths=hashed,
        )


def _nics(cluster: Cluster, instance: int, down: bool) -> tuple[int, ...]:
    """Ids of the instance's NIC links in one direction."""
    shards = cluster.shards[instance]
    found = []
    for position, (node, _) in enumerate(shards):
        if cluster.cables.nic[node]:
            found.append(cluster.cables.nic[node][card_of(cluster.places, shards, position)][1 if down else 0])
    return tuple(dict.fromkeys(found))
