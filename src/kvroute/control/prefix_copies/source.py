"""Source of the cached prefix of a request: its prefill instance has it, or it is copied there from another instance.

This module books the copies; the prefill instance is chosen before.
"""

from __future__ import annotations

import msgspec

from kvroute.control.offload.offloader import Offloader, Placement
from kvroute.control.prefix_copies.copies import Copies
from kvroute.control.prefix_copies.rebalancing import Rebalancing
from kvroute.control.prefix_copies.sibling_fetches import SiblingCaches, SiblingFetches
from kvroute.control.view import ClusterView
from kvroute.policies import PrefillCandidates
from kvroute.types import CopyPrefix, Prefill, Request


class PrefixCopies:
    """Copies of cached prefixes: for a request from another site or from a sibling, and ahead of demand."""

    def __init__(self, view: ClusterView, offloader: Offloader | None) -> None:
        options = view.options
        self._view = view
        self._copies = Copies(view, offloader)
        self._pool = SiblingCaches(view) if options.prefix_pool and options.prefill_cache else None
        self._rebalancing = (
            Rebalancing(options.copies, view, offloader, self._copies) if options.copies is not None else None
        )

    def with_fetches(
        self, request: Request, model: str, candidates: PrefillCandidates, at: float
    ) -> tuple[PrefillCandidates, SiblingFetches | None]:
        """Return the candidates with what each could fetch from a sibling."""
        if self._pool is None or not candidates.hit_tokens.any():
            return candidates, None
        return self._pool.offer(request, model, candidates, at)

    def attach(
        self,
        prefill: Prefill,
        request: Request,
        model: str,
        placement: Placement | None,
        fetches: SiblingFetches | None,
        at: float,
    ) -> Prefill:
        """Attach to a prefill decision the copy that it waits for, book the copy, and count the read for hotspots."""
        index = self._view.cluster.index(prefill.instance)
        position_of = self._view.prefill[model].position
        own = int(fetches.own_tokens[position_of[index]]) if fetches else prefill.cached_tokens
        holder, tokens = index, prefill.cached_tokens
        if placement is not None and placement.copy_source >= 0 and placement.prefix_tokens > tokens:
            holder, tokens = placement.copy_source, placement.prefix_tokens
        if fetches is not None:
            holder = fetches.source_of(position_of[holder], holder)
        if self._rebalancing is not None and tokens >= request.block_tokens:
            self._rebalancing.read(model, holder, request, tokens)
        if fetches is not None and prefill.terms is not None:
            parts = prefill.terms.parts | {"fetch_s": fetches.fetch_s}
            prefill = msgspec.structs.replace(prefill, terms=msgspec.structs.replace(prefill.terms, parts=parts))
        if holder == index:
            return prefill
        nbytes = float(self._view.models[model].kv_bytes(tokens, own))
        return msgspec.structs.replace(
            prefill,
            cached_tokens=tokens,
            copy_from=self._view.cluster.instances[holder].name,
            copy_tokens=tokens - own,
            copy_bytes=nbytes,
            copy_id=self._copies.begin(at, holder, index, nbytes),
        )

    def ended(self, at: float, copy_id: int, *, landed: bool) -> bool:
        """End a copy. Return False if no copy with this number is in progress."""
        return self._copies.end(at, copy_id, landed=landed)

    def in_progress(self, copy_id: int) -> bool:
        """Whether a copy has started and not ended."""
        return self._copies.in_progress(copy_id)

    def review(self, at: float) -> tuple[CopyPrefix, ...]:
        """Copies to start now ahead of demand."""
        return self._rebalancing.review(at) if self._rebalancing is not None else ()
