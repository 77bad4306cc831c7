"""KV transfers as flows on drawn paths, with the traffic of others and the operator's view of both."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvroute.flows import FlowNetwork
from kvroute.sim.settings import Background
from kvroute.topology import Cluster
from kvroute.topology.ecmp import EcmpPaths
from kvroute.types import TIER_COUNT, FloatArray, IntArray

CONGESTION_MAX = 0.99


@dataclass(slots=True)
class Transfer:
    """The flows of one request's KV cache that are still under way."""

    request: int
    latency_s: float
    flows_left: int


@dataclass(slots=True)
class Fabric:
    """The cluster's links in virtual time. One transfer is `flows_per_transfer` flows of equal size.

    ECMP draws belong to the request, so that every policy sees the same luck for the same request.
    """

    cluster: Cluster
    background: Background
    seed: int
    network: FlowNetwork = field(init=False)
    _transfers: dict[int, Transfer] = field(default_factory=dict)
    _next_flow: int = 0
    _bursting: bool = False
    tier_links: list[IntArray] = field(default_factory=list)
    _link_bin: IntArray = field(init=False)
    """Tier by link; storage links, which carry no KV between instances, go to one bin more."""
    _tier_bytes_per_s: FloatArray = field(init=False)
    _bursts: random.Random = field(init=False)
    _paths: EcmpPaths = field(init=False)

    def __post_init__(self) -> None:
        self.network = FlowNetwork(self.cluster.capacity_bytes_per_s)
        self.tier_links = [np.asarray(self.cluster.links_of_tier(tier), dtype=np.int64) for tier in range(TIER_COUNT)]
        self._link_bin = np.full(len(self.cluster.links), TIER_COUNT, dtype=np.int64)
        for tier, links in enumerate(self.tier_links):
            self._link_bin[links] = tier
        whole = np.bincount(self._link_bin, self.cluster.capacity_bytes_per_s, TIER_COUNT + 1)[:TIER_COUNT]
        self._tier_bytes_per_s = np.where(whole > 0, whole, 1.0)  # a tier without links carries nothing
        self._bursts = random.Random(f"bursts {self.seed}")
        self._paths = EcmpPaths(self.cluster, self.seed)
        self._apply_background()

    def send(self, request: int, source: int, target: int, nbytes: float) -> None:
        """Start a transfer now; nothing to send is a transfer that ends at once."""
        flows = self.cluster.flows_per_transfer(source, target)
        transfer = Transfer(request, self.cluster.latency_s(source, target), flows)
        paths = self._paths.of(request, source, target)
        numbers = range(self._next_flow, self._next_flow + flows)
        self._next_flow += flows
        self._transfers |= dict.fromkeys(numbers, transfer)
        self.network.start_many(numbers, paths, [nbytes / flows] * flows)

    def advance(self, to: float) -> list[Transfer]:
        """Move bytes up to `to`; returns the transfers whose last flow has ended, in order."""
        ended = []
        for flow in self.network.advance(to):
            transfer = self._transfers.pop(flow)
            transfer.flows_left -= 1
            if not transfer.flows_left:
                ended.append(transfer)
        return ended

    def next_finish_s(self) -> float:
        """When the next flow ends if nothing changes; infinity if none will."""
        finish = self.network.next_finish()
        return finish[0] if finish else float("inf")

    def toggle_burst(self) -> float:
        """A burst of background traffic starts or ends; returns seconds until the next change."""
        self._bursting = not self._bursting
        self._apply_background()
        return self.next_change_s()

    def next_change_s(self) -> float:
        """Drawn time to the next start or end of a burst."""
        return self._bursts.expovariate(1 / self.background.burst_every_s)

    def background_share(self) -> FloatArray:
        """What others take of each tier now, length TIER_COUNT."""
        share = np.array(self.background.per_tier)
        return share + np.array(self.background.burst_per_tier) if self._bursting else share

    def own_share(self) -> FloatArray:
        """What own transfers take of each tier's capacity now, length TIER_COUNT."""
        carried = np.bincount(self._link_bin, self.network.link_rate_bytes_per_s, TIER_COUNT + 1)
        return carried[:TIER_COUNT] / self._tier_bytes_per_s

    def congestion(self, separates_own_traffic: bool) -> tuple[float, ...]:
        """The operator's telemetry per tier: others only, or others and own together."""
        share = self.background_share()
        if not separates_own_traffic:
            share = share + self.own_share()
        return tuple(np.minimum(share, CONGESTION_MAX).tolist())

    def utilisation(self, separates_own_traffic: bool) -> tuple[float, ...]:
        """The operator's telemetry per link, in the cluster's order: others only, or others and own together."""
        share = np.append(self.background_share(), 0.0)[self._link_bin]
        if not separates_own_traffic:
            share = share + self.network.link_rate_bytes_per_s / self.cluster.capacity_bytes_per_s
        return tuple(np.minimum(share, CONGESTION_MAX).tolist())

    def _apply_background(self) -> None:
        left = np.ones(len(self.cluster.capacity_bytes_per_s))
        for links, share in zip(self.tier_links, self.background_share(), strict=True):
            left[links] = 1.0 - share
        capacity = self.cluster.capacity_bytes_per_s * left
        self.network.set_capacities(np.arange(len(capacity), dtype=np.int64), capacity)
