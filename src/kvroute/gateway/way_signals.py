"""How the ways home from datacenters that only prefill are, by the kernels that send over them: pace, queue, halt.

What is missing of a full way's pace is taken for others' traffic. Nothing is known of a way on which nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.control.datacenters import Datacenters
from kvroute.gateway.kv_links import LinkSeen
from kvroute.topology import Cluster
from kvroute.types import CROSS_DATACENTER

OTHERS_MAX = 0.95
"""Others' share of a way on which anything moves: were it all, nothing would be sent that shows when they leave."""


@dataclass(frozen=True, slots=True)
class WaySeen:
    """One way of late."""

    bytes_per_s: float
    """Own KV, of all senders together."""
    again_share: float
    """Of what was sent, what had been sent before."""
    queue_delay_s: float
    """Longest round trip beyond the shortest."""
    others: float | None
    """Share of the way that others take; None: nothing tells."""
    still: bool
    """Something is to be sent, and nothing moves."""


@dataclass(frozen=True, slots=True)
class _Page:
    at: float
    seen: tuple[LinkSeen, ...]


class WaySignals:
    """The last word of every prefill instance behind a way; what is older than `fresh_s` is nobody's."""

    def __init__(self, cluster: Cluster, *, still_s: float, fresh_s: float) -> None:
        """Args: `still_s`: a way that does not move for so long stands still."""
        datacenters = Datacenters.of_cluster(cluster)
        names = datacenters.names
        self._way_of = {
            instance.name: names[int(site)]
            for instance, site in zip(cluster.instances, datacenters.of, strict=True)
            if int(site) in datacenters.prfaas
        }
        self._datacenter = {instance.name: instance.datacenter for instance in cluster.instances}
        self._capacity = {names[site]: datacenters.egress_bytes_per_s[site] for site in datacenters.prfaas}
        self._lone_bytes_per_s = float(cluster.tier_bytes_per_s[CROSS_DATACENTER])
        self._still_s, self._fresh_s = still_s, fresh_s
        self._pages: dict[str, _Page] = {}

    @property
    def sites(self) -> tuple[str, ...]:
        """Where the ways begin, by name."""
        return tuple(self._capacity)

    def heard(self, source: str, seen: Sequence[LinkSeen], now: float) -> None:
        """An engine's page; one that stays at home says nothing of a way."""
        site = self._way_of.get(source)
        if site is not None:
            crossing = tuple(each for each in seen if self._datacenter.get(each.target, site) != site)
            self._pages[source] = _Page(now, crossing)

    def way(self, site: str, now: float) -> WaySeen | None:
        """From a site; None where nothing has been sent or was to be."""
        pairs = [
            (source, each)
            for source, page in self._pages.items()
            if self._way_of[source] == site and now - page.at <= self._fresh_s
            for each in page.seen
        ]
        if not pairs:
            return None
        seen = [each for _, each in pairs]
        arrived = sum(each.arrived_bytes for each in seen)
        again = sum(each.again_share * each.arrived_bytes for each in seen)
        stuck = [each for each in seen if each.still_s >= self._still_s]
        return WaySeen(
            bytes_per_s=sum(each.bytes_per_s for each in seen),
            again_share=again / arrived if arrived else max(each.again_share for each in seen),
            queue_delay_s=max(each.queue_delay_s for each in seen),
            others=self._others(site, pairs),
            still=bool(stuck) and arrived == 0.0,
        )

    def _others(self, site: str, pairs: Sequence[tuple[str, LinkSeen]]) -> float | None:
        """What the way should carry, less what it does. No more is due than as many lone transfers as have waited for
        it: several of one sender, or to one receiver, share that one's network interface."""
        bytes_per_s = sum(each.bytes_per_s for _, each in pairs)
        if bytes_per_s == 0.0:
            return None
        waited = [(source, each) for source, each in pairs if each.backlogged]
        if not waited or 2 * sum(each.congested for _, each in waited) < len(waited):
            return 0.0
        lone = min(len({source for source, _ in waited}), len({each.target for _, each in waited}))
        due = min(self._capacity[site], lone * self._lone_bytes_per_s)
        return min(max(1.0 - bytes_per_s / due, 0.0), OTHERS_MAX)
