"""State of the WAN paths from prefill-only datacenters, by the TCP counters of the senders: throughput, queue, stall.

If own senders are backlogged, capacity that they do not get counts as other traffic. If no data moves on a path,
nothing is known about other traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.control.state.datacenters import Datacenters
from kvroute.serve.wan.tcp_links import TcpSample
from kvroute.topology import Cluster
from kvroute.types import CROSS_DATACENTER

OTHERS_MAX = 0.95
"""Maximum share of other traffic on a path where data moves: with 1, nothing would be sent that shows its end."""


@dataclass(frozen=True, slots=True)
class PathSample:
    """Recent state of one path."""

    bytes_per_s: float
    """Throughput of own KV, summed over senders."""
    again_share: float
    """Share of the sent bytes that are retransmissions."""
    queue_delay_s: float
    """Longest round trip time beyond the shortest one."""
    others: float | None
    """Share of the path that other traffic takes; None: unknown."""
    stalled: bool
    """Whether data is ready to be sent and nothing moves."""


@dataclass(frozen=True, slots=True)
class _Page:
    at: float
    seen: tuple[TcpSample, ...]


class PathTelemetry:
    """Last samples of every prefill instance in a prefill-only datacenter; samples older than `fresh_s` are ignored."""

    def __init__(self, cluster: Cluster, *, stalled_s: float, fresh_s: float) -> None:
        """Args: `stalled_s`: time without progress after which a path counts as stalled."""
        datacenters = Datacenters.of_cluster(cluster)
        names = datacenters.names
        self._site_of = {
            instance.name: names[int(site)]
            for instance, site in zip(cluster.instances, datacenters.of, strict=True)
            if int(site) in datacenters.prfaas
        }
        self._datacenter = {instance.name: instance.datacenter for instance in cluster.instances}
        self._capacity = {names[site]: datacenters.egress_bytes_per_s[site] for site in datacenters.prfaas}
        self._lone_bytes_per_s = float(cluster.tier_bytes_per_s[CROSS_DATACENTER])
        self._stalled_s, self._fresh_s = stalled_s, fresh_s
        self._pages: dict[str, _Page] = {}

    @property
    def sites(self) -> tuple[str, ...]:
        """Datacenters in which the paths start, by name."""
        return tuple(self._capacity)

    def record(self, source: str, seen: Sequence[TcpSample], now: float) -> None:
        """Store the samples of an engine's page; the page of an engine outside these datacenters is ignored."""
        site = self._site_of.get(source)
        if site is not None:
            crossing = tuple(sample for sample in seen if self._datacenter.get(sample.target, site) != site)
            self._pages[source] = _Page(now, crossing)

    def sample(self, site: str, now: float) -> PathSample | None:
        """Return the state of the path from a site; None if nothing was sent or ready to be sent."""
        pairs = [
            (source, sample)
            for source, page in self._pages.items()
            if self._site_of[source] == site and now - page.at <= self._fresh_s
            for sample in page.seen
        ]
        if not pairs:
            return None
        seen = [sample for _, sample in pairs]
        arrived = sum(sample.arrived_bytes for sample in seen)
        again = sum(sample.again_share * sample.arrived_bytes for sample in seen)
        stuck = [sample for sample in seen if sample.stalled_s >= self._stalled_s]
        return PathSample(
            bytes_per_s=sum(sample.bytes_per_s for sample in seen),
            again_share=again / arrived if arrived else max(sample.again_share for sample in seen),
            queue_delay_s=max(sample.queue_delay_s for sample in seen),
            others=self._others(site, pairs),
            stalled=bool(stuck) and arrived == 0.0,
        )

    def _others(self, site: str, pairs: Sequence[tuple[str, TcpSample]]) -> float | None:
        """Return the share of the expected throughput that own transfers do not reach. At most as many lone
        transfers are expected as there are waiting senders, or receivers: transfers of one instance share its NIC."""
        bytes_per_s = sum(sample.bytes_per_s for _, sample in pairs)
        if bytes_per_s == 0.0:
            return None
        waited = [(source, sample) for source, sample in pairs if sample.backlogged]
        if not waited or 2 * sum(sample.congested for _, sample in waited) < len(waited):
            return 0.0
        lone = min(len({source for source, _ in waited}), len({sample.target for _, sample in waited}))
        due = min(self._capacity[site], lone * self._lone_bytes_per_s)
        return min(max(1.0 - bytes_per_s / due, 0.0), OTHERS_MAX)
