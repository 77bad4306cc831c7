"""The compiled heart of `FlowNetwork`: numba functions over plain arrays; no ids, no checks, no growth.

Six arrays hold everything. A flow sits in a slot (a column of `ff` and `fi`), a link is a column of `lf` and `li`, and
hop `slot * P + k` is the k-th link of a flow's path, chained into a doubly linked list of the flows on that link.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np

from kvroute.types import FloatArray, IntArray

FINISH, LEFT, RATE, SINCE, WEIGHT, SIZE, BEGUN, TRIAL = range(8)
"""Rows of `ff`: finish time (inf: stalled), bytes left at SINCE, rate since then, weight, all bytes, start; new rate."""
HOPS, MARK, LIMIT, ORDER, GROUP = range(5)
"""Rows of `fi`: path length; solver's mark; bottleneck link (-1: new); two lists of slots: active by start, solved."""
CAPACITY, CARRIED, ROOM, RISING, SHARE, TOP = range(6)
"""Rows of `lf`: bytes per second, bytes of departed flows; in a solve: rest, rising weight, share, highest level."""
HEAD, QUEUED, DIRTY, SEEN, COUNT, OTHERS, FULL, HEAP = range(8)
"""Rows of `li`: first hop; is it dirty; list of the dirty; in a solve: mark, flows rising and not, is it full, list."""
LINK, NEXT, PREV = range(3)
"""Rows of `hops`: link, next hop on that link, previous one (-1: none)."""
ACTIVE, DIRTIES, EPOCH = range(3)
"""Entries of `counts`: active flows, dirty links, last mark given out."""
FLOAT_ROWS, INT_ROWS = (TRIAL + 1, TOP + 1), (GROUP + 1, HEAP + 1)
"""Rows of `ff` and `lf`, of `fi` and `li`."""
TOLERANCE = 1e-11
"""Two shares that differ relatively by less are equal: sums over some thousand flows round by that much."""

Function = TypeVar("Function", bound=Callable[..., object])


def _compiled(function: Function) -> Function:
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


@_compiled
def _touch(link: int, li: IntArray, counts: IntArray) -> None:
    if s.li[link, QUEUED] == 0:
        s.li[link, QUEUED] = 1
        s.lists[DIRTY, s.counts[DIRTIES]] = link
        s.counts[DIRTIES] += 1


@_compiled
def _insert(
    now: float,
    ff: FloatArray,
    fi: IntArray,
    li: IntArray,
    hops: IntArray,
    counts: IntArray,
    si: IntArray,
    sf: FloatArray,
) -> None:
    """Start the staged flows: `si` holds slot, path length and links of each, `sf` its bytes and weight."""
    longest = s.hops.shape[0] // s.ff.shape[0]
    at = 0
    for k in range(sf.shape[0] // 2):
        slot, length = si[at], si[at + 1]
        s.ff[slot, SIZE] = s.ff[slot, LEFT] = sf[2 * k]
        s.ff[slot, WEIGHT] = sf[2 * k + 1]
        s.ff[slot, RATE] = 0.0
        s.ff[slot, SINCE] = s.ff[slot, BEGUN] = now
        s.ff[slot, FINISH] = np.inf
        if length == 0 or sf[2 * k] == 0.0:
            s.ff[slot, FINISH] = now
            length = 0
        s.fi[slot, HOPS] = length
        s.fi[slot, MARK], s.fi[slot, LIMIT] = 0, -1
        s.lists[ORDER, s.counts[ACTIVE]] = slot
        s.counts[ACTIVE] += 1
        for j in range(length):
            hop, link = slot * longest + j, si[at + 2 + j]
            after = s.li[link, HEAD]
            s.hops[hop, LINK], s.hops[hop, NEXT], s.hops[hop, PREV] = link, after, -1
            if after >= 0:
                s.hops[after, PREV] = hop
            s.li[link, HEAD] = hop
            _touch(link, li, counts)
        at += 2 + si[at + 1]


@_compiled
def _remove(
    slot: int, sent: float, ff: FloatArray, fi: IntArray, lf: FloatArray, li: IntArray, hops: IntArray, counts: IntArray
) -> None:
    """Take a flow off its links, which carried `sent` bytes of it; its place in ORDER is the caller's."""
    longest = s.hops.shape[0] // s.ff.shape[0]
    for hop in range(slot * longest, slot * longest + s.fi[slot, HOPS]):
        link, before, after = s.hops[hop, LINK], s.hops[hop, PREV], s.hops[hop, NEXT]
        if before >= 0:
            s.hops[before, NEXT] = after
        else:
            s.li[link, HEAD] = after
        if after >= 0:
            s.hops[after, PREV] = before
        s.lf[link, CARRIED] += sent
        _touch(link, li, counts)


@_compiled
def _sink(at: int, size: int, heap: IntArray, share: FloatArray) -> None:
    """Let heap[at] sink below every link of smaller share; ties by link number."""
    link = heap[at]
    key = s.lf[link, SHARE]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size:
            a, b = heap[child], heap[other]
            if s.lf[b, SHARE] < s.lf[a, SHARE] or (s.lf[b, SHARE] == s.lf[a, SHARE] and b < a):
                child = other
        least = heap[child]
        if s.lf[least, SHARE] > key or (s.lf[least, SHARE] == key and least > link):
            break
        heap[at] = least
        at = child
    heap[at] = link


@_compiled
def _give(now: float, slot: int, ff: FloatArray) -> None:
    """Make a flow's trial rate its rate from `now` on; an equal one keeps its finish time to the last bit."""
    rate = s.ff[slot, TRIAL]
    if rate == s.ff[slot, RATE]:
        return
    left = max(s.ff[slot, LEFT] - s.ff[slot, RATE] * (now - s.ff[slot, SINCE]), 0.0)
    s.ff[slot, LEFT], s.ff[slot, SINCE], s.ff[slot, RATE] = left, now, rate
    if rate > 0.0:
        s.ff[slot, FINISH] = now + left / rate
    else:
        s.ff[slot, FINISH] = now if left <= 1e-12 * s.ff[slot, SIZE] else np.inf


@_compiled
def _seed(ff: FloatArray, fi: IntArray, lf: FloatArray, li: IntArray, hops: IntArray, counts: IntArray) -> int:
    """Put into GROUP the flows that a dirty link moves for sure or likely: new there, limited there, or crowded out."""
    longest = s.hops.shape[0] // s.ff.shape[0]
    s.counts[EPOCH] += 2
    size = 0
    for k in range(s.counts[DIRTIES]):
        link = s.lists[DIRTY, k]
        s.li[link, QUEUED] = 0
        load, hop = 0.0, s.li[link, HEAD]
        while hop >= 0:
            load += s.ff[hop // longest, RATE]
            hop = s.hops[hop, NEXT]
        crowded = load > s.lf[link, CAPACITY] * (1.0 + TOLERANCE)
        hop = s.li[link, HEAD]
        while hop >= 0:
            slot = hop // longest
            limit = s.fi[slot, LIMIT]
            if s.fi[slot, MARK] < s.counts[EPOCH] and (crowded or limit == link or limit < 0):
                s.fi[slot, MARK] = s.counts[EPOCH]
                s.lists[GROUP, size] = slot
                size += 1
            hop = s.hops[hop, NEXT]
    s.counts[DIRTIES] = 0
    return size


@_compiled
def _gather(
    size: int, ff: FloatArray, fi: IntArray, lf: FloatArray, li: IntArray, hops: IntArray, counts: IntArray
) -> int:
    """List the links of the group in HEAP: what the other flows leave of them, and the group's count and weight."""
    longest = s.hops.shape[0] // s.ff.shape[0]
    s.counts[EPOCH] += 2
    epoch = s.counts[EPOCH]
    for k in range(size):
        s.fi[s.lists[GROUP, k], MARK] = epoch
    n_links = 0
    for k in range(size):
        slot = s.lists[GROUP, k]
        for hop in range(slot * longest, slot * longest + s.fi[slot, HOPS]):
            link = s.hops[hop, LINK]
            if s.li[link, SEEN] != epoch:
                s.li[link, SEEN], s.li[link, COUNT], s.li[link, OTHERS], s.li[link, FULL] = epoch, 0, 0, 0
                room, rising, other = s.lf[link, CAPACITY], 0.0, s.li[link, HEAD]
                while other >= 0:
                    fellow = other // longest
                    if s.fi[fellow, MARK] == epoch:
                        s.li[link, COUNT] += 1
                        rising += s.ff[fellow, WEIGHT]
                    else:
                        s.li[link, OTHERS] += 1
                        room -= s.ff[fellow, RATE]
                    other = s.hops[other, NEXT]
                s.lf[link, ROOM], s.lf[link, RISING], s.lf[link, TOP] = max(room, 0.0), rising, 0.0
                s.lf[link, SHARE] = s.lf[link, ROOM] / rising
                s.lists[HEAP, n_links] = link
                n_links += 1
    return n_links


@_compiled
def _fill(
    size: int, ff: FloatArray, fi: IntArray, lf: FloatArray, li: IntArray, hops: IntArray, counts: IntArray
) -> None:
    """Weighted max-min of the group in the room it has: the link of least share freezes its flows, again and again.

    A link's share never falls while others freeze, so a stale heap key is a lower bound and is mended when it surfaces.
    """
    longest = s.hops.shape[0] // s.ff.shape[0]
    epoch = s.counts[EPOCH]
    heap, level = s.lists[HEAP], 0.0
    for k in range(size // 2 - 1, -1, -1):
        _sink(k, size, heap, s.lf)
    while size > 0:
        link = heap[0]
        if s.li[link, COUNT] > 0:
            rest = s.lf[link, ROOM] / s.lf[link, RISING]
            if rest > s.lf[link, SHARE]:
                s.lf[link, SHARE] = rest
                _sink(0, size, heap, s.lf)
                continue
            level = max(level, rest)
            s.li[link, FULL] = 1
            hop = s.li[link, HEAD]
            while hop >= 0:
                slot = hop // longest
                hop = s.hops[hop, NEXT]
                if s.fi[slot, MARK] != epoch:
                    continue
                s.fi[slot, MARK] = epoch + 1
                s.fi[slot, LIMIT] = link
                weight = s.ff[slot, WEIGHT]
                rate = weight * level
                s.ff[slot, TRIAL] = rate
                for other in range(slot * longest, slot * longest + s.fi[slot, HOPS]):
                    crossed = s.hops[other, LINK]
                    s.lf[crossed, ROOM] = max(s.lf[crossed, ROOM] - rate, 0.0)
                    s.lf[crossed, RISING] -= weight
                    s.lf[crossed, TOP] = level
                    s.li[crossed, COUNT] -= 1
        size -= 1
        heap[0], heap[size] = heap[size], link
        if size > 0:
            _sink(0, size, heap, s.lf)


@_compiled
def _widen(
    size: int,
    n_links: int,
    ff: FloatArray,
    fi: IntArray,
    lf: FloatArray,
    li: IntArray,
    hops: IntArray,
    counts: IntArray,
) -> int:
    """Add to the group the others whose rate the group's new rates make unfair; returns the group's size.

    On a link of the group, another flow must move if the link was its bottleneck and is not full any more, or not it
    among the fastest; or if it is faster than a flow of the group that the link holds down.
    """
    longest = s.hops.shape[0] // s.ff.shape[0]
    for k in range(n_links):
        link = s.lists[HEAP, k]
        if s.li[link, OTHERS] == 0:
            continue
        top, full = s.lf[link, TOP], s.lf[link, ROOM] <= TOLERANCE * s.lf[link, CAPACITY]
        hop = s.li[link, HEAD]
        while hop >= 0:
            slot = hop // longest
            hop = s.hops[hop, NEXT]
            if s.fi[slot, MARK] >= s.counts[EPOCH]:
                continue
            rate, fair = s.ff[slot, RATE], s.ff[slot, WEIGHT] * top
            freed = s.fi[slot, LIMIT] == link and (not full or fair > rate * (1.0 + TOLERANCE))
            if freed or (s.li[link, FULL] == 1 and rate > fair * (1.0 + TOLERANCE)):
                s.fi[slot, MARK] = s.counts[EPOCH]
                s.lists[GROUP, size] = slot
                size += 1
    return size


@_compiled
def _solve(
    now: float, ff: FloatArray, fi: IntArray, lf: FloatArray, li: IntArray, hops: IntArray, counts: IntArray
) -> None:
    """Make the rates weighted max-min again after changes on the dirty links.

    Flows have max-min rates if and only if each has a bottleneck: a full link where no flow has more per weight. So it
    is enough to solve a group of flows around the change while the others keep their rates, and to widen the group by
    every flow that loses its bottleneck, until none does.
    """
    size = _seed(s)
    solved = 0
    while size > solved:
        solved = size
        n_links = _gather(solved, s)
        _fill(n_links, s)
        size = _widen(solved, n_links, s)
    for k in range(size):
        _give(now, s.lists[GROUP, k], ff)


@_compiled
def _ends(slot: int, at: float, ff: FloatArray) -> bool:
    """Does a flow end at `at`, the least finish time, or so little later that only rounding parts the two?"""
    return s.ff[slot, FINISH] - at <= 8.0 * np.spacing(at) + 1e-12 * (at - s.ff[slot, BEGUN])  # type: ignore[no-any-return]


@_compiled
def _first(at: float, ff: FloatArray, fi: IntArray, counts: IntArray) -> int:
    """The slot that started first of those that end at `at`."""
    k = 0
    while not _ends(s.lists[ORDER, k], at, ff):
        k += 1
    return s.lists[ORDER, k]  # type: ignore[no-any-return]


@_compiled
def _retire(
    now: float,
    out: IntArray,
    done: int,
    ff: FloatArray,
    fi: IntArray,
    lf: FloatArray,
    li: IntArray,
    hops: IntArray,
    counts: IntArray,
) -> int:
    """Finish what ends at `now`, the least finish time; slots go to `out` from `done` on, by start order."""
    kept = 0
    for k in range(s.counts[ACTIVE]):
        slot = s.lists[ORDER, k]
        if _ends(slot, now, ff):
            _remove(slot, s.ff[slot, SIZE], s)
            out[done] = slot
            done += 1
        else:
            s.lists[ORDER, kept] = slot
            kept += 1
    s.counts[ACTIVE] = kept
    return done


@_compiled
def drive(
    now: float,
    to: float,
    ff: FloatArray,
    fi: IntArray,
    lf: FloatArray,
    li: IntArray,
    hops: IntArray,
    counts: IntArray,
    si: IntArray,
    sf: FloatArray,
    out: IntArray,
) -> tuple[int, float, int]:
    """Start the staged flows at `now`, then finish all that end by `to`; `to` below `now` only looks ahead.

    Returns how many slots are in `out`, and when which slot finishes next: -1 none can, -2 not known yet (a finish at
    `to` itself is not re-solved, since more may change at that instant).
    """
    if sf.shape[0] > 0:
        _insert(now, ff, fi, li, hops, counts, si, sf)
    done = 0
    while True:
        if s.counts[DIRTIES] > 0:
            _solve(now, s)
        at = np.inf
        for k in range(s.counts[ACTIVE]):
            at = min(at, s.ff[s.lists[ORDER, k], FINISH])
        if at == np.inf:
            return done, at, -1
        if at > to:
            return done, at, _first(at, ff, fi, counts)
        now = max(now, at)
        done = _retire(now, out, done, s)
        if now >= to:
            return done, now, -2


@_compiled
def cancel(
    now: float,
    slot: int,
    ff: FloatArray,
    fi: IntArray,
    lf: FloatArray,
    li: IntArray,
    hops: IntArray,
    counts: IntArray,
) -> float:
    """Take an unfinished flow out; returns its bytes left."""
    left = max(s.ff[slot, LEFT] - s.ff[slot, RATE] * (now - s.ff[slot, SINCE]), 0.0)
    _remove(slot, s.ff[slot, SIZE] - left, s)
    kept = 0
    for k in range(s.counts[ACTIVE]):
        if s.lists[ORDER, k] != slot:
            s.lists[ORDER, kept] = s.lists[ORDER, k]
            kept += 1
    s.counts[ACTIVE] = kept
    return left


@_compiled
def set_capacities(links: IntArray, values: FloatArray, lf: FloatArray, li: IntArray, counts: IntArray) -> None:
    """New capacities, bytes per second; an equal one changes nothing."""
    for k in range(links.shape[0]):
        if s.lf[links[k], CAPACITY] != values[k]:
            s.lf[links[k], CAPACITY] = values[k]
            _touch(links[k], li, counts)


@_compiled
def link_loads(
    now: float, ff: FloatArray, fi: IntArray, lf: FloatArray, hops: IntArray, counts: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Per link: the rate it carries (bytes per second) and all bytes it has carried until `now`."""
    longest = s.hops.shape[0] // s.ff.shape[0]
    rates, carried = np.zeros(lf.shape[1]), lf[CARRIED].copy()
    for k in range(s.counts[ACTIVE]):
        slot = s.lists[ORDER, k]
        left = max(s.ff[slot, LEFT] - s.ff[slot, RATE] * (now - s.ff[slot, SINCE]), 0.0)
        for hop in range(slot * longest, slot * longest + s.fi[slot, HOPS]):
            rates[s.hops[hop, LINK]] += s.ff[slot, RATE]
            carried[s.hops[hop, LINK]] += s.ff[slot, SIZE] - left
    return rates, carried


@_compiled
def finish_of(
    slot: int,
    now: float,
    ff: FloatArray,
    fi: IntArray,
    lf: FloatArray,
    li: IntArray,
    hops: IntArray,
    counts: IntArray,
    si: IntArray,
    sf: FloatArray,
) -> float:
    """Start the staged flows on a copy and drive it on until `slot` has finished: that time, or inf."""
    s = ff.copy(), fi.copy(), lf.copy(), li.copy(), hops.copy(), counts.copy()
    out = np.empty(ff.shape[1], np.int64)
    _, at, first = drive(now, -np.inf, s, si, sf, out)
    while first >= 0:
        now = max(now, at)
        done, _, _ = drive(now, now, s, si[:0], sf[:0], out)
        for k in range(done):
            if out[k] == slot:
                return now
        _, at, first = drive(now, -np.inf, s, si[:0], sf[:0], out)
    return np.inf  # type: ignore[no-any-return]
