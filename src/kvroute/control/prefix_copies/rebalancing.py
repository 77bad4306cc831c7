"""Finds prefixes that are read so often that other instances should cache them too, and plans copies ahead of demand.

It uses the router's view of caches and links. It moves no data and does not record the result of a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvroute.control.offload.offloader import Offloader
from kvroute.control.prefix_copies.copies import Copies
from kvroute.control.state.hotspots import CacheLocation, CopySpec, Hotspots, PlannedCopy
from kvroute.control.view import ClusterView
from kvroute.types import CROSS_DATACENTER, SAME_DATACENTER, CopyPrefix, Request, Terms


class KnownPrefixes:
    """Cached prefixes that the prefill instances of one model have reported, for instances that are up. Copies in
    progress count as cached, so none is planned twice."""

    def __init__(self, view: ClusterView, model: str, copies: Copies) -> None:
        self._view, self._model, self._copies = view, model, copies
        self._pool = view.prefill[model]
        instances = [view.cluster.instances[index] for index in self._pool.ids.tolist()]
        self._place = [CacheLocation(instance.datacenter, instance.name) for instance in instances]
        self._up, self._places = b"", tuple[CacheLocation, ...]()
        self.block_tokens = 0
        """Tokens of one block, from the latest read."""

    @property
    def places(self) -> tuple[CacheLocation, ...]:
        """Instances that take prefills now, ascending."""
        up = self._pool.up.tobytes()
        if up != self._up:
            here = zip(self._place, self._pool.up.tolist(), strict=True)
            self._up, self._places = up, tuple(sorted(place for place, is_up in here if is_up))
        return self._places

    def place(self, index: int) -> CacheLocation:
        """Datacenter and name of an instance of the cluster."""
        return self._place[self._pool.position[index]]

    def plan(
        self, blocks: tuple[int, ...], block_tokens: int, source: CacheLocation, target: CacheLocation
    ) -> PlannedCopy | None:
        """See `CachedPrefixes.plan`."""
        cluster, caches = self._view.cluster, self._view.caches
        there, here = cluster.index(source.instance), cluster.index(target.instance)
        depths = caches.reusable_blocks(blocks, self._model, len(blocks))
        depth = int(depths[there])
        if depth <= int(depths[here]):
            return None
        chain = blocks[:depth]
        if any(copy.target == here and copy.chain_end == chain[-1] for copy in self._copies.ahead()):
            return None
        held = min(caches.prefix.match_one(here, chain), depth)
        nbytes = self._view.models[self._model].kv_bytes(depth * block_tokens, held * block_tokens)
        return PlannedCopy(source, target, chain, depth * block_tokens, float(nbytes))


class Rebalancing:
    """Hotspots of every model, and the copies that relieve them."""

    def __init__(self, spec: CopySpec, view: ClusterView, offloader: Offloader | None, copies: Copies) -> None:
        self._spec, self._view, self._offloader, self._copies = spec, view, offloader, copies
        self._known = {name: KnownPrefixes(view, name, copies) for name in view.models}
        self._spots = {name: Hotspots(known, spec.hotspots) for name, known in self._known.items()}
        self._reviewed_at: float | None = None

    def read(self, model: str, instance: int, request: Request, tokens: int) -> None:
        """Record that a request found its first `tokens` tokens on this prefill instance (index in the cluster)."""
        known = self._known[model]
        known.block_tokens = request.block_tokens
        self._spots[model].note(known.place(instance), request.blocks, tokens)

    def review(self, at: float) -> tuple[CopyPrefix, ...]:
        """Copies to start now; empty between two reviews."""
        if self._reviewed_at is not None and at - self._reviewed_at < self._spec.review_s:
            return ()
        self._reviewed_at = at
        joined = self._joined(at)
        made: list[CopyPrefix] = []
        for model in self._spots:
            budget_bytes = self._budget_bytes(at, joined) - sum(copy.nbytes for copy in self._copies.ahead())
            if budget_bytes > 0.0:
                made += self._rebalance(at, model, budget_bytes, joined)
        return tuple(made)

    def _rebalance(self, at: float, model: str, budget_bytes: float, joined: Collection[str]) -> list[CopyPrefix]:
        spots, cluster = self._spots[model], self._view.cluster
        loads = spots.read_tokens()
        names = tuple(place.instance for place in loads)
        reads = np.array([float(tokens) for tokens in loads.values()])
        made = []
        for copy in spots.rebalance(budget_bytes, joined):
            source, target = cluster.index(copy.source.instance), cluster.index(copy.target.instance)
            datacenters = joined if copy.source.datacenter in joined else (copy.source.datacenter,)
            made.append(
                CopyPrefix(
                    copy_id=self._copies.begin(at, source, target, copy.nbytes, copy.blocks[-1]),
                    source=copy.source.instance,
                    target=copy.target.instance,
                    blocks=copy.blocks,
                    block_tokens=self._known[model].block_tokens,
                    kv_bytes=copy.nbytes,
                    terms=Terms(
                        names, reads, np.array([place.datacenter in datacenters for place in loads]), {}, "tokens"
                    ),
                )
            )
        return made

    def _joined(self, at: float) -> tuple[str, ...]:
        """Datacenters with spare bandwidth between them."""
        if not self._spec.across:
            return ()
        if self._offloader is not None:
            return self._offloader.abundant(at, self._spec.abundant_below)
        if float(self._view.oracle.congestion(at)[CROSS_DATACENTER]) > self._spec.abundant_below:
            return ()
        return tuple(sorted({instance.datacenter for instance in self._view.cluster.instances}))

    def _budget_bytes(self, at: float, joined: Sequence[str]) -> float:
        """Bytes that the free bandwidth carries in `budget_s`: between datacenters if copies may go there, or
        inside."""
        tier = CROSS_DATACENTER if len(joined) > 1 else SAME_DATACENTER
        free_share = 1.0 - float(self._view.oracle.congestion(at)[tier])
        free_bytes_per_s = free_share * float(self._view.cluster.tier_bytes_per_s[tier])
        if len(joined) > 1 and self._offloader is not None:
            left = self._offloader.free_bytes_per_s(at, joined)
            free_bytes_per_s = free_bytes_per_s if left is None else left
        return self._spec.budget_s * free_bytes_per_s
