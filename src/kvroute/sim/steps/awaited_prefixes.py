"""Cached prefixes that prompts wait for: copies from other instances, and reads from the store."""

from __future__ import annotations

from collections.abc import Callable

from kvroute import llm
from kvroute.sim.run_parts import RunParts
from kvroute.sim.steps.prefills import Prefills
from kvroute.types import Prefill, ReadKv


class AwaitedPrefixes:
    """Fetches the prefix of a request, and then lets its prompt be computed."""

    def __init__(
        self,
        parts: RunParts,
        prefills: Prefills,
        *,
        copy_queues: bool,
        advance: Callable[[], None],
        watch_stalls: Callable[[], None],
        arrived: Callable[[int], None],
        computed: Callable[[int, int], None],
    ) -> None:
        """Start without transfers.

        Args:
            parts: the run.
            prefills: the prefill instances.
            copy_queues: see `RequestTimelines`.
            advance, watch_stalls: called before and after a transfer starts.
            arrived: called with a request that waits for nothing any more.
            computed: called with a request, and 0, whose last blocks arrived after its prompt was computed.
        """
        self._cluster, self._trace, self._router = parts.cluster, parts.trace.requests, parts.router
        self._delivery, self._copies, self._outcomes = parts.delivery, parts.copies, parts.outcomes
        self._store, self._prefills = parts.store, prefills
        self._copy_queues, self._advance, self._watch_stalls = copy_queues, advance, watch_stalls
        self._arrived, self._computed = arrived, computed
        self._awaiting_copy: dict[int, Prefill] = {}
        self._awaiting_fetch: set[int] = set()
        """Requests whose prompt is computed, but for blocks of the store that are still being fetched."""

    def copy(self, request: int, prefill: Prefill) -> None:
        """Begin the copy that a prefill waits for."""
        traced, holder = self._trace[request], self._cluster.index(prefill.copy_from)
        source = self._cluster.index(prefill.instance)
        blocks = traced.blocks[: prefill.cached_tokens // traced.block_tokens]
        begun = self._copies.hold(request, prefill.copy_id, holder, source, blocks)
        self._awaiting_copy[request] = prefill
        if begun == "refused":
            self.go_without(request)
        if begun == "held" and self._copy_queues:
            self._prefills.hold(request, holder, prefill.cached_tokens, self._held)
        elif begun == "held":
            self._held(request, 0)

    def _held(self, request: int, _: int) -> None:
        """Start the transfer of a prefix from its source."""
        prefill = self._awaiting_copy[request]
        ends = self._cluster.index(prefill.copy_from), self._cluster.index(prefill.instance)
        self._advance()
        self._delivery.copy(request, *ends, prefill.copy_bytes)
        self._watch_stalls()

    def copied(self, request: int, _: int) -> None:
        """Complete a prefix copy: the prefix is cached, and the rest of the prompt can be computed."""
        for landed in self._copies.landed(request):
            del self._awaiting_copy[landed]
            self._arrived(landed)

    def go_without(self, request: int) -> None:
        """Let the tokens be computed that would have been copied."""
        self._outcomes.cached_tokens[request] -= self._awaiting_copy.pop(request).copy_tokens
        self._arrived(request)

    def read(self, request: int, decision: ReadKv) -> None:
        """Begin to read the cached prefix from the store."""
        assert self._store is not None, "only a cluster with a store has reads"
        traced = self._trace[request]
        if decision.decode_instance:
            target = self._cluster.index(decision.decode_instance)
            model = llm.model(self._cluster.instances[target].model)
            need_bytes = float(model.kv_bytes(traced.input_tokens + traced.output_tokens))
            self._router.evicted(self._delivery.plan(request, target, need_bytes))
        self._advance()
        self._store.begin(request, decision)
        self._watch_stalls()

    def store_landed(self, number: int, _: int) -> None:
        """Complete a transfer from or to the store; a request may go on."""
        assert self._store is not None
        self._advance()
        found = self._store.landed(number)
        if found is not None:
            request, is_read = found
            if is_read:
                self._store.fetch(request, int(self._outcomes.source[request]))
                self._arrived(request)
            elif request in self._awaiting_fetch:
                self._awaiting_fetch.remove(request)
                self._computed(request, 0)
        self._watch_stalls()

    def prefilled(self, request: int) -> int | None:
        """End the prompt of a request. Return its tokens that a buffer of the decode node keeps; None: blocks of the
        store are still being fetched, so it is not complete."""
        if self._store is None:
            return 0
        if self._store.is_fetching(request):
            self._awaiting_fetch.add(request)
            return None
        self._advance()
        return self._store.prefilled(request)
