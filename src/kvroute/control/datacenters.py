"""The datacenters of a cluster by what they do, and what our own transfers put on the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvroute.topology import Cluster
from kvroute.types import InputError, IntArray


@dataclass(frozen=True, slots=True)
class Datacenters:
    """Datacenters, ascending by name: those that only prefill (PrfaaS clusters) and those that also decode (PD)."""

    names: tuple[str, ...]
    of: IntArray
    """[n] site of each instance of the cluster."""
    prfaas: tuple[int, ...]
    pd: tuple[int, ...]
    egress_bytes_per_s: tuple[float, ...]
    """By site: what its narrowest way to a PD site carries; inf for a PD site, whose KV stays at home."""

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Datacenters:
        """Raises InputError where no site only prefills, or none decodes: there is nothing to offload, or to."""
        names = tuple(sorted({instance.datacenter for instance in cluster.instances}))
        number = {name: site for site, name in enumerate(names)}
        of = np.array([number[instance.datacenter] for instance in cluster.instances], dtype=np.int64)
        decodes = {number[instance.datacenter] for instance in cluster.instances if instance.role != "prefill"}
        pd = tuple(sorted(decodes))
        prfaas = tuple(site for site in range(len(names)) if site not in decodes)
        if not prfaas or not pd:
            what = "no datacenter prefills only" if pd else "no datacenter decodes"
            mend = "offloading needs one with prefill instances alone and one with decode instances"
            raise InputError(what, where=cluster.name, mend=mend)
        egress = tuple(
            math.inf if site in decodes else min(_way_bytes_per_s(cluster, names[site], names[home]) for home in pd)
            for site in range(len(names))
        )
        return cls(names, of, prfaas, pd, egress)

    def members(self, instances: IntArray) -> dict[int, IntArray]:
        """By site: which of these instances (indices in the cluster) are there, as positions in the array."""
        return {site: np.flatnonzero(self.of[instances] == site) for site in range(len(self.names))}


def _way_bytes_per_s(cluster: Cluster, source: str, target: str) -> float:
    """The narrowest group of links on the way between two datacenters, all its links together."""
    route = cluster.routes.get((source, target))
    if not route:
        raise InputError(f"no link leads from {source} to {target}", where=cluster.name, mend="add it under `wan`")
    ways = []
    for entry, forward in route:
        links = cluster.cables.wan[entry][0 if forward else 1]
        ways.append(float(sum(cluster.capacity_bytes_per_s[link] for link in links)))
    return min(ways)


@dataclass(slots=True)
class Egress:
    """Own KV bytes on the links of one site, in one direction: how fast of late, and how many are on their way."""

    bytes_per_s: float
    """What the link carries when nobody else uses it."""
    memory_s: float
    """Time after which a byte counts 1/e in the rate."""
    backlog_bytes: float = 0.0
    """Booked and not landed."""
    _rate: float = 0.0
    _rated_at: float = 0.0
    _landings: dict[int, float] = field(default_factory=dict)

    def started(self, number: int, nbytes: float) -> None:
        """A transfer is on its way: a request's KV cache, by the request's number, or a copy, by its own, negative."""
        self._landings[number] = nbytes
        self.backlog_bytes += nbytes

    def ended(self, at: float, number: int, *, landed: bool) -> None:
        """It has landed, or will not; nothing happens where none was known."""
        nbytes = self._landings.pop(number, None)
        if nbytes is None:
            return
        self.backlog_bytes = self.backlog_bytes - nbytes if self._landings else 0.0
        if landed:
            self._rate = self._faded(at) + nbytes / self.memory_s
            self._rated_at = at

    def own_share(self, at: float) -> float:
        """Bytes landed per second of late over what the link carries, 0 to about 1."""
        return self._faded(at) / self.bytes_per_s

    def queue_s(self, others_share: float) -> float:
        """Seconds that the link needs for what is on its way, with what others leave of it."""
        return self.backlog_bytes / (self.bytes_per_s * max(1.0 - others_share, 0.01))

    def _faded(self, at: float) -> float:
        return self._rate * math.exp(-max(at - self._rated_at, 0.0) / self.memory_s)
