"""Compiled kernels on the table of transfers in flight: move all of them to a time, and start one.

The rates come from `flows.solver`; there is no second solver.
"""

from __future__ import annotations

import math

import numpy as np

from kvroute.compiled import compiled
from kvroute.flows import state as flows
from kvroute.flows.kernels import drive
from kvroute.policies.foresight.paths import HOPS_MAX, TAIL, AggregatedLinks, path_ceiling, path_of
from kvroute.types import FloatArray, IntArray

SHARE_MAX = 0.95
"""Upper bound of a link's share in use: with more, the price of later transfers would have no bound."""


@compiled
def pass_time(
    now: float,
    floor_share: float,
    flow: FloatArray,
    link: FloatArray,
    lists: IntArray,
    counts: IntArray,
    predicted: FloatArray,
    limited: FloatArray,
) -> float:
    """Move the transfers in flight at their rates until `now`; return the sum of the rates.

    `predicted` grows by the bytes that the model sends, `limited` by those sent at the path's ceiling (ignored for a
    transfer without a ceiling). No transfer ends here: ends are observed, not predicted.
    """
    first_private, total = link.shape[0] - flow.shape[0], 0.0
    for k in range(counts[flows.ACTIVE]):
        slot = lists[flows.ORDER, k]
        rate = flow[slot, flows.RATE]
        total += rate
        sent = rate * (now - flow[slot, flows.SINCE])
        if sent <= 0.0:
            continue
        predicted[slot] += sent
        if rate >= (1.0 - TAIL) * link[first_private + slot, flows.CAPACITY]:
            limited[slot] += sent
        left = max(flow[slot, flows.LEFT] - sent, floor_share * flow[slot, flows.SIZE])
        flow[slot, flows.LEFT], flow[slot, flows.SINCE] = left, now
        flow[slot, flows.FINISH] = now + left / rate
    return total


@compiled
def busiest_share(
    source: int,
    target: int,
    tier: int,
    attached: IntArray,
    wan: IntArray,
    capacity: FloatArray,
    started_bytes: FloatArray,
    started_at: FloatArray,
    now: float,
    window_s: float,
    known_s: float,
) -> float:
    """Return the highest share of a link's capacity on a path that recent transfers use, 0 to SHARE_MAX.

    Args:
        source to wan: see `path_of`.
        capacity: bytes per second that other traffic leaves free, [m].
        started_bytes to now: see `StartedBytes`.
        window_s: time after which bytes count 1/e.
        known_s: time by which they are divided.
    """
    path, most = np.empty(HOPS_MAX, np.int64), 0.0
    for k in range(path_of(source, target, tier, attached, wan, path)):
        link = path[k]
        faded = started_bytes[link] * math.exp(min(started_at[link] - now, 0.0) / window_s)
        most = max(most, faded / (known_s * capacity[link]))
    return min(most, SHARE_MAX)


@compiled
def start_transfer(
    now: float,
    slot: int,
    source: int,
    target: int,
    tier: int,
    kv_bytes: float,
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
    flow: FloatArray,
    flow_int: IntArray,
    link: FloatArray,
    link_int: IntArray,
    hop: IntArray,
    lists: IntArray,
    counts: IntArray,
    predicted: FloatArray,
    limited: FloatArray,
    path: IntArray,
    out: IntArray,
    started_bytes: FloatArray,
    started_at: FloatArray,
    window_s: float,
) -> int:
    """Start a transfer of `kv_bytes` in a free slot of the live state, and recompute the max-min fair rates.

    Adds the transfer to `flows_per_link` and to the started bytes of its links, fills `path` with them and returns
    their number. The ceiling of its hashed paths, given the other transfers, becomes the capacity of a private link at
    the end of the path.
    """
    fabric = AggregatedLinks(
        attached, wan, cable, cables, flows_per_link, hashed, rivals, siblings, mean, factor, tier_bytes_per_s
    )
    ceiling = path_ceiling(source, target, tier, fabric)
    count = hops = path_of(source, target, tier, attached, wan, path)
    ints = np.empty(3 + HOPS_MAX, np.int64)
    for k in range(count):
        link_id = path[k]
        flows_per_link[link_id] += 1
        faded = math.exp(min(started_at[link_id] - now, 0.0) / window_s)
        started_bytes[link_id] = started_bytes[link_id] * faded + kv_bytes
        started_at[link_id] = now
        ints[2 + k] = link_id
    if ceiling < np.inf:
        private = link.shape[0] - flow.shape[0] + slot
        link[private, flows.CAPACITY] = ceiling
        ints[2 + hops] = private
        hops += 1
    ints[0], ints[1] = slot, hops
    predicted[slot] = limited[slot] = 0.0
    staged, floats = ints[: 2 + hops], np.array([kv_bytes, 1.0])
    drive(now, -np.inf, flow, flow_int, link, link_int, hop, lists, counts, staged, floats, out)
    return count
