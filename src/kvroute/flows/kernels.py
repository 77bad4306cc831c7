"""Compiled kernels of `FlowNetwork`: numba functions over plain arrays, without ids, checks or resizing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvroute.compiled import compiled
from kvroute.types import FloatArray, IntArray

FINISH, LEFT, RATE, SINCE, WEIGHT, SIZE, BEGUN, TRIAL = range(8)
"""Columns of `flow`: finish time (inf: stalled), bytes left at SINCE, rate since then, weight, size, start, new
rate."""
HOPS, MARK, LIMIT = range(3)
"""Columns of `flow_int`: path length, solver's mark, bottleneck link (-1: new)."""
CAPACITY, CARRIED, ROOM, RISING, SHARE, TOP = range(6)
"""Columns of `link`: bytes per second, bytes of departed flows; in a solve: rest, rising weight, share, top level."""
HEAD, QUEUED, SEEN, COUNT, OTHERS, FULL = range(6)
"""Columns of `link_int`: first hop, dirty flag; in a solve: mark, rising flows, unchanged flows, limiting flag."""
LINK, SLOT, NEXT, PREV = range(4)
"""Columns of `hop`: link, slot, next hop on that link, previous one (-1: none)."""
ORDER, GROUP, DIRTY, HEAP = range(4)
"""Rows of `lists`: slots of active flows by start, slots being solved; dirty links, links being solved."""
ACTIVE, DIRTIES, EPOCH = range(3)
"""Entries of `counts`: active flows, dirty links, last mark used."""
TOLERANCE = 1e-11
"""Relative difference below which two shares are equal: sums over some thousand flows have this rounding error."""


class State(NamedTuple):
    """A flow has a slot (a row of `flow`), a link has a row of `link`.

    Hop `slot * P + k` is the k-th link of a slot's path, in a doubly linked list of the flows on that link. The last
    rows of `link`, one for each slot, are private: a flow with a ceiling uses the private link of its slot as its last
    hop.
    """

    flow: FloatArray
    flow_int: IntArray
    link: FloatArray
    link_int: IntArray
    hop: IntArray
    lists: IntArray
    counts: IntArray


@compiled
def _touch(link: int, net: State) -> None:
    if net.link_int[link, QUEUED] == 0:
        net.link_int[link, QUEUED] = 1
        net.lists[DIRTY, net.counts[DIRTIES]] = link
        net.counts[DIRTIES] += 1


@compiled
def _chain(hop: int, slot: int, link: int, net: State) -> None:
    """Add a hop of a slot's path to its link."""
    after = net.link_int[link, HEAD]
    net.hop[hop, LINK], net.hop[hop, SLOT], net.hop[hop, NEXT], net.hop[hop, PREV] = link, slot, after, -1
    if after >= 0:
        net.hop[after, PREV] = hop
    net.link_int[link, HEAD] = hop
    _touch(link, net)


@compiled
def _unchain(hop: int, net: State) -> int:
    """Remove a hop from its link; return the link."""
    link, before, after = net.hop[hop, LINK], net.hop[hop, PREV], net.hop[hop, NEXT]
    if before >= 0:
        net.hop[before, NEXT] = after
    else:
        net.link_int[link, HEAD] = after
    if after >= 0:
        net.hop[after, PREV] = before
    _touch(link, net)
    left: int = link
    return left


@compiled
def _insert(
    now: float,
    net: State,
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
            _chain(slot * longest + j, slot, si[at + 2 + j], net)
        at += 2 + si[at + 1]


@compiled
def _remove(slot: int, sent: float, net: State) -> None:
    """Remove a flow from its links, which carried `sent` bytes of it; the caller removes it from ORDER."""
    longest = net.hop.shape[0] // net.flow.shape[0]
    for hop in range(slot * longest, slot * longest + net.flow_int[slot, HOPS]):
        net.link[_unchain(hop, net), CARRIED] += sent


@compiled
def _sink(at: int, size: int, net: State) -> None:
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


@compiled
def _give(now: float, slot: int, net: State) -> None:
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


@compiled
def _seed(net: State) -> int:
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


@compiled
def _open(link: int, epoch: int, net: State) -> None:
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


@compiled
def _gather(size: int, net: State) -> int:
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


@compiled
def _fill(size: int, net: State) -> None:
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


@compiled
def _widen(
    size: int,
    n_links: int,
    net: State,
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


@compiled
def _solve(now: float, net: State) -> None:
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


@compiled
def _earliest(net: State) -> tuple[float, int]:
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


@compiled
def _slack(at: float) -> float:
    slack: float = 8.0 * np.spacing(at)
    return slack


@compiled
def _ends(slot: int, at: float, slack: float, net: State) -> bool:
    """Return True if a flow ends at `at`, the least finish time, or later by rounding only."""
    ends: bool = net.flow[slot, FINISH] - at <= slack + 1e-12 * (at - net.flow[slot, BEGUN])
    return ends


@compiled
def _retire(now: float, out: IntArray, done: int, net: State) -> int:
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
def _drive(now: float, to: float, net: State, si: IntArray, sf: FloatArray, out: IntArray) -> tuple[int, float, int]:
    if sf.shape[0] > 0:
        _insert(now, net, si, sf)
    done = 0
    while True:
        if net.counts[DIRTIES] > 0:
            _solve(now, net)
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
    return _drive(now, to, State(flow, flow_int, link, link_int, hop, lists, counts), si, sf, out)


@compiled
def cancel(now: float, slot: int, net: State) -> float:
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
def set_capacities(links: IntArray, values: FloatArray, net: State) -> None:
    """Set capacities in bytes per second; an equal value changes nothing."""
    for k in range(links.shape[0]):
        if net.link[links[k], CAPACITY] != values[k]:
            net.link[links[k], CAPACITY] = values[k]
            _touch(links[k], net)


@compiled
def set_ceiling(now: float, slot: int, bytes_per_s: float, net: State) -> None:
    """Limit the rate of an unfinished flow by its private link; inf removes the link. The path needs one free hop for
    it."""
    longest, hops = net.hop.shape[0] // net.flow.shape[0], net.flow_int[slot, HOPS]
    private, last = net.link.shape[0] - net.flow.shape[0] + slot, slot * longest + hops - 1
    held = hops > 0 and net.hop[last, LINK] == private
    if held and bytes_per_s == np.inf:
        _unchain(last, net)
        net.flow_int[slot, HOPS], net.flow_int[slot, LIMIT] = hops - 1, -1
        if hops == 1:
            net.flow[slot, FINISH] = now
        else:
            _touch(net.hop[last - 1, LINK], net)
    elif bytes_per_s < np.inf:
        net.link[private, CAPACITY] = bytes_per_s
        if held:
            _touch(private, net)
        else:
            net.flow_int[slot, HOPS] = hops + 1
            _chain(last + 1, slot, private, net)


@compiled
def link_loads(now: float, net: State) -> tuple[FloatArray, FloatArray]:
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
def finish_of(slot: int, now: float, real: State, si: IntArray, sf: FloatArray) -> float:
    """Start the staged flows on a copy of the state and run it until `slot` has finished; return that time, or inf."""
    net = State(
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
