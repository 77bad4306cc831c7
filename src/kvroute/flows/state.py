"""The state of `FlowNetwork` as plain arrays, and the flows of each link as a linked list."""

from __future__ import annotations

from typing import NamedTuple

from kvroute.compiled import compiled_in_place
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


class FlowState(NamedTuple):
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


@compiled_in_place
def touch(link: int, net: FlowState) -> None:
    """Mark a link as changed, so that the next solve includes it."""
    if net.link_int[link, QUEUED] == 0:
        net.link_int[link, QUEUED] = 1
        net.lists[DIRTY, net.counts[DIRTIES]] = link
        net.counts[DIRTIES] += 1


@compiled_in_place
def chain(hop: int, slot: int, link: int, net: FlowState) -> None:
    """Add a hop of a slot's path to its link."""
    after = net.link_int[link, HEAD]
    net.hop[hop, LINK], net.hop[hop, SLOT], net.hop[hop, NEXT], net.hop[hop, PREV] = link, slot, after, -1
    if after >= 0:
        net.hop[after, PREV] = hop
    net.link_int[link, HEAD] = hop
    touch(link, net)


@compiled_in_place
def unchain(hop: int, net: FlowState) -> int:
    """Remove a hop from its link; return the link."""
    link, before, after = net.hop[hop, LINK], net.hop[hop, PREV], net.hop[hop, NEXT]
    if before >= 0:
        net.hop[before, NEXT] = after
    else:
        net.link_int[link, HEAD] = after
    if after >= 0:
        net.hop[after, PREV] = before
    touch(link, net)
    left: int = link
    return left
