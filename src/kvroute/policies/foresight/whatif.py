"""Compiled kernels of the fluid what-if: simulate one transfer among the transfers nearest to its path.

The rates come from `flows.solver`; there is no second solver.
"""

from __future__ import annotations

import numpy as np

from kvroute.compiled import compiled, compiled_in_place
from kvroute.flows import state as flows
from kvroute.flows.kernels import drive
from kvroute.flows.state import FlowState
from kvroute.policies.foresight.paths import HOPS_MAX
from kvroute.types import FloatArray, IntArray


@compiled_in_place
def _near(
    path: IntArray,
    near_max: int,
    live: FlowState,
    links: IntArray,
    link_at: IntArray,
    slots: IntArray,
    slot_at: IntArray,
) -> tuple[int, int]:
    """Find the transfers nearest to a path by shared links, at most `near_max`, and all their links; return both
    counts.

    `link_at` and `slot_at` give the position of each in `links` and `slots`; the path's own links come first.
    """
    longest = live.hop.shape[0] // live.flow.shape[0]
    n_links = n_slots = at = 0
    for link in path:
        link_at[link], links[n_links] = n_links, link
        n_links += 1
    while at < n_links and n_slots < near_max:
        hop = live.link_int[links[at], flows.HEAD]
        at += 1
        while hop >= 0 and n_slots < near_max:
            slot = live.hop[hop, flows.SLOT]
            hop = live.hop[hop, flows.NEXT]
            if slot_at[slot] >= 0:
                continue
            slot_at[slot], slots[n_slots] = n_slots, slot
            n_slots += 1
            for other in range(slot * longest, slot * longest + live.flow_int[slot, flows.HOPS]):
                link = live.hop[other, flows.LINK]
                if link_at[link] < 0:
                    link_at[link], links[n_links] = n_links, link
                    n_links += 1
    return n_links, n_slots


@compiled_in_place
def _room(link: int, slot_at: IntArray, live: FlowState) -> float:
    """Capacity of a link minus the present rates of the transfers that are not simulated."""
    capacity = live.link[link, flows.CAPACITY]
    room = capacity
    hop = live.link_int[link, flows.HEAD]
    while hop >= 0:
        slot = live.hop[hop, flows.SLOT]
        hop = live.hop[hop, flows.NEXT]
        if slot_at[slot] < 0:
            room -= live.flow[slot, flows.RATE]
    left: float = max(room, 1e-6 * capacity)
    return left


@compiled
def _idle(slots: int, links: int) -> FlowState:
    net = FlowState(
        np.zeros((slots, 8)),
        np.zeros((slots, 3), np.int64),
        np.zeros((links, 6)),
        np.zeros((links, 6), np.int64),
        np.full((slots * HOPS_MAX, 4), -1, np.int64),
        np.zeros((4, max(slots, links)), np.int64),
        np.zeros(3, np.int64),
    )
    net.link_int[:, flows.HEAD] = -1
    return net


@compiled
def _run(now: float, to: float, net: FlowState, ints: IntArray, floats: FloatArray) -> None:
    """Start the staged flows at `now` and advance the network to `to`; a flow that has ended keeps its finish time."""
    out = np.empty(net.flow.shape[0], np.int64)
    drive(now, to, net.flow, net.flow_int, net.link, net.link_int, net.hop, net.lists, net.counts, ints, floats, out)


@compiled
def _subnetwork(path: IntArray, near_max: int, ceiling: float, live: FlowState) -> FlowState:
    """A network of only the nearest transfers and their links, with a free slot and, last, the newcomer's ceiling."""
    near_max = min(near_max, live.counts[flows.ACTIVE])
    links = np.empty(len(path) + near_max * HOPS_MAX, np.int64)
    link_at = np.full(live.link.shape[0], -1, np.int64)
    slots = np.empty(near_max, np.int64)
    slot_at = np.full(live.flow.shape[0], -1, np.int64)
    n_links, n_slots = _near(path, near_max, live, links, link_at, slots, slot_at)
    net = _idle(n_slots + 1, n_links + 1)
    for k in range(n_links):
        net.link[k, flows.CAPACITY] = _room(links[k], slot_at, live)
    net.link[n_links, flows.CAPACITY] = ceiling
    longest = live.hop.shape[0] // live.flow.shape[0]
    ints, floats = np.empty(n_slots * (HOPS_MAX + 2), np.int64), np.empty(2 * n_slots)
    at = 0
    for k in range(n_slots):
        slot = slots[k]
        hops = live.flow_int[slot, flows.HOPS]
        ints[at], ints[at + 1] = k, hops
        for j in range(hops):
            ints[at + 2 + j] = link_at[live.hop[slot * longest + j, flows.LINK]]
        at += 2 + hops
        floats[2 * k], floats[2 * k + 1] = live.flow[slot, flows.LEFT], live.flow[slot, flows.WEIGHT]
    _run(0.0, -np.inf, net, ints[:at], floats)
    return net


@compiled
def _copied(net: FlowState) -> FlowState:
    return FlowState(
        net.flow.copy(),
        net.flow_int.copy(),
        net.link.copy(),
        net.link_int.copy(),
        net.hop.copy(),
        net.lists.copy(),
        net.counts.copy(),
    )


@compiled
def simulate_transfer(
    kv_bytes: float, starts_s: float, path: IntArray, ceiling: float, near_max: int, imposed: bool, live: FlowState
) -> tuple[float, float]:
    """Simulate a transfer that starts `starts_s` from now; return its seconds and the total delay of the others.

    The live state is not changed and must hold the remaining bytes at this time. The simulation starts no other
    transfers, and only the `near_max` nearest ones change their rates.
    """
    net = _subnetwork(path, near_max, ceiling, live)
    slot, own = net.flow.shape[0] - 1, net.link.shape[0] - 1
    nothing, none = np.empty(0, np.int64), np.empty(0)
    if starts_s > 0.0:
        _run(0.0, starts_s, net, nothing, none)
    rest = _copied(net) if imposed else net
    ints = np.empty(2 + HOPS_MAX, np.int64)
    hops = len(path)
    for k in range(hops):
        ints[2 + k] = k
    if ceiling < np.inf:
        ints[2 + hops] = own
        hops += 1
    ints[0], ints[1] = slot, hops
    _run(starts_s, np.inf, net, ints[: 2 + hops], np.array([kv_bytes, 1.0]))
    delay_s = 0.0
    if imposed:
        _run(starts_s, np.inf, rest, nothing, none)
        for k in range(slot):
            delay_s += net.flow[k, flows.FINISH] - rest.flow[k, flows.FINISH]
    return net.flow[slot, flows.FINISH] - starts_s, max(delay_s, 0.0)
