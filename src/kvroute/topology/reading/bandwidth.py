"""Bandwidth per tier for the oracle: declared in the file, or the best rate of a single transfer, derived from the
links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np

from kvroute.topology.place import Places, Route, Shards, card_of, places_of
from kvroute.topology.reading.templates import with_domains
from kvroute.topology.schema import ClusterFile, Ecmp, Uplinks
from kvroute.types import SAME_NODE, TIER_COUNT, FloatArray, Place


def tier_bytes_per_s(
    file: ClusterFile, places: Places, routes: dict[tuple[str, str], Route], shards: Sequence[Shards]
) -> FloatArray:
    """Return the bytes per second of a single transfer on its path, all its flows together, [TIER_COUNT].

    A transfer's flows carry equal parts and it ends with its slowest flow, so a stage gives it (flows) times (the rate
    of the slowest flow). At a group of `count` equal links the best draw counts: one link for all flows if a transfer
    draws once, else flows / count on each, rounded up. A path gives the rate of its narrowest stage. The result is the
    least value over all instances with a peer in the tier, each paired with an equal peer. Declared values take
    precedence; a tier without pairs takes the value of the next nearer tier that has one, else of the next farther.
    Without instances, the first GPU of each node counts as one. If engines are discovered, a tier without pairs takes
    the value of an engine in a domain made from the templates.
    """
    shards = shards or [((node, 0),) for node in range(len(places.nodes))]
    derived: list[float | None] = [None] * TIER_COUNT
    occurs = _occurring(places, [gpus[0][0] for gpus in shards])
    for instance, gpus in enumerate(shards):
        ceilings = _ceilings(file, places, gpus)
        ceilings.append(min(ceilings[-1], _wan_ceiling(file, routes, places.datacenters[gpus[0][0]], len(gpus))))
        for tier in np.flatnonzero(occurs[:, instance]) if len(shards) > 1 else [SAME_NODE]:
            known = derived[tier]
            derived[tier] = ceilings[tier] if known is None else min(known, ceilings[tier])
    if file.discovery is not None:
        derived = [
            expected if found is None else found for found, expected in zip(derived, _templates(file), strict=True)
        ]
    says = file.network.tier_bandwidth
    declared = (
        says.node_bytes_per_s,
        says.rack_bytes_per_s,
        says.pod_bytes_per_s,
        says.datacenter_bytes_per_s,
        says.wan_bytes_per_s,
    )
    return _filled(
        [float(stated) if stated is not None else found for stated, found in zip(declared, derived, strict=True)]
    )


def _templates(file: ClusterFile) -> list[float | None]:
    """Return the limits in tiers 0 to 4 of an engine whose node, rack and pod are made from the templates; None where
    it has no link."""
    template = with_domains(
        msgspec.structs.replace(file, datacenters=[], pods=[], racks=[], nodes=[]), [Place(node="n", rack="r", pod="p")]
    )
    size = file.defaults.tp * file.defaults.pp
    ceilings = _ceilings(
        file, places_of(template), tuple((0, gpu) for gpu in range(min(size, max(template.nodes[0].gpus, 1))))
    )
    return [*(ceiling or None for ceiling in ceilings), None]


def _occurring(places: Places, first_nodes: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return True where the instance has a peer in that tier, [TIER_COUNT, n]."""
    codes = places.code[:, np.array(first_nodes, dtype=np.int64)]
    sizes = [np.ones(len(first_nodes), dtype=np.int64)]
    for code in codes:
        _, inverse, count = np.unique(code, return_inverse=True, return_counts=True)
        sizes.append(count[inverse])
    sizes.append(np.full(len(first_nodes), len(first_nodes)))
    return np.array([wide > narrow for narrow, wide in pairwise(sizes)])


def _flows(file: ClusterFile, gpus: int) -> int:
    flows = file.network.flows_per_transfer
    return flows if isinstance(flows, int) else gpus


def _ceilings(file: ClusterFile, places: Places, gpus: Shards) -> list[float]:
    """Return the limits of one side in tiers 0 to 3; 0 where it has no link."""
    nodes = [places.nodes[node] for node, _ in gpus]
    node = gpus[0][0]
    rack, pod = places.racks[node], places.pods[node]
    flows = _flows(file, len(gpus))
    cards = tuple(_card(places, gpus, position) for position in range(len(gpus)))
    slowest = min(float(entry.nvlink_bytes_per_s) for entry in nodes)
    inside = flows * slowest / -(-flows // len(gpus))
    nic = _slowest_card(cards, flows)
    rack_stage = _group_ceiling(rack.uplinks if rack else None, flows, file.network.ecmp) if rack else nic
    pod_stage = _group_ceiling(pod.uplinks if pod else None, flows, file.network.ecmp) if pod else nic
    return [inside, nic, min(nic, rack_stage), min(nic, rack_stage, pod_stage)]


def _card(places: Places, gpus: Shards, position: int) -> tuple[int, int, float]:
    """Return node, card and bytes per second of one shard's card; rate 0 without compute NIC."""
    node = gpus[position][0]
    nic = places.nodes[node].nics.compute
    if nic is None:
        return node, 0, 0.0
    joined = nic.count if nic.scope == "server" else 1
    return node, card_of(places, gpus, position), nic.kv_bytes_per_s * joined


@lru_cache(maxsize=4096)
def _slowest_card(cards: tuple[tuple[int, int, float], ...], flows: int) -> float:
    """Return the rate that the cards allow. Flow i takes card i modulo the shards; a card's flows share it equally."""
    load = Counter(cards[flow % len(cards)] for flow in range(flows))
    return min(flows * card[2] / count for card, count in load.items())


def _group_ceiling(uplinks: Uplinks | None, flows: int, ecmp: Ecmp) -> float:
    if uplinks is None:
        return 0.0
    return _draw_ceiling(float(uplinks.bytes_per_s), uplinks.count, flows, ecmp)


def _draw_ceiling(bytes_per_s: float, count: int, flows: int, ecmp: Ecmp) -> float:
    return bytes_per_s if ecmp == "transfer" else flows * bytes_per_s / -(-flows // count)


def _wan_ceiling(file: ClusterFile, routes: dict[tuple[str, str], Route], site: str, gpus: int) -> float:
    """Return the limit of the narrowest link on the routes from `site` to all other datacenters."""
    flows = _flows(file, gpus)
    entries = {entry for (start, _), route in routes.items() if start == site for entry, _ in route}
    stages = [
        _draw_ceiling(float(w.bytes_per_s), w.count, flows, file.network.ecmp) for w in (file.wan[e] for e in entries)
    ]
    return min(stages, default=0.0)


def _filled(values: Sequence[float | None]) -> FloatArray:
    """Replace zero and None by the nearest nearer tier's value, else the nearest farther one's."""
    known = {tier: value for tier, value in enumerate(values) if value}
    assert known, "two instances have at least one tier between them"
    result = []
    for tier in range(TIER_COUNT):
        nearer = [k for k in known if k <= tier]
        result.append(known[max(nearer) if nearer else min(known)])
    return np.array(result, dtype=np.float64)
