"""The datacenters of a cluster by the stages they serve, and the load of own transfers on the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvroute.topology import Cluster
from kvroute.types import InputError, IntArray


@dataclass(frozen=True, slots=True)
class Datacenters:
    """Datacenters (sites) by name: those that only prefill (PrfaaS clusters) and those that also decode (PD)."""

    names: tuple[str, ...]
    of: IntArray
    """Site of each instance of the cluster, [n]."""
    prfaas: tuple[int, ...]
    pd: tuple[int, ...]
    egress_bytes_per_s: tuple[float, ...]
    """Bandwidth of the narrowest path to a PD site, by site; inf for a PD site, whose KV does not leave the site."""

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Datacenters:
        """Raises InputError if no site only prefills, or if no site decodes: offloading needs both."""
        names = tuple(sorted({instance.datacenter for instance in cluster.instances}))
        number = {name: site for site, name in enumerate(names)}
        of = np.array([number[instance.datacenter] for instance in cluster.instances], dtype=np.int64)
        decodes = {number[instance.datacenter] for instance in cluster.instances if instance.role != "prefill"}
        pd = tuple(sorted(decodes))
        prfaas = tuple(site for site in range(len(names)) if site not in decodes)
        if not prfaas or not pd:
            what = "no datacenter has prefill instances only" if pd else "no datacenter has decode instances"
            hint = "offloading needs a datacenter with only prefill instances and one with decode instances"
            raise InputError(what, where=cluster.name, hint=hint)
        egress = tuple(
            math.inf if site in decodes else min(_path_bytes_per_s(cluster, names[site], names[home]) for home in pd)
            for site in range(len(names))
        )
        return cls(names, of, prfaas, pd, egress)

    def members(self, instances: IntArray) -> dict[int, IntArray]:
        """The positions in `instances` (indices in the cluster) that belong to each site, by site."""
        return {site: np.flatnonzero(self.of[instances] == site) for site in range(len(self.names))}


def _path_bytes_per_s(cluster: Cluster, source: str, target: str) -> float:
    """Bandwidth of the narrowest link group on the path between two datacenters, summed over the links of the group."""
    route = cluster.routes.get((source, target))
    if not route:
        raise InputError(f"no link leads from {source} to {target}", where=cluster.name, hint="add it under `wan`")
    capacities = []
    for entry, forward in route:
        links = cluster.cables.wan[entry][0 if forward else 1]
        capacities.append(float(sum(cluster.capacity_bytes_per_s[link] for link in links)))
    return min(capacities)


@dataclass(slots=True)
class Egress:
    """Own KV bytes on the links of one site, in one direction: their recent rate and the bytes in transfer."""

    bytes_per_s: float
    """Bandwidth of the link without other traffic."""
    memory_s: float
    """Time after which a byte counts 1/e in the rate."""
    backlog_bytes: float = 0.0
    """Bytes that are booked and not yet transferred."""
    _rate: float = 0.0
    _rated_at: float = 0.0
    _in_flight: dict[int, float] = field(default_factory=dict)

    def started(self, number: int, nbytes: float) -> None:
        """Record the start of a transfer. `number`: the request's for a KV cache, minus the copy's for a copy."""
        self._in_flight[number] = nbytes
        self.backlog_bytes += nbytes

    def ended(self, at: float, number: int, *, landed: bool) -> None:
        """Record that a transfer is complete (`landed`) or has failed. Does nothing for an unknown number."""
        nbytes = self._in_flight.pop(number, None)
        if nbytes is None:
            return
        self.backlog_bytes = self.backlog_bytes - nbytes if self._in_flight else 0.0
        if landed:
            self._rate = self._faded(at) + nbytes / self.memory_s
            self._rated_at = at

    def own_share(self, at: float) -> float:
        """Recent rate of own bytes over the link's bandwidth, 0 to about 1."""
        return self._faded(at) / self.bytes_per_s

    def queue_s(self, others_share: float) -> float:
        """Seconds that the link needs for the bytes in transfer, given the share of the bandwidth that others use."""
        return self.backlog_bytes / (self.bytes_per_s * max(1.0 - others_share, 0.01))

    def _faded(self, at: float) -> float:
        return self._rate * math.exp(-max(at - self._rated_at, 0.0) / self.memory_s)
