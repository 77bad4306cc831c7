"""Compiled kernels of `FlowNetwork`: numba functions over plain arrays, without ids, checks or resizing."""

from __future__ import annotations

import numpy as np

from kvroute.compiled import compiled, compiled_in_place
from kvroute.flows.solver import solve
from kvroute.flows.state import (
    ACTIVE,
    BEGUN,
    CAPACITY,
    CARRIED,
    DIRTIES,
    FINISH,
    HOPS,
    LEFT,
    LIMIT,
    LINK,
    MARK,
    ORDER,
    RATE,
    SINCE,
    SIZE,
    WEIGHT,
    FlowState,
    chain,
    touch,
    unchain,
)
from kvroute.types import FloatArray, IntArray


@compiled_in_place
def _insert(
    now: float,
    net: FlowState,
    si: IntArray,
    sf: FloatArray,
) -> None:
    """Start the staged flows: `si` holds slot, path length and links of each, `sf` its bytes and weight."""
    longest = net.hop.shape[0] // net.flow.shape[0]
    at = 0
    for k in range(sf.shape[0] // 2):
        slot, length = si[at], si[at + 1]
        net.flow[slot, SIZE] = net.flow[slot, LEFT] = sf[2 * k]
        net.flow[slot, WEIGHT] = sf[2 * k + 1]
        net.flow[slot, RATE] = 0.0
        net.flow[slot, SINCE] = net.flow[slot, BEGUN] = now
        net.flow[slot, FINISH] = np.inf
        if length == 0 or sf[2 * k] == 0.0:
            net.flow[slot, FINISH] = now
            length = 0
        net.flow_int[slot, HOPS] = length
        net.flow_int[slot, MARK], net.flow_int[slot, LIMIT] = 0, -1
        net.lists[ORDER, net.counts[ACTIVE]] = slot
        net.counts[ACTIVE] += 1
        for j in range(length):
            chain(slot * longest + j, slot, si[at + 2 + j], net)
        at += 2 + si[at + 1]


@compiled_in_place
def _remove(slot: int, sent: float, net: FlowState) -> None:
    """Remove a flow from its links, which carried `sent` bytes of it; the caller removes it from ORDER."""
    longest = net.hop.shape[0] // net.flow.shape[0]
    for hop in range(slot * longest, slot * longest + net.flow_int[slot, HOPS]):
        net.link[unchain(hop, net), CARRIED] += sent


@compiled_in_place
def _earliest(net: FlowState) -> tuple[float, int]:
    """Return the least finish time and the slot that finishes then (the first started of several); inf and -1 if none
    can."""
    at = np.inf
    for k in range(net.counts[ACTIVE]):
        at = min(at, net.flow[net.lists[ORDER, k], FINISH])
    if at == np.inf:
        return at, -1
    k, slack = 0, _slack(at)
    while not _ends(net.lists[ORDER, k], at, slack, net):
        k += 1
    return at, net.lists[ORDER, k]


@compiled_in_place
def _slack(at: float) -> float:
    slack: float = 8.0 * np.spacing(at)
    return slack


@compiled_in_place
def _ends(slot: int, at: float, slack: float, net: FlowState) -> bool:
    """Return True if a flow ends at `at`, the least finish time, or later by rounding only."""
    ends: bool = net.flow[slot, FINISH] - at <= slack + 1e-12 * (at - net.flow[slot, BEGUN])
    return ends


@compiled_in_place
def _retire(now: float, out: IntArray, done: int, net: FlowState) -> int:
    """Finish the flows that end at `now`, the least finish time; write slots to `out` from `done` on, in start
    order."""
    kept, slack = 0, _slack(now)
    for k in range(net.counts[ACTIVE]):
        slot = net.lists[ORDER, k]
        if _ends(slot, now, slack, net):
            _remove(slot, net.flow[slot, SIZE], net)
            out[done] = slot
            done += 1
        else:
            net.lists[ORDER, kept] = slot
            kept += 1
    net.counts[ACTIVE] = kept
    return done


@compiled
def _drive(
    now: float, to: float, net: FlowState, si: IntArray, sf: FloatArray, out: IntArray
) -> tuple[int, float, int]:
    if sf.shape[0] > 0:
        _insert(now, net, si, sf)
    done = 0
    while True:
        if net.counts[DIRTIES] > 0:
            solve(now, net)
        at, first = _earliest(net)
        if first < 0 or at > to:
            return done, at, first
        now = max(now, at)
        done = _retire(now, out, done, net)
        if now >= to:
            return done, now, -2


@compiled
def drive(
    now: float,
    to: float,
    flow: FloatArray,
    flow_int: IntArray,
    link: FloatArray,
    link_int: IntArray,
    hop: IntArray,
    lists: IntArray,
    counts: IntArray,
    si: IntArray,
    sf: FloatArray,
    out: IntArray,
) -> tuple[int, float, int]:
    """Start the staged flows at `now`, then finish all that end by `to`; with `to` below `now` only look ahead.

    Return the number of slots in `out`, and the time and slot of the next finish: -1 none can finish, -2 unknown (a
    finish at `to` itself is not solved again, since more may change at that instant). The state's arrays are passed one
    by one, which halves the cost of a call compared with the tuple.
    """
    return _drive(now, to, FlowState(flow, flow_int, link, link_int, hop, lists, counts), si, sf, out)


@compiled
def cancel(now: float, slot: int, net: FlowState) -> float:
    """Remove an unfinished flow; return its bytes left."""
    left: float = max(net.flow[slot, LEFT] - net.flow[slot, RATE] * (now - net.flow[slot, SINCE]), 0.0)
    _remove(slot, net.flow[slot, SIZE] - left, net)
    kept = 0
    for k in range(net.counts[ACTIVE]):
        if net.lists[ORDER, k] != slot:
            net.lists[ORDER, kept] = net.lists[ORDER, k]
            kept += 1
    net.counts[ACTIVE] = kept
    return left


@compiled
def set_capacities(links: IntArray, values: FloatArray, net: FlowState) -> None:
    """Set capacities in bytes per second; an equal value changes nothing."""
    for k in range(links.shape[0]):
        if net.link[links[k], CAPACITY] != values[k]:
            net.link[links[k], CAPACITY] = values[k]
            touch(links[k], net)


@compiled
def set_ceiling(now: float, slot: int, bytes_per_s: float, net: FlowState) -> None:
    """Limit the rate of an unfinished flow by its private link; inf removes the link. The path needs one free hop for
    it."""
    longest, hops = net.hop.shape[0] // net.flow.shape[0], net.flow_int[slot, HOPS]
    private, last = net.link.shape[0] - net.flow.shape[0] + slot, slot * longest + hops - 1
    held = hops > 0 and net.hop[last, LINK] == private
    if held and bytes_per_s == np.inf:
        unchain(last, net)
        net.flow_int[slot, HOPS], net.flow_int[slot, LIMIT] = hops - 1, -1
        if hops == 1:
            net.flow[slot, FINISH] = now
        else:
            touch(net.hop[last - 1, LINK], net)
    elif bytes_per_s < np.inf:
        net.link[private, CAPACITY] = bytes_per_s
        if held:
            touch(private, net)
        else:
            net.flow_int[slot, HOPS] = hops + 1
            chain(last + 1, slot, private, net)


@compiled
def link_loads(now: float, net: FlowState) -> tuple[FloatArray, FloatArray]:
    """Return per link the current rate (bytes per second) and the bytes carried until `now`."""
    longest = net.hop.shape[0] // net.flow.shape[0]
    rates, carried = np.zeros(net.link.shape[0]), net.link[:, CARRIED].copy()
    for k in range(net.counts[ACTIVE]):
        slot = net.lists[ORDER, k]
        left = max(net.flow[slot, LEFT] - net.flow[slot, RATE] * (now - net.flow[slot, SINCE]), 0.0)
        for hop in range(slot * longest, slot * longest + net.flow_int[slot, HOPS]):
            rates[net.hop[hop, LINK]] += net.flow[slot, RATE]
            carried[net.hop[hop, LINK]] += net.flow[slot, SIZE] - left
    return rates, carried


@compiled
def finish_of(slot: int, now: float, real: FlowState, si: IntArray, sf: FloatArray) -> float:
    """Start the staged flows on a copy of the state and run it until `slot` has finished; return that time, or inf."""
    net = FlowState(
        real.flow.copy(),
        real.flow_int.copy(),
        real.link.copy(),
        real.link_int.copy(),
        real.hop.copy(),
        real.lists.copy(),
        real.counts.copy(),
    )
    out = np.empty(net.flow.shape[0], np.int64)
    _, at, first = _drive(now, -np.inf, net, si, sf, out)
    while first >= 0:
        now = max(now, at)
        done, _, _ = _drive(now, now, net, si[:0], sf[:0], out)
        for k in range(done):
            if out[k] == slot:
                return now
        _, at, first = _drive(now, -np.inf, net, si[:0], sf[:0], out)
    return at
