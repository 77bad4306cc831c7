"""Cached prefixes on their way to another instance: blocks held at both ends until all bytes are there, or none is.

It knows what is true of memory and tells the router; which prefixes move, and when, is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvroute.sim.agenda import Agenda
from kvroute.sim.delivery import Delivery
from kvroute.sim.fleet import Fleet
from kvroute.sim.router import Router
from kvroute.topology import Cluster
from kvroute.types import CopyFinished, CopyPrefix

Begun = Literal["held", "joined", "refused"]
_AHEAD = 1 << 40
"""Copies ahead of demand go by this and their number: requests have lower numbers, and their own luck with paths."""


@dataclass(frozen=True, slots=True)
class Held:
    """A prefix that is read at its source and has room at its target."""

    copy_id: int
    source: int
    target: int
    blocks: tuple[int, ...]
    hit: int
    """Blocks of it that the target had."""
    joined: list[tuple[int, int]] = field(default_factory=list)
    """Other requests that wait for the same prefix at the same place, and the numbers of their copies."""


class Copies:
    """Copies for requests, by the request's number, and ahead of demand, by one of their own."""

    def __init__(self, cluster: Cluster, fleet: Fleet, delivery: Delivery, router: Router, agenda: Agenda) -> None:
        self._cluster, self._fleet, self._delivery = cluster, fleet, delivery
        self._router, self._agenda = router, agenda
        self._held: dict[int, Held] = {}

    def landed_ahead(self, number: int, _: int) -> None:
        """One that nobody waited for is there."""
        self.landed(number)

    def start(self, order: CopyPrefix) -> None:
        """A copy ahead of demand leaves now, behind all requests' bytes; bytes have been moved up to now."""
        source, target = self._cluster.index(order.source), self._cluster.index(order.target)
        number = _AHEAD + order.copy_id
        if self.hold(number, order.copy_id, source, target, order.blocks) == "held":
            self._delivery.copy(number, source, target, order.kv_bytes, ahead=True)

    def hold(self, number: int, copy_id: int, source: int, target: int, blocks: tuple[int, ...]) -> Begun:
        """Hold a prefix at both ends; or wait for a request's copy of the same that is on its way there; or tell that
        it will not come: its source has lost it, its target has no room."""
        for leader, held in self._held.items():
            if max(leader, number) < _AHEAD and held.target == target and held.blocks == blocks:
                held.joined.append((number, copy_id))
                return "joined"
        memory = self._fleet.memory
        pinned, hit = memory.index.pin(source, blocks, len(blocks)), memory.index.match_one(target, blocks)
        if pinned < len(blocks) or not memory.has_room(target, blocks, hit):
            memory.index.unpin(source, blocks, pinned)
            self._router.tell(CopyFinished(self._agenda.now, copy_id, landed=False))
            return "refused"
        self._held[number] = Held(copy_id, source, target, blocks, hit)
        self._fleet.take(source)
        self._fleet.take(target)
        self._router.evicted(memory.reserve(target, blocks, hit, len(blocks)))
        return "held"

    def landed(self, number: int) -> list[int]:
        """All bytes are there: the prefix is cached from now on. Who waited for it."""
        del self._delivery.transfers[number]
        held, memory = self._held.pop(number), self._fleet.memory
        memory.index.unpin(held.source, held.blocks, len(held.blocks))
        evicted = memory.land(held.target, held.blocks, held.hit)
        evicted += memory.release(held.target, held.blocks, len(held.blocks))
        self._router.stored(held.target, held.blocks, evicted)
        return self._end(number, held, landed=True)

    def fail(self, number: int) -> list[int]:
        """It will not come: nothing of it is cached, and its room is free. Who waited for it."""
        self._delivery.stop(number)
        held, memory = self._held.pop(number), self._fleet.memory
        memory.index.unpin(held.source, held.blocks, len(held.blocks))
        self._router.evicted(memory.give_up(held.target, held.blocks, held.hit, len(held.blocks)))
        return self._end(number, held, landed=False)

    def stop(self) -> None:
        """The run is over: what has left of copies that nobody waits for is accounted."""
        for number in self._held:
            self._delivery.stop(number)

    def _end(self, number: int, held: Held, *, landed: bool) -> list[int]:
        for _, copy_id in ((number, held.copy_id), *held.joined):
            self._router.tell(CopyFinished(self._agenda.now, copy_id, landed))
        self._router.give_back(held.source)
        self._router.give_back(held.target)
        return [number, *(each for each, _ in held.joined)]
