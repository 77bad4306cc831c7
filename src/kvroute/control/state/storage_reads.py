"""Reads of cached KV from the store: the storage queue of each node as the router counts it, and the read path.

Only reads of this router are counted. A node reads first in, first out, so its queue is the time
until a new read begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvroute.policies.storage.dualpath_kernels import (
    ALTERNATING_READS,
    PREFILL_READS,
    READS,
    SPLIT_READS,
    prefill_read_tokens,
)
from kvroute.topology import Cluster
from kvroute.types import FloatArray, IntArray, ReadKv, Request, Side, Terms


class ReadRange(NamedTuple):
    """The cached tokens that a request reads from the store, after those that its prefill instance has in memory."""

    first_token: int
    tokens: int
    kv_bytes: float


@dataclass(slots=True)
class _Part:
    """The part of a read that one node has in its queue."""

    node: int
    kv_bytes: float


class StorageReads:
    """Storage NICs and read queues of the nodes of one cluster, and the reads in progress."""

    def __init__(self, cluster: Cluster) -> None:
        """Start without reads. The cluster file must have a section `storage`."""
        storage = cluster.file.storage
        assert storage is not None
        names = sorted({instance.node for instance in cluster.instances})
        number = {name: index for index, name in enumerate(names)}
        self._names = tuple(instance.name for instance in cluster.instances)
        self._node = np.array([number[instance.node] for instance in cluster.instances], dtype=np.int64)
        limit = float(storage.bytes_per_s) if storage.bytes_per_s is not None else np.inf
        self.bytes_per_s: FloatArray = np.array(
            [
                min(sum(cluster.links[down].bytes_per_s for _, down in cluster.storage_links(index)), limit)
                for index in range(len(cluster.instances))
            ]
        )
        """Read bandwidth of each instance's node, [instances]; 0: the node has no storage NIC."""
        self._mode = READS[storage.reads]
        self._queued_bytes = np.zeros(len(names))
        self._in_progress: dict[int, dict[Side, _Part]] = {}
        self._source: dict[int, int] = {}
        """Prefill instance of each read whose request waits for its prefill."""
        self._readers = np.zeros(len(self._names))
        self._last = 0

    @property
    def needs_decode_instance(self) -> bool:
        """Whether the read path depends on the decode instance, which is then chosen on arrival."""
        return self._mode != READS["prefill"]

    def queue_s(self) -> FloatArray:
        """Return the storage queue of each instance's node in seconds, [instances]; 0 without a storage NIC."""
        queued = self._queued_bytes[self._node]
        return np.divide(queued, self.bytes_per_s, out=np.zeros(len(queued)), where=self.bytes_per_s > 0)

    def in_progress_on(self, instances: IntArray) -> FloatArray:
        """Return the number of requests of each prefill instance that wait for a read or for the prefill after it."""
        return self._readers[instances]

    def finish_s(self, source: int, targets: IntArray, kv_bytes: float) -> FloatArray:
        """Return the time until the next read is complete with each decode instance, [targets]; infinite if neither
        node has a storage NIC. Split reads are not rounded to blocks.

        Args:
            source: the prefill instance, index in the cluster.
            targets: decode instances, indices in the cluster.
            kv_bytes: size of the read.
        """
        queues_s, rates = self.queue_s(), self.bytes_per_s
        own_rate = float(rates[source])
        own_s = float(queues_s[source]) + kv_bytes / own_rate if own_rate else math.inf
        other_rates = np.where(self._node[targets] == self._node[source], 0.0, rates[targets])
        others_s: FloatArray = queues_s[targets] + np.divide(
            kv_bytes, other_rates, out=np.full(len(targets), np.inf), where=other_rates > 0
        )
        if self._mode == PREFILL_READS:
            return np.full(len(targets), own_s) if own_rate else others_s
        shorter_s: FloatArray = np.minimum(own_s, others_s)
        if self._mode == ALTERNATING_READS:
            turn_s = np.full(len(targets), own_s) if (self._last + 1) % 2 else others_s
            shorter_s = np.where(np.isfinite(turn_s), turn_s, shorter_s)
        elif self._mode == SPLIT_READS and own_rate:
            level_s = (kv_bytes + queues_s[source] * own_rate + queues_s[targets] * other_rates) / (
                own_rate + other_rates
            )
            both = (other_rates > 0) & (level_s > np.maximum(queues_s[source], queues_s[targets]))
            shorter_s = np.where(both, level_s, shorter_s)
        return shorter_s

    def begin(self, request: Request, source: int, target: int | None, read: ReadRange) -> ReadKv:
        """Choose the read path of a request and add its parts to the queues.

        Args:
            request: the request.
            source, target: its prefill and decode instance, indices in the cluster; no target: the prefill node reads.
            read: tokens to read; the node of at least one of the two instances has a storage NIC.
        """
        self._last += 1
        token_bytes = read.kv_bytes / read.tokens
        ends = [source] if target is None else [source, target]
        queues_s, rates = self.queue_s()[ends], self.bytes_per_s[ends]
        reads_s = np.divide(read.kv_bytes, rates, out=np.full(len(ends), np.inf), where=rates > 0)
        prefill_tokens = self._prefill_tokens(request, read, queues_s, reads_s, same=self._same_node(source, target))
        tokens: dict[Side, int] = {"prefill": prefill_tokens, "decode": read.tokens - prefill_tokens}
        parts: dict[Side, _Part] = {}
        for side, index in zip(tokens, ends, strict=False):
            if tokens[side]:
                parts[side] = _Part(int(self._node[index]), tokens[side] * token_bytes)
                self._queued_bytes[parts[side].node] += parts[side].kv_bytes
        self._in_progress[self._last], self._source[self._last] = parts, source
        self._readers[source] += 1.0
        names = tuple(self._names[index] for index in ends)
        return ReadKv(
            request_id=request.id,
            read_id=self._last,
            prefill_instance=names[0],
            decode_instance=names[1] if target is not None else "",
            first_token=read.first_token,
            prefill_tokens=prefill_tokens,
            decode_tokens=tokens["decode"],
            kv_bytes=read.kv_bytes,
            terms=_terms(names, queues_s, reads_s, [tokens["prefill"], tokens["decode"]]),
        )

    def _same_node(self, source: int, target: int | None) -> bool:
        return target is None or bool(self._node[source] == self._node[target])

    def _prefill_tokens(
        self, request: Request, read: ReadRange, queues_s: FloatArray, reads_s: FloatArray, *, same: bool
    ) -> int:
        """Return the number of tokens that the prefill node reads."""
        if same or not np.isfinite(reads_s[1]):
            return read.tokens
        if not np.isfinite(reads_s[0]):
            return 0
        (prefill_s, decode_s), (prefill_all_s, decode_all_s) = queues_s.tolist(), reads_s.tolist()
        return int(
            prefill_read_tokens(
                self._mode,
                read.tokens,
                request.block_tokens,
                prefill_s,
                decode_s,
                prefill_all_s / read.tokens,
                decode_all_s / read.tokens,
                self._last,
            )
        )

    def finished(self, read_id: int, side: Side) -> bool:
        """End the part of a read on one side. Return False if it is not in progress."""
        part = self._in_progress.get(read_id, {}).pop(side, None)
        if part is None:
            return False
        self._dequeue(part)
        return True

    def end(self, read_id: int) -> None:
        """End all parts of a read. Does nothing if it is over."""
        for part in self._in_progress.pop(read_id, {}).values():
            self._dequeue(part)
        source = self._source.pop(read_id, None)
        if source is not None:
            self._readers[source] -= 1.0

    def in_progress(self, read_id: int) -> bool:
        """Whether a read has begun and its request still waits for its prefill."""
        return read_id in self._in_progress

    def _dequeue(self, part: _Part) -> None:
        self._queued_bytes[part.node] -= part.kv_bytes
        if not any(read.node == part.node for parts in self._in_progress.values() for read in parts.values()):
            self._queued_bytes[part.node] = 0.0  # sums and differences of floats would leave a remainder


def _terms(names: tuple[str, ...], queues_s: FloatArray, reads_s: FloatArray, tokens: list[int]) -> Terms:
    """Return the cost of reading everything by each node. Nodes without a storage NIC cost 0 and are not feasible."""
    feasible = np.isfinite(reads_s)
    reads_s = np.where(feasible, reads_s, 0.0)
    parts = {"queue_s": queues_s, "read_s": reads_s, "tokens": np.array(tokens[: len(names)], dtype=np.float64)}
    return Terms(names, queues_s + reads_s, feasible, parts)
