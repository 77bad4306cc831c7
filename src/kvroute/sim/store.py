"""The store of the cluster file in virtual time: reads over storage NICs into the buffers of nodes, the fetch of what
decode nodes have read, and write-back.

A node reads one part of a request after the other, first in, first out. It has a buffer for the parts that its
instances have not loaded yet. A request reserves the buffer of its decode node first, then that of its prefill node.
What the decode node has read, the decode instance takes from its own node, and only the rest from the prefill instance.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from kvroute.prefix import PrefixIndex
from kvroute.sim.agenda import Agenda
from kvroute.sim.delivery import Delivery
from kvroute.sim.metrics import StoreTotals
from kvroute.sim.network.transfers import Fabric
from kvroute.sim.router import Router
from kvroute.sim.workload import Trace
from kvroute.topology import Cluster
from kvroute.types import ReadFinished, ReadKv, Side

_NUMBERS = 1 << 41
"""Offset of the numbers of storage transfers, above those of requests and copies."""


@dataclass(slots=True, eq=False)
class _Part:
    """The part of a read that one node carries out."""

    read: _Read
    side: Side
    instance: int
    tokens: int
    nbytes: float
    buffered_bytes: float = 0.0
    """Room that it holds in the buffer."""


@dataclass(slots=True, eq=False)
class _Read:
    """The read of one request."""

    request: int
    read_id: int
    unordered: list[_Part] = field(default_factory=list)
    """Parts without room in a buffer; the last one comes next."""
    parts: list[_Part] = field(default_factory=list)
    unread: int = 0
    """Parts that are not complete."""
    fetching: bool = False
    """The prefill instance is fetching what the decode node has read."""


@dataclass(slots=True, eq=False)
class _Node:
    """Buffer and read queue of one node."""

    instance: int
    """One of its instances."""
    free_bytes: float
    quota_bytes: float
    waiting: deque[_Part] = field(default_factory=deque)
    """Parts that wait for room."""
    queue: deque[_Part] = field(default_factory=deque)
    """Parts with room, the first of which is being read."""
    read_bytes: float = 0.0


def continued_blocks(trace: Trace) -> list[tuple[int, ...]]:
    """Return, for each request, the full blocks of its prompt and output if a later request of its closed loop begins
    with them; otherwise nothing. The KV of the last output token is never computed."""
    found: list[tuple[int, ...]] = [()] * len(trace.requests)
    for later, earlier in enumerate(trace.loop.after if trace.loop is not None else ()):
        for number in earlier:
            request, size = trace.requests[number], trace.requests[number].block_tokens
            prompt, full = request.input_tokens // size, (request.input_tokens + request.output_tokens - 1) // size
            blocks = trace.requests[later].blocks[: min(full, trace.requests[later].input_tokens // size)]
            if len(blocks) > prompt and blocks[:prompt] == request.blocks[:prompt]:
                found[number] = blocks
    return found


@dataclass(frozen=True, slots=True)
class _Write:
    """Blocks that an instance writes."""

    instance: int
    blocks: tuple[int, ...]


class SimulatedStore:
    """Reads and writes of all requests. The caller has moved bytes up to now before each call."""

    def __init__(
        self,
        cluster: Cluster,
        fabric: Fabric,
        delivery: Delivery,
        router: Router,
        agenda: Agenda,
        *,
        block_tokens: int,
        block_bytes: list[float],
    ) -> None:
        """Args: `block_tokens`, `block_bytes`: size of a block, the latter by instance."""
        storage = cluster.file.storage
        assert storage is not None, "the cluster file has a store"
        self._cluster, self._fabric, self._delivery = cluster, fabric, delivery
        self._router, self._agenda = router, agenda
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self._stored = PrefixIndex(1)
        self._reads: dict[int, _Read] = {}
        """Reads by request, until their buffers are free."""
        self._flying: dict[int, _Part | _Read | _Write] = {}
        """Meaning of each storage transfer, by its number."""
        self._next_number = _NUMBERS
        self._node_of: list[_Node | None] = []
        nodes: dict[str, _Node] = {}
        quota_bytes = float(storage.buffer_bytes)
        for index, instance in enumerate(cluster.instances):
            if cluster.storage_links(index):
                nodes.setdefault(instance.node, _Node(index, quota_bytes, quota_bytes))
            self._node_of.append(nodes.get(instance.node))
        self._nodes = list(nodes.values())
        self._totals = StoreTotals()

    def begin(self, request: int, decision: ReadKv) -> None:
        """Begin a read that the prefill of a request waits for."""
        token_bytes = decision.kv_bytes / (decision.prefill_tokens + decision.decode_tokens)
        read = self._reads[request] = _Read(request, decision.read_id)
        sides: tuple[tuple[Side, str, int], ...] = (
            ("prefill", decision.prefill_instance, decision.prefill_tokens),
            ("decode", decision.decode_instance, decision.decode_tokens),
        )
        for side, name, tokens in sides:
            if tokens:
                read.parts.append(_Part(read, side, self._cluster.index(name), tokens, tokens * token_bytes))
        read.unordered, read.unread = list(read.parts), len(read.parts)
        self._totals = msgspec.structs.replace(self._totals, reads=self._totals.reads + 1)
        self._order(read)

    def landed(self, number: int) -> tuple[int, bool] | None:
        """Complete a storage transfer.

        Returns:
            A request and True if its blocks are in buffers, so that its prefill may begin; a request and False if what
            the decode node has read has arrived at the prefill instance; otherwise None.
        """
        done = self._flying.pop(number)
        if isinstance(done, _Write):
            self._written(done)
            return None
        if isinstance(done, _Read):
            done.fetching = False
            return done.request, False
        return self._part_read(done)

    def is_fetching(self, request: int) -> bool:
        """Return whether blocks are on their way from the decode node to the prefill instance."""
        read = self._reads.get(request)
        return read is not None and read.fetching

    def prefilled(self, request: int) -> int:
        """Free what the prefill node has read for a request: its prefill has ended. Return the number of tokens that
        the decode node has read. They stay in its buffer until `release`, for the decode instance."""
        read = self._reads.get(request)
        if read is None:
            return 0
        kept = [part for part in read.parts if part.side == "decode"]
        self._free([part for part in read.parts if part.side == "prefill"])
        read.parts = kept
        return sum(part.tokens for part in kept)

    def release(self, request: int) -> None:
        """Free all buffers of a request. No effect if it has none."""
        read = self._reads.pop(request, None)
        if read is not None:
            self._free(read.parts)

    def _free(self, parts: list[_Part]) -> None:
        for part in parts:
            node = self._node(part.instance)
            node.free_bytes += part.buffered_bytes
            self._grant(node)

    def write_back(self, instance: int, blocks: tuple[int, ...]) -> None:
        """Write those of a chain of full blocks that are not stored."""
        if self._node_of[instance] is None or not blocks:
            return
        fresh = len(blocks) - self._stored.match_one(0, blocks)
        if not fresh:
            return
        nbytes = fresh * self._block_bytes[instance]
        self._stored.store(0, blocks)  # others need not write them, too
        self._fabric.write(self._number(_Write(instance, blocks)), instance, nbytes)
        self._totals = msgspec.structs.replace(self._totals, written_bytes=self._totals.written_bytes + nbytes)
        self._delivery.look_ahead()

    def totals(self) -> StoreTotals:
        """Return what has been carried so far."""
        whole = [node.read_bytes for node in self._nodes]
        balance = max(whole) * len(whole) / sum(whole) if sum(whole) else None
        return msgspec.structs.replace(self._totals, balance=balance)

    def _node(self, instance: int) -> _Node:
        node = self._node_of[instance]
        assert node is not None, "only nodes with a storage NIC read"
        return node

    def _number(self, meaning: _Part | _Read | _Write) -> int:
        self._next_number += 1
        self._flying[self._next_number] = meaning
        return self._next_number

    def _order(self, read: _Read) -> None:
        """Ask for room for the next part of a read."""
        if read.unordered:
            part = read.unordered.pop()
            node = self._node(part.instance)
            node.waiting.append(part)
            self._grant(node)

    def _grant(self, node: _Node) -> None:
        """Give room to the parts that wait, and begin to read. A part larger than the whole buffer takes all of it."""
        while node.waiting and node.free_bytes >= min(node.waiting[0].nbytes, node.quota_bytes):
            part = node.waiting.popleft()
            part.buffered_bytes = min(part.nbytes, node.quota_bytes)
            node.free_bytes -= part.buffered_bytes
            node.queue.append(part)
            if len(node.queue) == 1:
                self._read_first(node)
            self._order(part.read)

    def _read_first(self, node: _Node) -> None:
        part = node.queue[0]
        self._fabric.read(self._number(part), part.instance, part.nbytes)
        self._delivery.look_ahead()

    def _part_read(self, part: _Part) -> tuple[int, bool] | None:
        node, read = self._node(part.instance), part.read
        assert node.queue[0] is part, "a node reads first in, first out"
        node.queue.popleft()
        node.read_bytes += part.nbytes
        totals = self._totals
        if part.side == "prefill":
            self._totals = msgspec.structs.replace(totals, prefill_bytes=totals.prefill_bytes + part.nbytes)
        else:
            self._totals = msgspec.structs.replace(totals, decode_bytes=totals.decode_bytes + part.nbytes)
        self._router.handle(ReadFinished(self._agenda.now, read.read_id, part.side))
        if node.queue:
            self._read_first(node)
        read.unread -= 1
        return None if read.unread else (read.request, True)

    def fetch(self, request: int, instance: int) -> None:
        """Start to send what the decode node of a request has read to its prefill instance, as it computes."""
        read = self._reads[request]
        for part in read.parts:
            if part.side == "decode":
                read.fetching = True
                self._fabric.send(self._number(read), part.instance, instance, part.nbytes, kind="storage")
                self._delivery.look_ahead()

    def _written(self, write: _Write) -> None:
        """Report the blocks of a write to the router."""
        self._router.written_back(write.instance, write.blocks)
