"""The cluster's links in real time: how many bytes of each KV transfer may have been sent by now.

Rates are max-min fair among the transfers of this process only. The fabric sends no bytes itself; a `Carrier` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np

from kvroute.emulator.clock import EARLY_S, Alarm, Clock
from kvroute.flows import FlowNetwork
from kvroute.topology import Cluster
from kvroute.topology.ecmp import EcmpPaths
from kvroute.types import TIER_COUNT, InputError

SLICE_S = 4e-3
"""Interval at which bytes are passed to the carrier, in seconds. The last ones are passed when the transfer ends."""

UNTRACED = 1 << 40
"""First number given to requests that have no trace number."""


class Carrier(Protocol):
    """Sends the bytes of one transfer."""

    def carry(self, wire_bytes: int, last: bool) -> None:
        """Send `wire_bytes` more bytes now. `last`: they complete the transfer."""
        ...


@dataclass(slots=True, eq=False)
class EmulatedTransfer:
    """One KV cache in transfer, split into `flows` of equal size."""

    carrier: Carrier
    flow_bytes: float
    latency_s: float
    wire_bytes: int
    produced_bytes_per_s: float = math.inf
    """Rate at which the KV is computed; it limits the transfer rate."""
    flows: set[int] = field(default_factory=set)
    """Flows that have not ended."""
    ended_flows: int = 0
    carried_bytes: int = 0
    arrival: Alarm | None = None


class EmulatedFabric:
    """Transfers in flight over shared links, in this process.

    Real bytes are modelled bytes times `kv_scale`. Rates are scaled in the same way, so durations are not scaled.
    Background traffic takes a constant share of every link of a tier.
    """

    def __init__(
        self, cluster: Cluster, clock: Clock, *, kv_scale: float, background: Sequence[float] = (), seed: int = 0
    ) -> None:
        self._cluster, self._clock, self._kv_scale = cluster, clock, kv_scale
        self._paths = EcmpPaths(cluster, seed)
        self._untraced = count(UNTRACED)
        left = np.ones(len(cluster.links))
        for tier, share in enumerate(background or (0.0,) * TIER_COUNT):
            left[list(cluster.links_of_tier(tier))] = 1.0 - share
        self._capacity = cluster.capacity_bytes_per_s * left
        self._wan = {
            f"{wan.source}/{wan.target}": [*forward, *backward]
            for wan, (forward, backward) in zip(cluster.file.wan, cluster.cables.wan, strict=True)
        }
        self._network = FlowNetwork(self._capacity)
        self._warm_up()
        self._owner: dict[int, EmulatedTransfer] = {}
        self._transfers: dict[EmulatedTransfer, None] = {}
        self._next_flow = 1
        self._alarm: Alarm | None = None

    def _warm_up(self) -> None:
        """Run the solver once. It is compiled on first use, which would delay the first transfer."""
        self._network.start(0, [0] if self._cluster.links else [], 1.0)
        self._network.set_ceiling(0, math.inf)
        self._network.sent_bytes(0)
        self._network.next_finish()
        self._network.cancel(0)

    @property
    def in_flight(self) -> int:
        """Number of transfers that have not ended."""
        return len(self._transfers)

    @property
    def wan(self) -> tuple[str, ...]:
        """Paths between datacenters, as `from/to` in the cluster file."""
        return tuple(self._wan)

    def degrade(self, wan_path: str, share: float) -> None:
        """Set the capacity of a WAN path, in both directions, to this share of the file's value. 0 stops its transfers.

        Raises:
            InputError: the path does not exist, or the share is not within [0, 1].
        """
        links = self._wan.get(wan_path)
        if links is None:
            known = f"known: {', '.join(self._wan)}" if self._wan else "the cluster file has no `wan`"
            raise InputError(f"there is no WAN path {wan_path!r}", hint=known)
        if not 0.0 <= share <= 1.0:
            raise InputError(f"{share} is not a valid share", hint="give 0 (cut) to 1 (capacity of the file)")
        self._advance()
        self._network.set_capacities(links, self._capacity[links] * share)
        self._set_alarm()

    def send(
        self,
        source: int,
        target: int,
        kv_bytes: float,
        carrier: Carrier,
        request: int | None = None,
        *,
        produced_bytes_per_s: float = math.inf,
    ) -> EmulatedTransfer:
        """Start a transfer of `kv_bytes` modelled bytes between two instances of the cluster (indices) now.

        Args:
            request: number of the request in its trace, if known. It then takes the path that the simulator draws.
            produced_bytes_per_s: upper limit of the rate until `release`, because the KV cache is still being computed.

        Raises:
            InputError: no path connects the two instances.
        """
        paths = self._paths.of(next(self._untraced) if request is None else request, source, target)
        flows = len(paths)
        wire_bytes = round(kv_bytes * self._kv_scale)
        latency_s = self._cluster.latency_s(source, target)
        transfer = EmulatedTransfer(carrier, kv_bytes / flows, latency_s, wire_bytes, produced_bytes_per_s)
        numbers = range(self._next_flow, self._next_flow + flows)
        self._next_flow += flows
        self._advance()
        transfer.flows.update(numbers)
        self._owner |= dict.fromkeys(numbers, transfer)
        self._transfers[transfer] = None
        ceiling = produced_bytes_per_s / flows
        self._network.start_many(numbers, paths, [transfer.flow_bytes] * flows, ceiling_bytes_per_s=ceiling)
        self._set_alarm()
        return transfer

    def release(self, transfer: EmulatedTransfer) -> None:
        """Remove the rate limit of a transfer, because its KV cache is complete."""
        transfer.produced_bytes_per_s = math.inf
        self._advance()
        for flow in transfer.flows:
            self._network.set_ceiling(flow, math.inf)
        self._set_alarm()

    def sync(self) -> float:
        """Move bytes up to now and return the time. Transfers read afterwards show their state at this one moment."""
        self._advance()
        self._set_alarm()
        return self._network.now

    def progress(self, transfer: EmulatedTransfer) -> tuple[float, float]:
        """Return the modelled bytes sent by the last `sync`, and the current rate in bytes per second."""
        rate = sum(map(self._network.rate, transfer.flows))
        return self._sent_bytes(transfer), rate

    def _sent_bytes(self, transfer: EmulatedTransfer) -> float:
        return transfer.ended_flows * transfer.flow_bytes + sum(map(self._network.sent_bytes, transfer.flows))

    def cancel(self, transfer: EmulatedTransfer) -> None:
        """Cancel the rest of a transfer. No effect if it has ended."""
        if transfer.arrival is not None:
            transfer.arrival.cancel()
        if transfer in self._transfers:
            self._advance()
        if transfer in self._transfers:
            for flow in transfer.flows:
                self._network.cancel(flow)
                del self._owner[flow]
            del self._transfers[transfer]
            self._set_alarm()

    def _advance(self, to: float = 0.0) -> None:
        """Move bytes up to now, or to `to` if later. Transfers whose last flow has ended arrive after the latency."""
        for flow in self._network.advance(max(self._clock.now(), self._network.now, to)):
            transfer = self._owner.pop(flow)
            transfer.flows.discard(flow)
            transfer.ended_flows += 1
            if not transfer.flows:
                del self._transfers[transfer]
                ring = partial(_arrive, transfer)
                transfer.arrival = self._clock.at(self._network.now + transfer.latency_s, ring)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._transfers:
            finish = self._network.next_finish()
            slice_s = self._network.now + SLICE_S
            self._alarm = self._clock.at(min(slice_s, finish[0]) if finish else slice_s, self._wake)

    def _wake(self) -> None:
        self._alarm = None
        finish = self._network.next_finish()
        early = finish is not None and finish[0] - self._clock.now() < EARLY_S
        self._advance(finish[0] if finish is not None and early else 0.0)
        for transfer in self._transfers:
            self._carry(transfer)
        self._set_alarm()

    def _carry(self, transfer: EmulatedTransfer) -> None:
        due = min(int(self._sent_bytes(transfer) * self._kv_scale), transfer.wire_bytes)
        if due > transfer.carried_bytes:
            more, transfer.carried_bytes = due - transfer.carried_bytes, due
            transfer.carrier.carry(more, False)

    def close(self) -> None:
        """Cancel the alarm of this fabric."""
        if self._alarm is not None:
            self._alarm.cancel()


def _arrive(transfer: EmulatedTransfer) -> None:
    more, transfer.carried_bytes = transfer.wire_bytes - transfer.carried_bytes, transfer.wire_bytes
    transfer.carrier.carry(more, True)
