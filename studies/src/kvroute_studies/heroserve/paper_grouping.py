"""Grouping as published (HeroServe algorithm 2): k-means-constrained on the latencies between all GPUs, then swaps.

Its swaps stop at the first one that does not help a group, and ignore what the other group loses.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np

from kvroute.planner.placement.swaps import Price
from kvroute.topology import Cluster
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.place import Shards
from kvroute.types import SAME_NODE, FloatArray, InputError

GPUS_MAX = 2_000
"""GPUs above which clustering takes minutes."""
_SEED = 15
_TIMEOUT_S = 600.0
_NOT_INSTALLED = 3


def published_groups(cluster: Cluster, gpus: Sequence[Gpu], size: int, price: Price) -> list[Shards]:
    """Return the groups of `kvroute plan placement --grouping paper`; the time of an all-reduce is the reciprocal of
    its group's price."""
    found, _ = perturbed(kmeans_groups(cluster, gpus, size), lambda group: 1.0 / price(group))
    return found


def kmeans_groups(cluster: Cluster, gpus: Sequence[Gpu], size: int) -> list[Shards]:
    """Return len(gpus) // size clusters, each reduced to its first `size` GPUs.

    Raises:
        InputError: too many GPUs, or k-means-constrained is not installed.
    """
    if len(gpus) > GPUS_MAX:
        what = f"{len(gpus):,} GPUs are too many for k-means-constrained"
        raise InputError(what, where="--grouping", hint=f"use milp or greedy above {GPUS_MAX:,} GPUs")
    if len(gpus) < size:
        return []
    given = io.BytesIO()
    np.savez(given, distances=latencies(cluster, gpus), size=size)
    command = [sys.executable, "-m", "kvroute_studies.heroserve.kmeans"]
    ended = subprocess.run(command, input=given.getvalue(), capture_output=True, timeout=_TIMEOUT_S, check=False)
    if ended.returncode == _NOT_INSTALLED:
        hint = "install it with `pip install 'kvroute-studies[paper]'`"
        raise InputError("grouping as published needs k-means-constrained", where="--grouping", hint=hint)
    if ended.returncode:
        raise InputError(f"k-means-constrained failed: {ended.stderr.decode()[-300:]}", where="--grouping")
    labels = np.load(io.BytesIO(ended.stdout))
    found = [tuple(gpus[place] for place in np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)]
    return [group[:size] for group in found]


def latencies(cluster: Cluster, gpus: Sequence[Gpu]) -> FloatArray:
    """Return the time of one byte between all GPUs, hop by hop as published, [n, n]: every hop of a path costs
    1 / bandwidth."""
    places, links = cluster.places, cluster.capacity_bytes_per_s
    nodes = np.array([node for node, _ in gpus])
    codes = places.code[:, nodes]
    nvlink = np.array([links[cluster.cables.nvlink[node][gpu][0]] for node, gpu in gpus])
    climb = np.zeros((4, len(gpus)))
    for place, (node, _) in enumerate(gpus):
        rack, pod, cards = places.racks[node], places.pods[node], cluster.cables.nic[node]
        climb[1, place] = 1.0 / links[cards[0][0]] if cards else np.inf
        for tier, domain, bundles in ((2, rack, cluster.cables.rack), (3, pod, cluster.cables.pod)):
            step = 1.0 / links[bundles[domain.name][0][0]] if domain is not None and domain.name in bundles else 0.0
            climb[tier, place] = climb[tier - 1, place] + step
    found = np.full((len(gpus), len(gpus)), np.inf)
    for tier in (3, 2, 1, SAME_NODE):
        same = codes[tier][:, None] == codes[tier][None, :]
        cost = (
            1.0 / np.minimum(nvlink[:, None], nvlink[None, :])
            if tier == SAME_NODE
            else (climb[tier][:, None] + climb[tier][None, :])
        )
        found = np.where(same, cost, found)
    finite = found[np.isfinite(found)].max(initial=0.0)
    found = np.where(np.isfinite(found), found, 10.0 * finite)
    np.fill_diagonal(found, 0.0)
    return found


def perturbed(groups: Sequence[Shards], seconds: Callable[[Shards], float]) -> tuple[list[Shards], int]:
    """Return the groups after the swaps of algorithm 2, lines 12 to 22, and the number of swaps tried.

    Args:
        groups: groups of the same size.
        seconds: time of an all-reduce of a group.
    """
    found, times, tried = list(groups), [seconds(group) for group in groups], 0
    draw = np.random.default_rng(_SEED)
    for number in range(len(found)):
        improvement = len(found) > 1
        while improvement:
            improvement, tried = False, tried + 1
            other = int(draw.integers(len(found)))
            if other == number:
                continue
            here, there = list(found[number]), list(found[other])
            a, b = int(draw.integers(len(here))), int(draw.integers(len(there)))
            here[a], there[b] = there[b], here[a]
            time_s = seconds(tuple(here))
            if time_s < times[number]:
                times[number], improvement = time_s, True
                found[number], found[other] = tuple(here), tuple(there)
    return [tuple(sorted(group)) for group in found], tried
