"""Compiled kernels: the links of a path, and the rate limit that hashing onto parallel cables sets for it.

The functions take only arrays and numbers; `kvroute.policies.foresight.policy` explains their meaning.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvroute.compiled import compiled_in_place
from kvroute.types import CROSS_DATACENTER, SAME_DATACENTER, SAME_NODE, SAME_POD, SAME_RACK, FloatArray, IntArray

HOPS_MAX = 8
"""Maximum number of links of a path, including the private link that holds the ceiling."""
NIC_UP, NIC_DOWN, RACK_UP, RACK_DOWN, POD_UP, POD_DOWN, SITE = range(7)
"""Same values as in `foresight_links`, defined again because numba reads a kernel's globals only at compile time."""
TAIL = 1e-9
"""Tail probability at which the number of rivals on a cable is cut off; also the tolerance for rounding."""


class AggregatedLinks(NamedTuple):
    """The aggregated links and their load: `LinkModel` after congestion, and the table of transfers."""

    attached: IntArray
    wan: IntArray
    cable: FloatArray
    """Bandwidth of one cable that other traffic leaves free, bytes per second, [m]."""
    cables: IntArray
    flows_per_link: IntArray
    """Own transfers on each link, [m]."""
    hashed: int
    rivals: float
    """Weighted number of flows of another transfer."""
    siblings: float
    """Weighted number of other flows of the same transfer."""
    mean: float
    """Mean model rate of a hashed path."""
    factor: FloatArray
    """Measured over nominal capacity, by tier."""
    tier_bytes_per_s: FloatArray
    """Bandwidth of a tier that other traffic leaves free."""


@compiled_in_place
def path_of(source: int, target: int, tier: int, attached: IntArray, wan: IntArray, path: IntArray) -> int:
    """Fill `path` with the links from `source` to `target` and return their number; 0 inside a node."""
    count = 0
    if tier > SAME_NODE:
        path[0], path[1] = attached[source, NIC_UP], attached[target, NIC_DOWN]
        count = 2
    if tier >= SAME_POD:
        path[count], path[count + 1] = attached[source, RACK_UP], attached[target, RACK_DOWN]
        count += 2
    if tier >= SAME_DATACENTER:
        path[count], path[count + 1] = attached[source, POD_UP], attached[target, POD_DOWN]
        count += 2
    if tier >= CROSS_DATACENTER:
        path[count] = wan[attached[source, SITE], attached[target, SITE]]
        count += 1
    kept = 0
    for k in range(count):
        if path[k] >= 0:
            path[kept] = path[k]
            kept += 1
    return kept


@compiled_in_place
def collided(cable_bytes_per_s: float, rivals: float, hashed_paths: int, mean_bytes_per_s: float) -> float:
    """Rate of a transfer of `hashed_paths` equal parts if each part draws a cable at random, bytes per second.

    The number of other flows on a cable is Poisson distributed with mean `rivals`. Each part gets a fair share or, if
    that is more, what the rivals do not use. The part on the fullest cable sets the pace: h / E[1 / share(max of h
    draws)].
    """
    if rivals <= 0.0:
        uncontended: float = hashed_paths * cable_bytes_per_s
        return uncontended
    x = 0
    if rivals > 30.0:
        x = max(int(rivals - 7.0 * math.sqrt(rivals)), 0)
    mass = math.exp(x * math.log(rivals) - rivals - math.lgamma(x + 1.0))
    below, before, seconds = 0.0, 0.0, 0.0
    while True:
        share = max(cable_bytes_per_s / (1.0 + x), cable_bytes_per_s - x * mean_bytes_per_s)
        below += mass
        if below >= 1.0 - TAIL or x > rivals + 12.0 * math.sqrt(rivals) + 12.0:
            in_parts: float = hashed_paths / (seconds + (1.0 - before) / share)
            return in_parts
        reached = below**hashed_paths
        seconds += (reached - before) / share
        before = reached
        x += 1
        mass *= rivals / x


@compiled_in_place
def _drawn(up: int, down: int, otherwise: float, fabric: AggregatedLinks) -> float:
    """Capacity of the hashed paths over one group up and one down; `otherwise` if both are unknown.

    Other flows of the same transfer may draw the same cable; they are assumed to use all that they can get.
    """
    width, rivals, siblings = np.inf, 0.0, 0.0
    for link in (up, down):
        if link >= 0:
            width = min(width, fabric.cable[link])
            if fabric.cables[link] > 1:
                rivals += fabric.rivals * fabric.flows_per_link[link] / fabric.cables[link]
                siblings += fabric.siblings / fabric.cables[link]
    if width == np.inf:
        return otherwise
    both = rivals + siblings
    mean = (rivals * fabric.mean + siblings * width) / both if both > 0.0 else 0.0
    return collided(width, both, fabric.hashed, mean)


@compiled_in_place
def path_ceiling(source: int, target: int, tier: int, fabric: AggregatedLinks) -> float:
    far, attached = fabric.tier_bytes_per_s[tier], fabric.attached
    if tier <= SAME_NODE:
        inside: float = far
        return inside
    if tier == SAME_RACK:
        return np.inf
    ceiling = _drawn(attached[source, RACK_UP], attached[target, RACK_DOWN], far, fabric)
    if tier >= SAME_DATACENTER:
        ceiling = min(ceiling, _drawn(attached[source, POD_UP], attached[target, POD_DOWN], far, fabric))
    if tier >= CROSS_DATACENTER:
        ceiling = min(ceiling, _drawn(fabric.wan[attached[source, SITE], attached[target, SITE]], -1, far, fabric))
    learned: float = fabric.factor[tier] * ceiling
    return learned


@compiled_in_place
def ceiling_of(
    source: int,
    target: int,
    tier: int,
    attached: IntArray,
    wan: IntArray,
    cable: FloatArray,
    cables: IntArray,
    flows_per_link: IntArray,
    hashed: int,
    rivals: float,
    siblings: float,
    mean: float,
    factor: FloatArray,
    tier_bytes_per_s: FloatArray,
) -> float:
    """Rate limit of the hashed paths of a tier for one more transfer, with the learned factor; inf in a rack, where
    only the NICs limit.

    The arguments after `tier` are those of `AggregatedLinks`.
    """
    fabric = AggregatedLinks(
        attached, wan, cable, cables, flows_per_link, hashed, rivals, siblings, mean, factor, tier_bytes_per_s
    )
    return path_ceiling(source, target, tier, fabric)
