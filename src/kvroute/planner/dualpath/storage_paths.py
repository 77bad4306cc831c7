"""Bandwidth that reading cached KV through prefill and decode nodes needs of each resource (DualPath 4.2).

Every load is linear in two rates: the bytes per second of cached KV that prefill nodes and decode nodes read from
storage. So the range of P/D is an intersection of intervals, and the best rate is a linear program in two variables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import linprog

Side = Literal["prefill", "decode"]
STORAGE_READ = "storage read"


@dataclass(frozen=True, slots=True)
class NodeBandwidth:
    """Bandwidths of one node, in bytes per second."""

    compute_nics: float
    """All compute NICs together, in each direction, without expert-parallel traffic."""
    storage_read: float
    storage_write: float
    dram: float
    """Reads and writes together."""
    replication: float = 1.0
    """Copies of the KV cache on the node's tensor-parallel ranks (1: sharded)."""


@dataclass(frozen=True, slots=True)
class KvRatios:
    """Bytes of KV per byte of cached KV that is read."""

    miss: float = 0.0
    """KV of appended prompt tokens, which the prefill computes."""
    generated: float = 0.0
    """KV of generated tokens."""
    persisted: bool = True
    """Whether misses and generated blocks are written back to storage."""


class ResourceLoad(NamedTuple):
    """Load of one resource, as a linear function of the two read rates."""

    resource: str
    side: Side
    per_prefill_read: float
    """Bytes on this resource per byte that the prefill nodes read."""
    per_decode_read: float
    """Bytes on this resource per byte that the decode nodes read."""
    capacity: float
    """Bytes per second of one node."""

    @property
    def name(self) -> str:
        """Side and resource."""
        return f"{self.side} {self.resource}"


def loads(
    prefill: NodeBandwidth, decode: NodeBandwidth, turn: KvRatios, *, bounce: bool = True
) -> tuple[ResourceLoad, ...]:
    """Return the load of every resource. The numbers in the comments are the labels of the publication's figure 4.

    Args:
        bounce: KV passes through the decode node's DRAM before it enters its GPUs, as in the publication.
    """
    miss, generated, copies = turn.miss, turn.generated, prefill.replication
    written = miss + generated if turn.persisted else 0.0
    generated_out = generated if turn.persisted else 0.0
    # Per byte of cached KV, whichever side reads it: DRAM to GPU of the decode node, and generated KV back.
    decode_copies = (decode.replication * (1.0 + miss) if bounce else 0.0) + generated_out
    # Computed KV arrives in the decode node's DRAM and leaves it; generated KV enters; what is written back leaves.
    decode_dram = (miss + 1.0 + miss if bounce else 0.0) + generated_out + written
    arrives = 1.0 if bounce else 0.0
    prefill_nics, decode_nics = prefill.compute_nics, decode.compute_nics
    return (
        ResourceLoad(STORAGE_READ, "prefill", 1.0, 0.0, prefill.storage_read),
        ResourceLoad(STORAGE_READ, "decode", 0.0, 1.0, decode.storage_read),
        ResourceLoad("storage write", "decode", written, written, decode.storage_write),
        ResourceLoad(
            "compute NIC read", "prefill", copies + 1.0 + miss, miss, prefill_nics
        ),  # 3 and 5; 5 of the decode path
        ResourceLoad("compute NIC write", "prefill", copies, copies, prefill_nics),  # 4; 5 of the decode path
        ResourceLoad("compute NIC read", "decode", decode_copies, copies + decode_copies, decode_nics),  # 8; 3 and 6
        ResourceLoad(
            "compute NIC write", "decode", 1.0 + miss + decode_copies, miss + decode_copies, decode_nics
        ),  # 7, 9
        ResourceLoad("DRAM", "prefill", 2.0, 0.0, prefill.dram),
        ResourceLoad("DRAM", "decode", arrives + decode_dram, 2.0 + decode_dram, decode.dram),
    )


@dataclass(frozen=True, slots=True)
class Saturation:
    """The prefill nodes per decode node with which all storage NICs can read at full rate: `low` to `high`."""

    low: float
    low_by: ResourceLoad | None
    """The load that needs at least this many prefill nodes; None: nothing does."""
    high: float
    """Infinite if nothing limits it; negative if a resource is overloaded at every ratio."""
    high_by: ResourceLoad | None

    @property
    def possible(self) -> bool:
        """Whether some ratio is in the range."""
        return self.low <= self.high * (1.0 + 1e-12)


def saturation(found: tuple[ResourceLoad, ...]) -> Saturation:
    """Return the range in which every resource can carry its load while all storage NICs read at full rate."""
    read = {load.side: load.capacity for load in found if load.resource == STORAGE_READ}
    result = Saturation(0.0, None, math.inf, None)
    for load in found:
        # slope * ratio + constant <= 0
        slope, constant = load.per_prefill_read * read["prefill"], load.per_decode_read * read["decode"]
        if load.side == "prefill":
            slope -= load.capacity
        else:
            constant -= load.capacity
        if slope > 0.0 and -constant / slope < result.high:
            result = replace(result, high=-constant / slope, high_by=load)
        elif slope < 0.0 and -constant / slope > result.low:
            result = replace(result, low=-constant / slope, low_by=load)
        elif slope == 0.0 and constant > 0.0:
            result = replace(result, high=-1.0, high_by=load)
    return result


def best_reads(
    found: tuple[ResourceLoad, ...], prefill_nodes: float, decode_nodes: float, *, prefill_only: bool = False
) -> tuple[float, float]:
    """Return the rates, in bytes per second of the whole cluster, at which prefill and decode nodes together read most.

    If several pairs have the same sum, it is the one whose storage NICs are used most evenly.
    """
    nodes = {"prefill": prefill_nodes, "decode": decode_nodes}
    per_read = np.array([[load.per_prefill_read, load.per_decode_read] for load in found])
    capacity = np.array([load.capacity * nodes[load.side] for load in found])
    decode_most = 0.0 if prefill_only else None
    unit = 2.0 ** math.floor(math.log2(capacity.max()))  # the solver needs numbers around 1
    answer = linprog([-1.0, -1.0], A_ub=per_read, b_ub=capacity / unit, bounds=[(0.0, None), (0.0, decode_most)])
    assert answer.success, answer.message
    total = float(answer.x.sum()) * unit
    if prefill_only:
        return total, 0.0
    # With this sum, each load limits the prefill nodes' part from one side.
    slope, rest = per_read[:, 0] - per_read[:, 1], capacity - per_read[:, 1] * total
    limits = rest / np.where(slope == 0.0, 1.0, slope)
    low = max([0.0, *limits[slope < 0.0]])
    high = min([total, *limits[slope > 0.0]])
    storage = {load.side: load.capacity * nodes[load.side] for load in found if load.resource == STORAGE_READ}
    even = total * storage["prefill"] / (storage["prefill"] + storage["decode"])
    prefill_part = float(min(max(even, low), high))
    return prefill_part, total - prefill_part
