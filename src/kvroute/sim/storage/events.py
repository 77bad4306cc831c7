"""The events of the fast simulation: a binary heap in arrays, ordered by time and then by order of insertion."""

from __future__ import annotations

from typing import NamedTuple

from kvroute.compiled import compiled_in_place
from kvroute.types import FloatArray, IntArray

ARRIVAL, READ, FORWARD, LANDED, FETCH_PREFILL, FETCH_DECODE = range(6)
"""A turn arrives; a storage read, a forward pass or the copy to a decode GPU ends; an engine group asks for work."""


class PendingEvents(NamedTuple):
    """Pending events, [capacity] each."""

    time: FloatArray
    order: IntArray
    kind: IntArray
    item: IntArray
    """Agent, or engine group."""
    counts: IntArray
    """Number of pending events, and of all events so far, [2]."""


@compiled_in_place
def push(agenda: PendingEvents, time: float, kind: int, item: int) -> None:
    """Add an event."""
    place, order = agenda.counts[0], agenda.counts[1]
    agenda.counts[0] += 1
    agenda.counts[1] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if agenda.time[parent] <= time:
            break
        _move(agenda, parent, place)
        place = parent
    agenda.time[place], agenda.order[place], agenda.kind[place], agenda.item[place] = time, order, kind, item


@compiled_in_place
def pop(agenda: PendingEvents) -> tuple[float, int, int]:
    """Remove the first event and return its time, kind and item. There must be one."""
    first = agenda.time[0], agenda.kind[0], agenda.item[0]
    agenda.counts[0] -= 1
    count = agenda.counts[0]
    time, order, kind, item = agenda.time[count], agenda.order[count], agenda.kind[count], agenda.item[count]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and _before(agenda, child + 1, agenda.time[child], agenda.order[child]):
            child += 1
        if not _before(agenda, child, time, order):
            break
        _move(agenda, child, place)
        place = child
    agenda.time[place], agenda.order[place], agenda.kind[place], agenda.item[place] = time, order, kind, item
    return first


@compiled_in_place
def _before(agenda: PendingEvents, place: int, time: float, order: int) -> bool:
    """Return whether the event at `place` comes before the given time and order."""
    return bool(agenda.time[place] < time or (agenda.time[place] == time and agenda.order[place] < order))


@compiled_in_place
def _move(agenda: PendingEvents, source: int, target: int) -> None:
    agenda.time[target] = agenda.time[source]
    agenda.order[target] = agenda.order[source]
    agenda.kind[target] = agenda.kind[source]
    agenda.item[target] = agenda.item[source]
