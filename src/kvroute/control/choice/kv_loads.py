"""Loads of cached KV from CPU memory, disks and the store: what each prefill instance would load before it computes.

This module books nothing; `StorageReads` has the read queues.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.offers import Feature, Offer, Placed
from kvroute.control.view import ClusterView
from kvroute.types import BoolArray, FloatArray, IntArray, Request


class KvLoads(Feature[FloatArray]):
    """Prefixes in CPU memory, on disks and in the store as hits that cost time."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        instances, reads = view.cluster.instances, view.reads
        self._reads = reads if not view.options.layerwise else None
        self._cpu_bytes_per_s = np.array([instance.cpu_bytes_per_s for instance in instances])
        self._disk_bytes_per_s = np.array([instance.disk_bytes_per_s for instance in instances])
        self._reader = np.array([i.role == "prefill" and i.traits.storage_reads for i in instances], dtype=np.bool_)
        """Instances whose prefill can begin with blocks from the store."""

    def offer(self, offer: Offer) -> FloatArray | None:
        """Let each candidate load what makes it faster. Return the seconds until the loaded prefix of each is
        available, 0 if it loads nothing; None if no instance has anything to load.

        A candidate has four options: to use the prefix in GPU memory only, to load the longer prefix from CPU memory
        as well, to load the longer one from its disks as well, or to read the whole prefix from the store. A read does
        not count on blocks in the instance's memory, because they may be evicted while the request waits for the read.
        The candidate takes the option with the lowest cost, the first of equals. The cost is the time until the prefill
        ends, and its computing time once more for
        each request whose read is in progress: that request finds the instance busy when its read ends. The part of a
        load that is spent in the queue anyway costs nothing.
        """
        caches, request = self._view.caches, offer.booking.request
        if not (caches.tiered and self._view.options.prefill_cache and request.blocks):
            return None
        model, candidates = offer.booking.model, offer.candidates
        pool = self._view.prefill[model]
        most = max(request.input_tokens - 1, 0) // request.block_tokens * request.block_tokens
        own = candidates.hit_tokens
        in_cpu = np.maximum(own, caches.tier_tokens("cpu", request, model, pool.ids, most))
        on_disk = np.maximum(in_cpu, caches.tier_tokens("disk", request, model, pool.ids, most))
        in_store = np.maximum(in_cpu, self._stored_tokens(request, model, pool.ids, most))
        if (in_store == own).all() and (on_disk == own).all():
            return None
        kv_bytes = self._view.models[model].kv_bytes
        cpu_s = kv_bytes(in_cpu, own) / self._cpu_bytes_per_s[pool.ids]
        disk_s = cpu_s + kv_bytes(on_disk, in_cpu) / self._disk_bytes_per_s[pool.ids]
        load_s, stored = np.zeros(len(own)), np.zeros(len(own), dtype=np.int64)
        tokens, prefill_s = own.copy(), candidates.prefill_s.copy()
        readers = self._reads.in_progress_on(pool.ids) if self._reads is not None else np.zeros(len(own))
        cost_s = prefill_s * (1.0 + readers)
        store_s = self._read_s(kv_bytes(in_store), in_store > in_cpu, pool.ids)
        for end, seconds, reads in ((in_cpu, cpu_s, False), (on_disk, disk_s, False), (in_store, store_s, True)):
            late_s = np.maximum(seconds - candidates.pending_s, 0.0)
            compute_s = pool.prefill_s(request.input_tokens, end)
            whole_s = compute_s * (1.0 + readers) + late_s
            better = (end > (in_cpu if reads else own)) & (whole_s < cost_s)
            tokens[better], cost_s[better], load_s[better] = end[better], whole_s[better], seconds[better]
            prefill_s[better], stored[better] = (compute_s + late_s)[better], end[better] * reads
        offer.candidates = msgspec.structs.replace(candidates, hit_tokens=tokens, prefill_s=prefill_s)
        offer.stored_tokens = stored
        return load_s

    def attach(self, booking: Booking, placed: Placed, load_s: FloatArray | None) -> None:
        """See Feature."""
        if load_s is not None:
            placed.add_term("load_s", load_s)

    def _stored_tokens(self, request: Request, model: str, ids: IntArray, most: int) -> IntArray:
        """Longest prefix in the store for each of `ids`, at most `most` tokens; 0 where it cannot be read."""
        if self._reads is None or not request.copyable:
            return np.zeros(len(ids), dtype=np.int64)
        stored = min(self._view.caches.stored_tokens(request, model), most)
        return np.where(self._reader[ids], stored, 0).astype(np.int64)

    def _read_s(self, nbytes: FloatArray, wanted: BoolArray, ids: IntArray) -> FloatArray:
        """Seconds to read these bytes from the store by the node of each of `ids`, or by the decode node that ends
        first; infinite if none can read. Decode nodes count only if every one has a storage NIC, because the decode
        instance is not chosen yet."""
        seconds = np.zeros(len(ids))
        if self._reads is None or not wanted.any():
            return seconds
        queue_s, rates = self._reads.queue_s(), self._reads.bytes_per_s
        own_s = queue_s[ids] + np.divide(nbytes, rates[ids], out=np.full(len(ids), np.inf), where=rates[ids] > 0)
        decode = self._view.decode_ids
        if self._reads.needs_decode_instance and len(decode) and rates[decode].all():
            own_s = np.minimum(own_s, (queue_s[decode] + nbytes[:, None] / rates[decode]).min(axis=1))
        seconds[wanted] = own_s[wanted]
        return seconds
