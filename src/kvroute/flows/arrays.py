"""Arrays of the state: allocated for a number of slots, and copied to larger ones when flows or paths need more.

After the rows of the network's own links, each slot has one row for a private link. A flow with a ceiling uses the
private link of its slot; no other flow does. The next flow of the slot reuses it.
"""

from __future__ import annotations

import numpy as np

from kvroute.flows import state
from kvroute.flows.state import FlowState
from kvroute.types import FloatArray, IntArray


def idle(capacity_bytes_per_s: FloatArray, slots: int, longest: int) -> FlowState:
    """Return the state without flows, with space for `slots` flows of `longest` links each, private links included."""
    links = len(capacity_bytes_per_s)
    link, link_int = np.zeros((links + slots, 6)), np.zeros((links + slots, 6), np.int64)
    link[:links, state.CAPACITY] = capacity_bytes_per_s
    link_int[:, state.HEAD] = -1
    return FlowState(
        flow=np.zeros((slots, 8)),
        flow_int=np.zeros((slots, 3), np.int64),
        link=link,
        link_int=link_int,
        hop=np.full((slots * longest, 4), -1, np.int64),
        lists=np.zeros((4, links + slots), np.int64),
        counts=np.zeros(3, np.int64),
    )


def widened(old: FlowState, slots: int) -> FlowState:
    """Return the same flows in `slots` slots; flows and links keep their row numbers."""
    before = len(old.flow)
    links = len(old.link) - before
    new = idle(old.link[:links, state.CAPACITY], slots, len(old.hop) // before)
    for was, grown in zip(old, new, strict=True):
        if was.ndim == 2 and was is not old.lists:
            grown[: len(was)] = was
    new.lists[:, : old.lists.shape[1]] = old.lists
    new.counts[:] = old.counts
    return new


def relinked(old: FlowState, capacity_bytes_per_s: FloatArray, after: IntArray) -> FlowState:
    """Return the same flows on the links of another network; slots, hops and rates stay the same.

    Args:
        old: its dirty links have been solved.
        capacity_bytes_per_s: [m] capacity of each link of the other network. A flow on a link whose capacity differs
            must be solved again; the link is not marked.
        after: number of each link of the old network in the other one; -1: it is not there, and no flow uses it.
    """
    slots, links = len(old.flow), len(capacity_bytes_per_s)
    new = idle(capacity_bytes_per_s, slots, len(old.hop) // slots)
    rows = np.append(after, links + np.arange(slots))
    kept = rows >= 0
    new.link[rows[kept]] = old.link[kept]
    new.link[:links, state.CAPACITY] = capacity_bytes_per_s
    new.link_int[rows[kept]] = old.link_int[kept]
    new.flow[:], new.flow_int[:], new.hop[:], new.counts[:] = old.flow, old.flow_int, old.hop, old.counts
    # The last entry of `rows` stands for -1, no link.
    rows = np.append(rows, -1)
    new.flow_int[:, state.LIMIT] = rows[old.flow_int[:, state.LIMIT]]
    new.hop[:, state.LINK] = rows[old.hop[:, state.LINK]]
    new.lists[state.ORDER, :slots] = old.lists[state.ORDER, :slots]
    return new


def lengthened(old: FlowState, longest: int) -> FlowState:
    """Return the same flows with space for paths of `longest` links: hop `slot * P + k` moves to a wider row, and all
    references to hops are renumbered."""
    before = len(old.hop) // len(old.flow)
    narrow = old.hop.reshape(-1, before, 4)
    wide = np.full((len(narrow), longest, 4), -1, np.int64)
    wide[:, :before] = narrow
    for column in (state.NEXT, state.PREV):
        wide[:, :before, column] = _renumbered(narrow[:, :, column], before, longest)
    heads = old.link_int[:, state.HEAD]
    heads[:] = _renumbered(heads, before, longest)
    return old._replace(hop=wide.reshape(-1, 4))


def _renumbered(hops: IntArray, old: int, new: int) -> IntArray:
    moved: IntArray = np.where(hops < 0, -1, hops // old * new + hops % old)
    return moved
