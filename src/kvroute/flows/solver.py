"""Compiled solver of `FlowNetwork`: weighted max-min rates after a change, for the flows that it affects."""

from __future__ import annotations

import numpy as np

from kvroute.compiled import compiled_in_place
from kvroute.flows.state import (
    CAPACITY,
    COUNT,
    DIRTIES,
    DIRTY,
    EPOCH,
    FINISH,
    FULL,
    GROUP,
    HEAD,
    HEAP,
    HOPS,
    LEFT,
    LIMIT,
    LINK,
    MARK,
    NEXT,
    OTHERS,
    QUEUED,
    RATE,
    RISING,
    ROOM,
    SEEN,
    SHARE,
    SINCE,
    SIZE,
    SLOT,
    TOP,
    TRIAL,
    WEIGHT,
    FlowState,
)

TOLERANCE = 1e-11
"""Relative difference below which two shares are equal: sums over some thousand flows have this rounding error."""


@compiled_in_place
def _sink(at: int, size: int, net: FlowState) -> None:
    """Sift heap[at] down below every link of smaller share; ties by link number."""
    heap = net.lists[HEAP]
    link = heap[at]
    key = net.link[link, SHARE]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size:
            a, b = heap[child], heap[other]
            if net.link[b, SHARE] < net.link[a, SHARE] or (net.link[b, SHARE] == net.link[a, SHARE] and b < a):
                child = other
        least = heap[child]
        if net.link[least, SHARE] > key or (net.link[least, SHARE] == key and least > link):
            break
        heap[at] = least
        at = child
    heap[at] = link


@compiled_in_place
def _give(now: float, slot: int, net: FlowState) -> None:
    """Set a flow's rate to its trial rate from `now` on; an equal rate leaves its finish time exactly unchanged."""
    rate = net.flow[slot, TRIAL]
    if rate == net.flow[slot, RATE]:
        return
    left = max(net.flow[slot, LEFT] - net.flow[slot, RATE] * (now - net.flow[slot, SINCE]), 0.0)
    net.flow[slot, LEFT], net.flow[slot, SINCE], net.flow[slot, RATE] = left, now, rate
    if rate > 0.0:
        net.flow[slot, FINISH] = now + left / rate
    else:
        net.flow[slot, FINISH] = now if left <= 1e-12 * net.flow[slot, SIZE] else np.inf


@compiled_in_place
def _seed(net: FlowState) -> int:
    """Put into GROUP the flows whose rates a dirty link may change: new flows, flows that it limits, and all flows of
    an overloaded link."""
    net.counts[EPOCH] += 2
    size = 0
    for k in range(net.counts[DIRTIES]):
        link = net.lists[DIRTY, k]
        net.link_int[link, QUEUED] = 0
        load, hop = 0.0, net.link_int[link, HEAD]
        while hop >= 0:
            load += net.flow[net.hop[hop, SLOT], RATE]
            hop = net.hop[hop, NEXT]
        crowded = load > net.link[link, CAPACITY] * (1.0 + TOLERANCE)
        hop = net.link_int[link, HEAD]
        while hop >= 0:
            slot = net.hop[hop, SLOT]
            limit = net.flow_int[slot, LIMIT]
            if net.flow_int[slot, MARK] < net.counts[EPOCH] and (crowded or limit == link or limit < 0):
                net.flow_int[slot, MARK] = net.counts[EPOCH]
                net.lists[GROUP, size] = slot
                size += 1
            hop = net.hop[hop, NEXT]
    net.counts[DIRTIES] = 0
    return size


@compiled_in_place
def _open(link: int, epoch: int, net: FlowState) -> None:
    """Prepare a link for a solve: the capacity that flows outside the group leave, and the group's count and weight."""
    rising, others, weight, room = 0, 0, 0.0, net.link[link, CAPACITY]
    hop = net.link_int[link, HEAD]
    while hop >= 0:
        slot = net.hop[hop, SLOT]
        hop = net.hop[hop, NEXT]
        if net.flow_int[slot, MARK] == epoch:
            rising += 1
            weight += net.flow[slot, WEIGHT]
        else:
            others += 1
            room -= net.flow[slot, RATE]
    room = max(room, 0.0)
    net.link_int[link, SEEN] = epoch
    net.link_int[link, COUNT] = rising
    net.link_int[link, OTHERS] = others
    net.link_int[link, FULL] = 0
    net.link[link, ROOM] = room
    net.link[link, RISING] = weight
    net.link[link, SHARE] = room / weight
    net.link[link, TOP] = 0.0


@compiled_in_place
def _gather(size: int, net: FlowState) -> int:
    """Mark the group and list its links in HEAP for `_fill`; return the number of links."""
    longest = net.hop.shape[0] // net.flow.shape[0]
    net.counts[EPOCH] += 2
    epoch = net.counts[EPOCH]
    for k in range(size):
        net.flow_int[net.lists[GROUP, k], MARK] = epoch
    n_links = 0
    for k in range(size):
        slot = net.lists[GROUP, k]
        for hop in range(slot * longest, slot * longest + net.flow_int[slot, HOPS]):
            link = net.hop[hop, LINK]
            if net.link_int[link, SEEN] != epoch:
                _open(link, epoch, net)
                net.lists[HEAP, n_links] = link
                n_links += 1
    return n_links


@compiled_in_place
def _fill(size: int, net: FlowState) -> None:
    """Solve weighted max-min of the group in the remaining capacity: the link of least share freezes its flows,
    repeatedly.

    A link's share never falls while other flows freeze, so a stale heap key is a lower bound and is updated when it
    reaches the top.
    """
    longest = net.hop.shape[0] // net.flow.shape[0]
    epoch = net.counts[EPOCH]
    heap, level = net.lists[HEAP], 0.0
    for k in range(size // 2 - 1, -1, -1):
        _sink(k, size, net)
    while size > 0:
        link = heap[0]
        if net.link_int[link, COUNT] > 0:
            rest = net.link[link, ROOM] / net.link[link, RISING]
            if rest > net.link[link, SHARE]:
                net.link[link, SHARE] = rest
                _sink(0, size, net)
                continue
            level = max(level, rest)
            net.link_int[link, FULL] = 1
            hop = net.link_int[link, HEAD]
            while hop >= 0:
                slot = net.hop[hop, SLOT]
                hop = net.hop[hop, NEXT]
                if net.flow_int[slot, MARK] != epoch:
                    continue
                net.flow_int[slot, MARK] = epoch + 1
                net.flow_int[slot, LIMIT] = link
                weight = net.flow[slot, WEIGHT]
                rate = weight * level
                net.flow[slot, TRIAL] = rate
                for other in range(slot * longest, slot * longest + net.flow_int[slot, HOPS]):
                    crossed = net.hop[other, LINK]
                    net.link[crossed, ROOM] = max(net.link[crossed, ROOM] - rate, 0.0)
                    net.link[crossed, RISING] -= weight
                    net.link[crossed, TOP] = level
                    net.link_int[crossed, COUNT] -= 1
        size -= 1
        heap[0], heap[size] = heap[size], link
        if size > 0:
            _sink(0, size, net)


@compiled_in_place
def _widen(
    size: int,
    n_links: int,
    net: FlowState,
) -> int:
    """Add to the group the other flows that the group's new rates make unfair; return the group's size.

    On a link of the group, another flow joins in two cases: the link was its bottleneck and is no longer full or now
    gives a higher share; or the link limits flows of the group and this flow has a higher share than they have.
    """
    for k in range(n_links):
        link = net.lists[HEAP, k]
        if net.link_int[link, OTHERS] == 0:
            continue
        top, full = net.link[link, TOP], net.link[link, ROOM] <= TOLERANCE * net.link[link, CAPACITY]
        hop = net.link_int[link, HEAD]
        while hop >= 0:
            slot = net.hop[hop, SLOT]
            hop = net.hop[hop, NEXT]
            if net.flow_int[slot, MARK] >= net.counts[EPOCH]:
                continue
            rate, fair = net.flow[slot, RATE], net.flow[slot, WEIGHT] * top
            freed = net.flow_int[slot, LIMIT] == link and (not full or fair > rate * (1.0 + TOLERANCE))
            if freed or (net.link_int[link, FULL] == 1 and rate > fair * (1.0 + TOLERANCE)):
                net.flow_int[slot, MARK] = net.counts[EPOCH]
                net.lists[GROUP, size] = slot
                size += 1
    return size


@compiled_in_place
def solve(now: float, net: FlowState) -> None:
    """Restore weighted max-min rates after changes on the dirty links.

    Flows have max-min rates if and only if each has a bottleneck: a full link where no flow has more per weight. It is
    therefore enough to solve a group of flows around the change with all other rates fixed, and to add every flow that
    loses its bottleneck, until no flow does.
    """
    size = _seed(net)
    solved = 0
    while size > solved:
        solved = size
        n_links = _gather(solved, net)
        _fill(n_links, net)
        size = _widen(solved, n_links, net)
    for k in range(size):
        _give(now, net.lists[GROUP, k], net)
