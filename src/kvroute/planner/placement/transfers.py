"""KV transfers between prefill and decode instances, and the bytes that a request puts on every link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.collectives import AllReduce, Collective, CollectiveFlow, all_reduce, link_bytes, seconds
from kvroute.planner.placement.all_reduce_times import Affine
from kvroute.planner.placement.instances import PlacedInstance
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.topology import Cluster
from kvroute.topology.gpu_paths import Gpu, GpuPaths
from kvroute.topology.place import Shards, card_of
from kvroute.types import SAME_NODE, SAME_POD, SAME_RACK, FloatArray, IntArray

_BYTES = 1e9
_PAIRS = 24
"""Pairs of instances whose transfers are priced; all pairs of larger placements are represented by these."""


@dataclass(frozen=True, slots=True)
class IdleTransfer:
    """One KV transfer on an idle network, by max-min fair flows."""

    line: Affine
    links: tuple[int, ...]


def transfer(cluster: Cluster, source: PlacedInstance, target: PlacedInstance) -> IdleTransfer:
    """Return a transfer between two instances: as many flows as the side with more GPUs has, each for an equal part."""
    here, there = source.gpus, target.gpus
    paths = GpuPaths(cluster, (*here, *there))
    count = max(len(here), len(there))
    ends = [(here[flow * len(here) // count], there[flow * len(there) // count]) for flow in range(count)]
    flows = tuple(CollectiveFlow(paths.between(*pair), _BYTES / count) for pair in ends)
    latency_s = max(paths.latency_s(*pair) for pair in ends)
    total_s = seconds(Collective("ring", flows, latency_s), cluster.capacity_bytes_per_s)
    links = tuple(sorted({link for flow in flows for link in flow.links}))
    return IdleTransfer(Affine(latency_s, (total_s - latency_s) / _BYTES), links)


def sample_transfers(
    cluster: Cluster, prefill: Sequence[PlacedInstance], decode: Sequence[PlacedInstance]
) -> list[IdleTransfer]:
    """Return transfers of all pairs, or of a fixed sample that visits all instances in turn."""
    pairs = len(prefill) * len(decode)
    step = max(pairs // _PAIRS, 1)
    numbers = range(0, pairs, step) if step == 1 else [(7 * number * step + number) % pairs for number in range(_PAIRS)]
    return [transfer(cluster, prefill[pair // len(decode)], decode[pair % len(decode)]) for pair in numbers]


def kv_load(
    problem: PlacementProblem,
    prefill: Sequence[PlacedInstance],
    decode: Sequence[PlacedInstance],
    shares: tuple[FloatArray, FloatArray],
) -> FloatArray:
    """Return the KV bytes of one request on every link, if all pairs of instances are chosen independently.

    Args:
        problem: cluster and mean request.
        prefill, decode: the instances.
        shares: share of the requests of each prefill and of each decode instance, [prefill] and [decode].
    """
    cluster, nbytes = problem.cluster, _kv_bytes(problem)
    found = np.zeros(len(cluster.links))
    ends = [_ends(side, share) for side, share in zip((prefill, decode), shares, strict=True)]
    for direction, (own, other) in enumerate(((ends[0], ends[1]), (ends[1], ends[0]))):
        _climb(cluster, own, [_domain_shares(cluster, other, tier) for tier in range(3)], direction, found)
    return found * nbytes


def _kv_bytes(problem: PlacementProblem) -> float:
    mix = problem.lengths.mix
    return float(problem.model.kv_bytes(np.rint(mix.tokens).astype(np.int64)) @ mix.share)


def _ends(instances: Sequence[PlacedInstance], shares: FloatArray) -> list[tuple[Gpu, Shards, float]]:
    """Return every GPU with those of its instance and the share of all KV bytes that it sends or receives."""
    return [
        (gpu, gpus, share / len(gpus))
        for gpus, share in zip([instance.gpus for instance in instances], shares.tolist(), strict=True)
        for gpu in gpus
    ]


def _domain_shares(cluster: Cluster, ends: Sequence[tuple[Gpu, Shards, float]], tier: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for gpu, _, share in ends:
        domain = cluster.places.domains[gpu[0]][tier]
        found[domain] = found.get(domain, 0.0) + share
    return found


def _climb(
    cluster: Cluster,
    own: Sequence[tuple[Gpu, Shards, float]],
    there: Sequence[dict[int, float]],
    direction: int,
    found: FloatArray,
) -> None:
    """Add the shares of one side to NVLinks, NICs and the uplinks above: on each level the share whose other end is not
    below."""
    places, cables = cluster.places, cluster.cables
    above: dict[tuple[int, str], float] = {}
    for gpu, gpus, share in own:
        node = gpu[0]
        outside = [1.0 - there[tier].get(places.domains[node][tier], 0.0) for tier in range(3)]
        found[cables.nvlink[node][gpu[1]][direction]] += share * (1.0 - outside[SAME_NODE])
        if outside[SAME_NODE] <= 1e-12 or not cables.nic[node]:
            continue
        card = card_of(places, gpus, gpus.index(gpu))
        found[cables.nic[node][card][direction]] += share * outside[SAME_NODE]
        for tier, domain in ((SAME_RACK, places.racks[node]), (SAME_POD, places.pods[node])):
            if domain is not None:
                above[tier, domain.name] = above.get((tier, domain.name), 0.0) + share * outside[tier]
    for (tier, name), share in above.items():
        bundles = cables.rack if tier == SAME_RACK else cables.pod
        if name in bundles:
            links = list(bundles[name][direction])
            found[links] += share / len(links)


def all_reduce_load(
    problem: PlacementProblem, instances: Sequence[PlacedInstance], shares: FloatArray
) -> tuple[FloatArray, list[IntArray]]:
    """Return the bytes of all-reduces of one request on every link, [link], and the links of each instance's groups.

    Sends between pipeline stages are not counted: they are 1 / (2 * layers) of the all-reduces.
    """
    found, used = np.zeros(len(problem.cluster.links)), list[IntArray]()
    for instance, share in zip(instances, shares.tolist(), strict=True):
        prefilling = instance.phase == "prefill"
        tokens = problem.lengths.mix.mean_tokens if prefilling else float(problem.output_tokens)
        roofline, links = instance.roofline, set[int]()
        stage_bytes = share * tokens * roofline.hidden_bytes * roofline.all_reduces / len(instance.stages)
        for stage, scheme in zip(instance.stages, instance.schemes, strict=True):
            if scheme is None:
                continue
            tensor = AllReduce(stage, 1.0, max(round(problem.element_bytes), 1))
            collective = all_reduce(scheme, tensor, problem.cluster, problem.aggregation)
            assert collective is not None, "the scheme was chosen among those that the group can use"
            for link, nbytes in link_bytes(collective).items():
                found[link] += nbytes * stage_bytes
                links.add(link)
        used.append(np.array(sorted(links), dtype=np.int64))
    return found, used
