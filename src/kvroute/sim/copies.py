"""Copies of cached prefixes to another instance. Blocks are held at both ends until the whole copy has arrived or
failed.

This module updates KV memory and reports to the router. It does not decide which prefixes to copy, or when.
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
"""Offset of the numbers of copies ahead of demand. Requests have lower numbers, so their ECMP draws do not collide."""


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A copy in progress: the prefix is pinned at its source and has reserved memory at its target."""

    copy_id: int
    source: int
    target: int
    blocks: tuple[int, ...]
    hit: int
    """Number of its blocks that the target already had."""
    joined: list[tuple[int, int]] = field(default_factory=list)
    """Other requests that wait for the same prefix at the same target: (request number, copy id)."""


class SimulatedCopies:
    """Copies for requests, keyed by the request's number, and copies ahead of demand, keyed by their own number."""

    def __init__(self, cluster: Cluster, fleet: Fleet, delivery: Delivery, router: Router, agenda: Agenda) -> None:
        self._cluster, self._fleet, self._delivery = cluster, fleet, delivery
        self._router, self._agenda = router, agenda
        self._held: dict[int, HeldCopy] = {}

    def landed_ahead(self, number: int, _: int) -> None:
        """Complete a copy that no request waited for."""
        self.landed(number)

    def start(self, order: CopyPrefix) -> None:
        """Start a copy ahead of demand now, at lower priority than all requests. The caller has moved bytes up to
        now."""
        source, target = self._cluster.index(order.source), self._cluster.index(order.target)
        number = _AHEAD + order.copy_id
        if self.hold(number, order.copy_id, source, target, order.blocks) == "held":
            self._delivery.copy(number, source, target, order.kv_bytes, ahead=True)

    def hold(self, number: int, copy_id: int, source: int, target: int, blocks: tuple[int, ...]) -> Begun:
        """Pin a prefix at its source and reserve memory at its target.

        Return "joined" if a request's copy of the same prefix to the same target is in progress: this one then waits
        for it.
        Return "refused" if the source has evicted the prefix or the target has no memory for it.
        """
        for leader, held in self._held.items():
            if max(leader, number) < _AHEAD and held.target == target and held.blocks == blocks:
                held.joined.append((number, copy_id))
                return "joined"
        memory = self._fleet.memory
        pinned, hit = memory.index.pin(source, blocks, len(blocks)), memory.index.match_one(target, blocks)
        if pinned < len(blocks) or not memory.has_room(target, blocks, hit):
            memory.index.unpin(source, blocks, pinned)
            self._router.handle(CopyFinished(self._agenda.now, copy_id, landed=False))
            return "refused"
        self._held[number] = HeldCopy(copy_id, source, target, blocks, hit)
        self._fleet.take(source)
        self._fleet.take(target)
        self._router.evicted(memory.reserve(target, blocks, hit, len(blocks)))
        return "held"

    def landed(self, number: int) -> list[int]:
        """Complete a copy: the prefix is cached at its target from now on. Return the requests that waited for it."""
        del self._delivery.transfers[number]
        held, memory = self._held.pop(number), self._fleet.memory
        memory.index.unpin(held.source, held.blocks, len(held.blocks))
        evicted = memory.transfer_done(held.target, held.blocks, held.hit)
        evicted += memory.release(held.target, held.blocks, len(held.blocks))
        self._router.stored(held.target, held.blocks, evicted)
        return self._end(number, held, landed=True)

    def fail(self, number: int) -> list[int]:
        """Fail a copy: nothing of it is cached, and its memory is free again. Return the requests that waited for
        it."""
        self._delivery.stop(number)
        held, memory = self._held.pop(number), self._fleet.memory
        memory.index.unpin(held.source, held.blocks, len(held.blocks))
        self._router.evicted(memory.give_up(held.target, held.blocks, held.hit, len(held.blocks)))
        return self._end(number, held, landed=False)

    def stop(self) -> None:
        """End the run: count the bytes already sent by unfinished copies."""
        for number in self._held:
            self._delivery.stop(number)

    def _end(self, number: int, held: HeldCopy, *, landed: bool) -> list[int]:
        for _, copy_id in ((number, held.copy_id), *held.joined):
            self._router.handle(CopyFinished(self._agenda.now, copy_id, landed))
        self._router.release(held.source)
        self._router.release(held.target)
        return [number, *(joined for joined, _ in held.joined)]
