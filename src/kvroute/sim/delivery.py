"""KV transfers from prefill to decode: memory reserved at the target, bytes sent, and failed transfers.

This module updates KV memory and links and does not call the router: it returns the blocks that it had to evict.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvroute.prefix import Evicted
from kvroute.sim.fleet import Fleet
from kvroute.sim.metrics import Outcomes
from kvroute.sim.network.transfers import UNBOUNDED, Fabric, Transfer
from kvroute.sim.workload import TracedRequest
from kvroute.topology import Cluster
from kvroute.types import Decode


class Delivery:
    """Every request is booked, sent, completed (`transfer_done`) and released, in this order, or given up after it was
    booked."""

    def __init__(
        self,
        cluster: Cluster,
        fabric: Fabric,
        fleet: Fleet,
        outcomes: Outcomes,
        trace: Sequence[TracedRequest],
        *,
        decode_cache: bool,
    ) -> None:
        """`decode_cache`: decode instances keep the KV of finished requests."""
        self._cluster, self.fabric, self._fleet = cluster, fabric, fleet
        self._outcomes, self._trace, self._decode_cache = outcomes, trace, decode_cache
        self._total_blocks = [0] * len(trace)
        self._pinned_hit = [0] * len(trace)
        self._planned: dict[int, tuple[int, int]] = {}
        """Target and reserved blocks of requests whose decode instance is known before it is due."""
        self.next_s = UNBOUNDED
        """Time at which the next flow ends if nothing changes."""
        self.transfers: dict[int, Transfer] = {}
        """Transfers in progress, by request. A request's copy of a cached prefix comes before its KV transfer. Copies
        ahead of demand have numbers of their own."""
        self.streaming: set[int] = set()
        """Requests whose KV cache is being sent while it is computed."""

    def cached(self, request: int) -> tuple[int, ...]:
        """Blocks of a request that the decode instance keeps after the request has finished."""
        return self._trace[request].blocks if self._decode_cache else ()

    def plan(self, request: int, target: int, need_bytes: float) -> list[Evicted]:
        """Reserve memory at a target whose decision is due later; return the blocks evicted for it."""
        total = int(np.ceil(need_bytes / self._fleet.block_bytes[target]))
        self._planned[request] = target, total
        return self._fleet.memory.reserve(target, (), 0, total)

    def end_plan(self, request: int) -> None:
        """Free what is reserved for a decision that is due later, if anything."""
        target, total = self._planned.pop(request, (0, 0))
        if total:
            self._fleet.memory.release(target, (), total)

    def book(self, request: int, decision: Decode) -> list[Evicted]:
        """Reserve memory at the target; return the blocks evicted for it."""
        self.end_plan(request)
        outcomes, target = self._outcomes, self._cluster.index(decision.target)
        outcomes.target[request], outcomes.tier[request] = target, decision.tier
        outcomes.hit_tokens[request], outcomes.kv_bytes[request] = decision.hit_tokens, decision.kv_bytes
        blocks = self.cached(request)
        # A prefill instance that goes on to decode may have a cached prefix although decode instances cache nothing.
        hit = min(-(-decision.hit_tokens // self._trace[request].block_tokens), len(blocks))
        total = max(int(np.ceil(decision.need_bytes / self._fleet.block_bytes[target])), len(blocks))
        self._total_blocks[request], self._pinned_hit[request] = total, hit
        self._fleet.take(target)
        return self._fleet.memory.reserve(target, blocks, hit, total)

    def send(self, request: int, *, produced_bytes_per_s: float = UNBOUNDED) -> None:
        """Start a booked transfer now. With a finite `produced_bytes_per_s` it streams at this rate until
        `complete`."""
        outcomes = self._outcomes
        source, target = int(outcomes.source[request]), int(outcomes.target[request])
        if produced_bytes_per_s < UNBOUNDED:
            self.streaming.add(request)
        size = float(outcomes.kv_bytes[request])
        sent = self.fabric.send(request, source, target, size, produced_bytes_per_s=produced_bytes_per_s)
        self.transfers[request] = sent
        self.next_s = self.fabric.next_finish_s()

    def complete(self, request: int) -> None:
        """End the streaming phase of a request: its prefill has ended."""
        self.streaming.remove(request)
        self.fabric.release(self.transfers[request])
        self.next_s = self.fabric.next_finish_s()

    def limit(self, request: int, produced_bytes_per_s: float) -> None:
        """Change the production rate of a transfer that streams; 0 pauses it."""
        self.fabric.limit(self.transfers[request], produced_bytes_per_s)
        self.next_s = self.fabric.next_finish_s()

    def copy(self, number: int, source: int, target: int, nbytes: float, *, ahead: bool = False) -> None:
        """Start to copy a cached prefix now, for the request `number` or `ahead` of demand."""
        self.transfers[number] = self.fabric.send(number, source, target, nbytes, kind="ahead" if ahead else "copy")
        self.next_s = self.fabric.next_finish_s()

    def look_ahead(self) -> None:
        """Update `next_s` after bytes have moved or capacities have changed."""
        self.next_s = self.fabric.next_finish_s()

    def transfer_done(self, request: int) -> list[Evicted]:
        """Complete a KV transfer; return the blocks evicted for it."""
        target = int(self._outcomes.target[request])
        return self._fleet.memory.transfer_done(target, self.cached(request), self._pinned_hit[request])

    def release(self, request: int) -> list[Evicted]:
        """Release the memory of a finished request; return the evicted blocks."""
        target = int(self._outcomes.target[request])
        return self._fleet.memory.release(target, self.cached(request), self._total_blocks[request])

    def give_up(self, request: int) -> list[Evicted]:
        """Stop the transfer if it has started, free its memory and reset the request's row; return the evicted
        blocks."""
        outcomes = self._outcomes
        self.stop(request)
        target, hit = int(outcomes.target[request]), self._pinned_hit[request]
        evicted = self._fleet.memory.give_up(target, self.cached(request), hit, self._total_blocks[request])
        outcomes.target[request] = outcomes.tier[request] = -1
        outcomes.hit_tokens[request], outcomes.kv_bytes[request] = 0, np.nan
        return evicted

    def stop(self, request: int) -> None:
        """Stop a request's transfer or copy if there is one; the bytes that it has sent are counted separately."""
        transfer = self.transfers.pop(request, None)
        self.streaming.discard(request)
        if transfer is not None and transfer.flows_left:
            self.fabric.give_up(transfer)
            self.next_s = self.fabric.next_finish_s()
