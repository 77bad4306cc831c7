"""KV transfers and copies of cached prefixes as flows on randomly chosen paths, and the telemetry of the links."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from kvroute.collectives import IterationTraffic
from kvroute.flows import FlowNetwork, FlowSet
from kvroute.flows.network import WEIGHT_MIN
from kvroute.sim.network.capacity import LinkCapacities
from kvroute.sim.settings import WanTransport
from kvroute.topology import Cluster
from kvroute.topology.ecmp import EcmpPaths
from kvroute.types import CROSS_DATACENTER, TIER_COUNT, FloatArray, IntArray

CONGESTION_MAX = 0.99
UNBOUNDED = float("inf")
Kind: TypeAlias = Literal["kv", "copy", "ahead", "storage"]
"""What a transfer carries: a request's KV, a cached prefix that a request waits for, one that none waits for, or blocks
of the store."""
_KV, _AHEAD, _ALL_REDUCE = "kv", "ahead", "all-reduce"
"""Traffic classes. A flow ahead of demand has a thousandth of the weight of a request's flow."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The unfinished flows of one request's KV transfer, or of one prefix copy."""

    request: int
    latency_s: float
    flows_left: int
    flow_bytes: float
    first_flow: int
    paths: list[list[int]]
    ceiling_bytes_per_s: float
    """Upper bound on the rate of each flow, set by its TCP connection."""
    kind: Kind
    sent_s: float
    """Time at which its first byte could be sent."""
    stalled_s: float | None = None
    """Time since which one of its flows has had no usable path; None if all flows have one."""

    @property
    def is_copy(self) -> bool:
        """True for the copy of a cached prefix."""
        return self.kind in ("copy", "ahead")


class MovedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a group of transfers: `kv_bytes` is their payload, `network_bytes` the sum over all hops."""

    transfers: int = 0
    kv_bytes: float = 0.0
    network_bytes: float = 0.0

    def plus(self, kv_bytes: float, network_bytes: float) -> MovedBytes:
        """Return these totals with one more transfer."""
        return MovedBytes(
            transfers=self.transfers + 1,
            kv_bytes=self.kv_bytes + kv_bytes,
            network_bytes=self.network_bytes + network_bytes,
        )


@dataclass(slots=True)
class Fabric:
    """The cluster's links in virtual time.

    One transfer is `flows_per_transfer` flows of equal size. Between datacenters it uses the TCP connections of `wan`,
    each with its own rate limit. ECMP draws depend on the request only, so that every policy gets the same draws for
    the same request.
    """

    cluster: Cluster
    capacity: LinkCapacities
    seed: int
    wan: WanTransport | None = None
    all_reduce_weight: float = 1.0
    """Weight of each flow of an all-reduce; a flow of a KV transfer has 1."""
    network: FlowNetwork = field(init=False)
    failed: MovedBytes = field(default_factory=MovedBytes)
    """Totals of the bytes sent by failed transfers."""
    copied: MovedBytes = field(default_factory=MovedBytes)
    """Totals of the copies of cached prefixes for requests, complete or given up."""
    copied_ahead: MovedBytes = field(default_factory=MovedBytes)
    """Totals of the copies that no request waited for."""
    tier_links: list[IntArray] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    """Numbers of the sets of all-reduces that have ended; the caller empties it."""
    _transfers: dict[int, Transfer] = field(default_factory=dict)
    """The transfer of each flow."""
    _sets: dict[IterationTraffic, FlowSet] = field(default_factory=dict)
    _reducing_left: dict[int, int] = field(default_factory=dict)
    """Flows of each set of all-reduces that have not ended. The flow network knows set n as -1 - n."""
    _next_flow: int = 0
    _dead: frozenset[int] = frozenset()
    """Links that have no capacity now."""
    _link_bin: IntArray = field(init=False)
    """Tier of each link; storage links, which carry no KV between instances, have one extra bin."""
    _tier_bytes_per_s: FloatArray = field(init=False)
    _paths: EcmpPaths = field(init=False)

    def __post_init__(self) -> None:
        classes = {_KV: 1.0, _AHEAD: WEIGHT_MIN, _ALL_REDUCE: self.all_reduce_weight}
        self.network = FlowNetwork(self.cluster.capacity_bytes_per_s, classes)
        self.tier_links = [np.asarray(self.cluster.links_of_tier(tier), dtype=np.int64) for tier in range(TIER_COUNT)]
        self._link_bin = np.full(len(self.cluster.links), TIER_COUNT, dtype=np.int64)
        for tier, links in enumerate(self.tier_links):
            self._link_bin[links] = tier
        whole = np.bincount(self._link_bin, self.cluster.capacity_bytes_per_s, TIER_COUNT + 1)[:TIER_COUNT]
        self._tier_bytes_per_s = np.where(whole > 0, whole, 1.0)  # a tier without links carries nothing
        self._paths = EcmpPaths(self.cluster, self.seed, flows_max=self.wan.connections if self.wan else 1)
        self._apply_capacity()

    def send(
        self,
        request: int,
        source: int,
        target: int,
        nbytes: float,
        *,
        produced_bytes_per_s: float = UNBOUNDED,
        kind: Kind = "kv",
    ) -> Transfer:
        """Start a transfer between two instances now; a transfer of zero bytes ends at once.

        Args:
            request: number of the request.
            source, target: indices of the instances.
            nbytes: size of the transfer.
            produced_bytes_per_s: upper bound on the rate until `release`, because the KV cache is still being computed.
            kind: copies are counted separately; those ahead of demand use the capacity that other flows leave.
        """
        latency_s = self.cluster.latency_s(source, target)
        flows, ceiling = self.cluster.flows_per_transfer(source, target), UNBOUNDED
        if self.wan is not None and self.cluster.tier[source, target] == CROSS_DATACENTER:
            flows, ceiling = self.wan.connections, self.wan.ceiling_bytes_per_s(latency_s)
        paths = self._paths.of(request, source, target, flows)
        bound = min(ceiling, produced_bytes_per_s / flows)
        return self._start(request, paths, nbytes, kind, latency_s, ceiling, bound)

    def read(self, number: int, instance: int, nbytes: float) -> Transfer:
        """Start to read from the store over all storage NICs of an instance's node."""
        return self._over_storage_links(number, self.cluster.storage_read_paths(instance), nbytes)

    def write(self, number: int, instance: int, nbytes: float) -> Transfer:
        """Start to write to the store over all storage NICs of an instance's node."""
        return self._over_storage_links(number, [[up] for up, _ in self.cluster.storage_links(instance)], nbytes)

    def _over_storage_links(self, number: int, paths: list[list[int]], nbytes: float) -> Transfer:
        """Start one flow over each of these paths."""
        return self._start(number, paths, nbytes, "storage", 0.0, UNBOUNDED, UNBOUNDED)

    def _start(
        self,
        request: int,
        paths: list[list[int]],
        nbytes: float,
        kind: Kind,
        latency_s: float,
        ceiling: float,
        bound: float,
    ) -> Transfer:
        """Start a transfer with one flow on each path. Args: `bound`: limit of each flow's rate for the time being."""
        flows, first = len(paths), self._next_flow
        sizes = [nbytes / flows] * flows
        transfer = Transfer(request, latency_s, flows, sizes[0], first, paths, ceiling, kind, self.network.now)
        numbers = range(first, first + flows)
        self._next_flow += flows
        self._transfers |= dict.fromkeys(numbers, transfer)
        traffic_class = _AHEAD if kind == "ahead" else _KV
        self.network.start_many(numbers, paths, sizes, traffic_class=traffic_class, ceiling_bytes_per_s=bound)
        return transfer

    def reduce(self, number: int, traffic: IterationTraffic, tokens: float) -> None:
        """Start the flows of all-reduces now, as one set, whose number is not in progress.

        They are not transfers: they have no stall timeout.
        """
        flows = self._sets.get(traffic)
        if flows is None:
            rows = [(flow.links, flow.nbytes, flow.ceiling_bytes_per_s) for flow in traffic.flows]
            paths, sizes, ceilings = zip(*rows, strict=True)
            flows = self._sets[traffic] = self.network.prepared(paths, sizes, ceilings)
        self.network.start_set(-1 - number, flows, tokens, _ALL_REDUCE)
        self._reducing_left[number] = flows.count

    def release(self, transfer: Transfer) -> None:
        """Remove the production limit: the KV cache is complete."""
        for flow in self._active(transfer):
            self.network.set_ceiling(flow, transfer.ceiling_bytes_per_s)

    def limit(self, transfer: Transfer, produced_bytes_per_s: float) -> None:
        """Change the production limit of a transfer."""
        bound = min(transfer.ceiling_bytes_per_s, produced_bytes_per_s / len(transfer.paths))
        for flow in self._active(transfer):
            self.network.set_ceiling(flow, bound)

    def give_up(self, transfer: Transfer) -> None:
        """Stop a transfer now; the bytes that it has sent are counted separately."""
        sent_bytes = network_bytes = 0.0
        for position, path in enumerate(transfer.paths):
            flow = transfer.first_flow + position
            rest = self.network.cancel(flow) if self._transfers.pop(flow, None) else 0.0
            sent_bytes += transfer.flow_bytes - rest
            network_bytes += (transfer.flow_bytes - rest) * len(path)
        if transfer.is_copy:
            self._count_copy(transfer, sent_bytes, network_bytes)
        else:
            self.failed = self.failed.plus(sent_bytes, network_bytes)

    def _count_copy(self, transfer: Transfer, kv_bytes: float, network_bytes: float) -> None:
        if transfer.kind == "ahead":
            self.copied_ahead = self.copied_ahead.plus(kv_bytes, network_bytes)
        else:
            self.copied = self.copied.plus(kv_bytes, network_bytes)

    def advance(self, to: float) -> list[Transfer]:
        """Move bytes up to `to`; return the transfers whose last flow has ended, in order. Sets of all-reduces whose
        last flow has ended are added to `reduced`."""
        ended = []
        for flow in self.network.advance(to):
            if flow < 0:
                self._reduced(-1 - flow)
                continue
            transfer = self._transfers.pop(flow)
            transfer.flows_left -= 1
            if not transfer.flows_left:
                ended.append(transfer)
                if transfer.is_copy:
                    hops = sum(map(len, transfer.paths))
                    size = transfer.flow_bytes
                    self._count_copy(transfer, size * len(transfer.paths), size * hops)
        return ended

    def _reduced(self, number: int) -> None:
        """Count the end of one flow of a set of all-reduces."""
        self._reducing_left[number] -= 1
        if not self._reducing_left[number]:
            del self._reducing_left[number]
            self.reduced.append(number)

    def next_finish_s(self) -> float:
        """Time at which the next flow ends if nothing changes; infinity if none will."""
        finish = self.network.next_finish()
        return finish[0] if finish else float("inf")

    def change(self) -> None:
        """Apply the capacity change that is due; the caller has moved bytes up to it."""
        self.capacity.step()
        self._apply_capacity()

    def stalled(self, at: float) -> list[Transfer]:
        """Return the transfers that have lost their usable path since the last call, and mark them as stalled from
        `at`. Clear the mark of transfers that have a path again."""
        fresh = []
        for transfer in dict.fromkeys(self._transfers.values()):
            if not self._stuck(transfer):
                transfer.stalled_s = None
            elif transfer.stalled_s is None:
                transfer.stalled_s = at
                fresh.append(transfer)
        return fresh

    def _stuck(self, transfer: Transfer) -> bool:
        return bool(self._dead) and any(
            not self._dead.isdisjoint(transfer.paths[flow - transfer.first_flow]) for flow in self._active(transfer)
        )

    def _active(self, transfer: Transfer) -> list[int]:
        flows = range(transfer.first_flow, transfer.first_flow + len(transfer.paths))
        return [flow for flow in flows if flow in self._transfers]

    def own_bytes(self) -> FloatArray:
        """Bytes that own transfers have sent over each tier's links so far, [TIER_COUNT]."""
        carried = np.bincount(self._link_bin, self.network.link_bytes, TIER_COUNT + 1)
        return np.asarray(carried[:TIER_COUNT], dtype=np.float64)

    def mean_share(self, before: FloatArray, seconds: float) -> FloatArray:
        """Mean share of each tier's capacity that own transfers used over the last `seconds`; `before` is `own_bytes`
        at the start of that time."""
        return (self.own_bytes() - before) / (self._tier_bytes_per_s * seconds)

    def own_share(self) -> FloatArray:
        """Share of each tier's capacity that own transfers use now, [TIER_COUNT]."""
        carried = np.bincount(self._link_bin, self.network.link_rate_bytes_per_s, TIER_COUNT + 1)
        return carried[:TIER_COUNT] / self._tier_bytes_per_s

    def congestion(
        self, separates_own_traffic: bool, reduced_bytes_per_s: FloatArray | None = None
    ) -> tuple[float, ...]:
        """Telemetry per tier: the share that is not available, plus own transfers unless telemetry separates them.

        Args: `reduced_bytes_per_s`: mean rate of all-reduces by link. They are not the router's own transfers; without
        separation their current rate is part of the sum.
        """
        share = self.capacity.missing_per_tier()
        if not separates_own_traffic:
            share = share + self.own_share()
        elif reduced_bytes_per_s is not None:
            carried = np.bincount(self._link_bin, reduced_bytes_per_s, TIER_COUNT + 1)
            share = share + carried[:TIER_COUNT] / self._tier_bytes_per_s
        return tuple(np.minimum(share, CONGESTION_MAX).tolist())

    def utilisation(
        self, separates_own_traffic: bool, reduced_bytes_per_s: FloatArray | None = None
    ) -> tuple[float, ...]:
        """Telemetry per link, in the cluster's order: the share that is not available, plus own transfers unless
        telemetry separates them. Args: as for `congestion`."""
        share = self.capacity.missing_per_link()
        if not separates_own_traffic:
            share = share + self.network.link_rate_bytes_per_s / self.cluster.capacity_bytes_per_s
        elif reduced_bytes_per_s is not None:
            share = share + reduced_bytes_per_s / self.cluster.capacity_bytes_per_s
        return tuple(np.minimum(share, CONGESTION_MAX).tolist())

    def _apply_capacity(self) -> None:
        capacity = self.capacity.bytes_per_s
        self._dead = frozenset(np.flatnonzero(capacity == 0.0).tolist())
        self.network.set_capacities(np.arange(len(capacity), dtype=np.int64), capacity)
