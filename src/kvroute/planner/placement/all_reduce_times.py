"""Times of all-reduces and of sends between pipeline stages on an idle network, as straight lines in the bytes.

Groups of the same form (equal servers, NICs and uplinks) have the same times, so each form is priced once. Which of
the equal uplinks of a rack two NICs share is taken from the first group of a form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvroute.collectives import (
    Aggregation,
    AllReduce,
    Collective,
    CollectiveFlow,
    all_reduce,
    seconds,
)
from kvroute.topology import Cluster
from kvroute.topology.gpu_paths import Gpu, GpuPaths
from kvroute.topology.place import Shards, card_of
from kvroute.types import SAME_NODE
from kvroute_engine.agent.schemes import SCHEMES, Scheme

_BYTES = 1e6
"""Size at which slopes are measured; times are exactly linear, because the rates of flows do not depend on their
sizes."""
Form: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Affine:
    """A time of `latency_s + s_per_byte * bytes`."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the time of `nbytes`."""
        return self.latency_s + self.s_per_byte * nbytes


NO_TIME = Affine()
"""Time of an all-reduce in a group of one GPU."""


class AllReduceTimes:
    """Times of groups of one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        aggregation: Aggregation | None,
        element_bytes: float,
        allowed: Sequence[Scheme] = SCHEMES,
    ) -> None:
        """`allowed`: schemes that groups may use; one of them is a ring."""
        self._cluster, self._aggregation, self._allowed = cluster, aggregation, tuple(allowed)
        self._element_bytes = max(round(element_bytes), 1)
        self._schemes: dict[Form, dict[Scheme, Affine]] = {}
        self._sends: dict[Form, Affine] = {}

    def of(self, group: Shards) -> dict[Scheme, Affine]:
        """Return the time of one all-reduce by each scheme that the group can use; a single GPU needs none."""
        if len(group) == 1:
            return {}
        form = self.form(group)
        if form not in self._schemes:
            tensor = AllReduce(group, _BYTES, self._element_bytes)
            found = {scheme: all_reduce(scheme, tensor, self._cluster, self._aggregation) for scheme in self._allowed}
            self._schemes[form] = {
                scheme: self._line(collective) for scheme, collective in found.items() if collective is not None
            }
        return self._schemes[form]

    def best(self, group: Shards, nbytes: float) -> tuple[Scheme | None, Affine]:
        """Return the fastest scheme at this size and its time; the first one of `SCHEMES` if several are equal."""
        found = self.of(group)
        if not found:
            return None, NO_TIME
        scheme = min(found, key=lambda scheme: found[scheme].seconds(nbytes))
        return scheme, found[scheme]

    def send(self, stage: Shards, following: Shards) -> Affine:
        """Return the time in which a stage sends activations on: every rank its share to the same rank of the next
        stage."""
        form = (self.form(stage), self.form(following), self.form((*stage, *following)))
        if form not in self._sends:
            paths = GpuPaths(self._cluster, (*stage, *following))
            ends = list(zip(stage, following, strict=True))
            flows = tuple(CollectiveFlow(paths.between(*pair), _BYTES / len(stage)) for pair in ends)
            latency_s = max(paths.latency_s(*pair) for pair in ends)
            self._sends[form] = self._line(Collective("ring", flows, latency_s))
        return self._sends[form]

    def _line(self, collective: Collective) -> Affine:
        total_s = seconds(collective, self._cluster.capacity_bytes_per_s)
        return Affine(collective.latency_s, (total_s - collective.latency_s) / _BYTES)

    def form(self, group: Shards) -> Form:
        """Return what the times of a group depend on: the NICs of its members by server, the servers by rack, the racks
        by pod, with their bandwidths."""
        places = self._cluster.places
        cards: dict[int, list[int]] = {}
        crosses = any(places.level(group[0][0], node) > SAME_NODE for node, _ in group)
        for position, (node, _) in enumerate(group):
            cards.setdefault(node, []).append(card_of(places, group, position) if crosses else 0)
        level = max(places.level(group[0][0], node) for node in cards)
        racks: dict[int, list[Form]] = {}
        for node, used in cards.items():
            racks.setdefault(places.domains[node][1], []).append(self._server_form(node, used, level))
        pods: dict[int, list[Form]] = {}
        for rack, servers in racks.items():
            node = next(node for node in cards if places.domains[node][1] == rack)
            entry = places.racks[node]
            uplinks = (entry.uplinks.count, float(entry.uplinks.bytes_per_s)) if entry and entry.uplinks else ()
            pods.setdefault(places.domains[node][2], []).append((uplinks, tuple(sorted(servers))))
        return tuple(sorted(tuple(sorted(found)) for found in pods.values()))

    def _server_form(self, node: int, cards: Sequence[int], level: int) -> Form:
        entry = self._cluster.places.nodes[node]
        nic = entry.nics.compute
        described = (nic.kv_bytes_per_s, nic.count, nic.scope) if nic and level > SAME_NODE else ()
        return (float(entry.nvlink_bytes_per_s), described, tuple(sorted(cards)))


def gpus_of(stages: Sequence[Shards]) -> tuple[Gpu, ...]:
    """Return the GPUs of an instance, stage by stage."""
    return tuple(gpu for stage in stages for gpu in stage)
