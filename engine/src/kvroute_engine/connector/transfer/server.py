"""The prefill instance's side: serves held blocks to peers that have the token, one thread per connection.

A peer specifies a request and positions in its prompt, never block numbers, so it can only read what is held for a
fetch. All connections of a transfer share one set of chunks: a connection with room in its socket takes the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvroute_engine.connector.blocks import BlockLayout, Fence, Region
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.block_leases import BlockLease, BlockLeases, Computing, Freed
from kvroute_engine.connector.transfer.block_receiver import BlockReceiver
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.chunk_scheduler import Chunk, ChunkScheduler
from kvroute_engine.connector.transfer.congestion import Gauges, SentCounters, TcpMonitor
from kvroute_engine.connector.transfer.faults import corrupt, misplaced
from kvroute_engine.connector.transfer.handshake import accept_handshake, difference
from kvroute_engine.connector.transfer.listener import Admit, PeerListener
from kvroute_engine.connector.transfer.remote_memory import (
    READ_BLOCKS_MAX,
    READ_BYTES_MAX,
    READ_BYTES_MIN,
    SharedMemory,
)
from kvroute_engine.connector.transfer.wire import (
    Attach,
    Attached,
    BlockPart,
    Copied,
    Fetch,
    KeepAlive,
    LaneEnd,
    Match,
    MemoryParts,
    Release,
    Released,
    Request,
    StoreBlock,
    WireError,
    WireRefusal,
    crc32,
)

UNKNOWN_WAIT_S = 5.0
"""Maximum wait for an unknown request, in seconds, because a fetch may arrive before the scheduler's message to its
worker. At most half of `timeout_s` is used, so that the refusal arrives before the peer times out."""


class TransferServer:
    """Listens from its creation on. `close` ends every thread and connection that it has started."""

    def __init__(
        self,
        regions: Sequence[Region],
        layout: BlockLayout,
        options: ConnectorSettings,
        *,
        port_offset: int = 0,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        unknown_wait_s: float | None = None,
        listen: bool = True,
        receiver: BlockReceiver | None = None,
        on_release: Callable[[], None] | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        """Args:
        listen: if False, the caller accepts connections and calls `serve`.
        receiver: answers peers that write blocks to a store.
        on_release: called from any thread when `freed` may have something to return.
        memory: the regions, for peers that read them by NIXL.
        """
        self._receiver, self._on_release = receiver, on_release
        self._regions, self._layout, self._options = regions, layout, options
        self._token = options.secret() if environ is None else options.secret(environ)
        self._clock = clock
        patience_s = min(UNKNOWN_WAIT_S, options.timeout_s / 2)
        self._unknown_wait_s = patience_s if unknown_wait_s is None else unknown_wait_s
        self._beat_s = options.timeout_s / 4
        """Interval of messages to a waiting peer, in seconds, so that it does not time out."""
        self._holds = BlockLeases()
        self._changed = threading.Condition()
        self._reading: dict[FramedSocket, BlockLease] = {}
        self._memory = memory
        self._attached: set[FramedSocket] = set()
        """Connections whose peers read the blocks from memory."""
        self._links = TcpMonitor()
        self._closed = False
        self._ending = threading.Event()
        port = options.port + port_offset if options.port else 0
        if memory is not None:
            memory.serve()
        self._listener = PeerListener(options.host, port, options.timeout_s, self._accepted) if listen else None

    @property
    def address(self) -> tuple[str, int]:
        """Address at which decode instances reach this server."""
        assert self._listener is not None, "the caller accepts connections"
        return self._options.advertised(), self._listener.port

    @property
    def held(self) -> int:
        """Number of requests whose blocks are held now."""
        with self._changed:
            return len(self._holds)

    def hold(self, request_id: str, blocks: Sequence[int], owner: str = "", prompt: str = "") -> None:
        """Keep `blocks` (the prompt's, in order, all computed) for fetching until they are released or expire.

        Args:
            owner: vLLM's name of the request, if peers use another one; `freed` returns this name.
            prompt: digest of the prompt, to be compared with that of a peer.

        Raises:
            InputError: the KV of another prompt is held under this name.
        """
        with self._changed:
            self._holds.hold(request_id, blocks, self._clock() + self._options.hold_s, owner, prompt)
            self._changed.notify_all()

    def computed(self, step: Computing, regions: Iterable[int], fence: Fence | None = None) -> None:
        """Allow sending what the step computes of `regions`, once `fence` has passed. Called in order of steps."""
        with self._changed:
            self._holds.computed(step, len(self._regions), regions, fence)
            self._changed.notify_all()

    def drop(self, request_id: str, owner: str) -> None:
        """Drop a request that vLLM gave up while it was being computed. `freed` reports when its blocks are free."""
        with self._changed:
            self._holds.drop(request_id, owner)
            self._changed.notify_all()

    def forget(self, request_id: str) -> None:
        """Mark a request that will never be computed. Peers that wait for it are refused."""
        with self._changed:
            self._holds.release(request_id)
            self._changed.notify_all()
        self._released()

    def withdraw(self, request_id: str) -> None:
        """Stop all reads of a request whose blocks vLLM is about to overwrite. Returns when no reader is left."""
        with self._changed:
            hold = self._holds.withdraw(request_id)
            if hold is None:
                return
            self._changed.notify_all()
            for channel, read in self._reading.items():
                if read is hold:
                    channel.abort()
            self._changed.wait_for(lambda: not hold.readers)

    def links(self) -> dict[str, tuple[SentCounters, Gauges]]:
        """Return, by decode instance, the data sent since the last call and its connections' state; see
        `TcpMonitor`."""
        return self._links.read()

    def freed(self) -> list[Freed]:
        """Return the requests whose blocks vLLM may use again; each once."""
        with self._changed:
            return self._holds.freed(self._clock())

    def close(self) -> None:
        """Abort all connections and wait for their threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ending.set()
        if self._listener is not None:
            self._listener.close()

    def _accepted(self, channel: FramedSocket, peer: str, admit: Admit) -> None:
        layout = self._layout
        hello = accept_handshake(channel, self._token, self._options, admit, lambda theirs: difference(layout, theirs))
        self.serve(channel, hello.instance or peer)

    def serve(self, channel: FramedSocket, peer: str) -> None:
        """Answer a peer that has passed the handshake until it disconnects. Args: `peer` is its name in `links`."""
        self._links.opened(channel.sock, peer)
        try:
            # An idle peer may stay connected without limit; TCP's keep-alive detects a dead one.
            while (message := self._next(channel)) is not None:
                self._answer(channel, message)
        finally:
            self._links.closing(channel.sock)
            self._attached.discard(channel)

    def _next(self, channel: FramedSocket) -> Request | None:
        message = channel.receive_request()
        accepted = Request if self._receiver is not None else Attach | Fetch | Release
        if message is None or isinstance(message, accepted):
            return message
        raise WireError("malformed", f"{type(message).__name__} is not a request to this server")

    def _answer(self, channel: FramedSocket, message: Request) -> None:
        match message:
            case Release():
                self.forget(message.request_id)
                channel.send(Released(message.request_id))
            case Match() | StoreBlock():
                assert self._receiver is not None, "only then these messages are accepted"
                self._receiver.answer(channel, message)
            case Attach():
                self._attach(channel)
            case Fetch():
                self._send(channel, message)

    def _attach(self, channel: FramedSocket) -> None:
        if self._memory is None or self._memory.failed:
            channel.send(Attached())
            return
        self._attached.add(channel)
        self._links.ignore(channel.sock)  # the kernel does not see the KV of this connection
        channel.send(self._memory.offer)

    def _send(self, channel: FramedSocket, message: Fetch) -> None:
        found = self._find(channel, message)
        if isinstance(found, WireRefusal):
            channel.send(found)
            return
        try:
            self._send_parts(channel, message, found)
        finally:
            with self._changed:
                del self._reading[channel]
                self._holds.leave(found)
                self._changed.notify_all()
            self._released()

    def _released(self) -> None:
        if self._on_release is not None:
            self._on_release()

    def _find(self, channel: FramedSocket, fetch: Fetch) -> BlockLease | WireRefusal:
        left_s = min(fetch.wait_s, self._options.hold_s) or self._unknown_wait_s
        while True:
            pause_s = min(left_s, self._beat_s)
            left_s -= pause_s
            with self._changed:
                known = self._changed.wait_for(lambda: self._known(fetch.request_id), pause_s)
                if known or left_s <= 0:
                    return self._enter(channel, fetch)
            channel.send(KeepAlive())

    def _known(self, request_id: str) -> bool:
        return self._closed or self._holds.state(request_id) != "unknown"

    def _enter(self, channel: FramedSocket, fetch: Fetch) -> BlockLease | WireRefusal:
        name = fetch.request_id
        match self._holds.state(name):
            case "gone":
                return WireRefusal("gone", f"the blocks of request {name} have expired or were released")
            case "unknown":
                return WireRefusal("unknown", f"no request {name} is held here")
        hold = self._holds.read(name, fetch.first, fetch.count)
        if hold is None:
            return WireRefusal("range", f"request {name} holds fewer blocks than requested")
        self._reading[channel] = hold
        return hold

    def _send_parts(self, channel: FramedSocket, fetch: Fetch, hold: BlockLease) -> None:
        with self._changed:
            refusal = _mismatch(fetch, hold)
            stripe, turn = self._begin(fetch, hold)
        if refusal:
            channel.send(refusal)
            return
        while True:
            with self._changed:
                dealt = self._changed.wait_for(lambda: self._deal(channel, fetch, hold, stripe, turn), self._beat_s)
            if isinstance(dealt, list):
                self._send_chunks(channel, fetch, hold, dealt)
            else:
                channel.send(dealt or KeepAlive())
                if dealt:
                    return

    def _begin(self, fetch: Fetch, hold: BlockLease) -> tuple[ChunkScheduler, int]:
        stripe = hold.stripes.get(fetch.transfer)
        if stripe is None:
            region_bytes = [region.block_bytes for region in self._regions]
            most = self._regions[0].chunk_bytes_max
            stripe = hold.stripes[fetch.transfer] = ChunkScheduler(region_bytes, fetch.first, fetch.count, most=most)
        return stripe, stripe.begin(fetch.lane, fetch.after)

    def _deal(
        self, channel: FramedSocket, fetch: Fetch, hold: BlockLease, stripe: ChunkScheduler, turn: int
    ) -> list[Chunk] | LaneEnd | WireRefusal | None:
        """Return what a lane sends next.

        Returns:
            Chunks: one, or several that the peer reads from memory together. The end of the lane, or a refusal. None if
            nothing is ready.
        """
        if self._closed:
            raise WireError("reset", "closed")
        if hold.stopped:
            return WireRefusal("gone", f"request {fetch.request_id} was aborted")
        if stripe.turn(fetch.lane) != turn:
            raise WireError("reset", "the peer has abandoned this connection")
        if not hold.computing and fetch.first + fetch.count > len(hold.blocks):
            return WireRefusal("range", f"request {fetch.request_id} holds fewer blocks than requested")
        if channel in self._attached and not hold.fences:
            most = min(READ_BYTES_MAX, READ_BLOCKS_MAX * min(region.block_bytes for region in self._regions))
            pieces = stripe.take_together(fetch.lane, hold.ready, most=most, least=READ_BYTES_MIN)
        else:  # one region, so that it does not wait for the fences of others
            piece = stripe.take(fetch.lane, hold.ready)
            pieces = [piece] if piece else []
        return pieces or (LaneEnd() if stripe.dealt else None)

    def _send_chunks(self, channel: FramedSocket, fetch: Fetch, hold: BlockLease, pieces: Sequence[Chunk]) -> None:
        if channel in self._attached:
            channel.send(MemoryParts(tuple([self._part(fetch, hold, piece, by_number=True)[0] for piece in pieces])))
            self._wait_copied(channel, pieces[-1].number)
            return
        for piece in pieces:
            channel.send(*self._part(fetch, hold, piece))

    def _part(
        self, fetch: Fetch, hold: BlockLease, piece: Chunk, *, by_number: bool = False
    ) -> tuple[BlockPart, list[memoryview]]:
        """Return a chunk's header and its bytes. Args: `by_number`: the peer reads the blocks itself; the header names
        them, and the bytes are not needed."""
        with self._changed:
            blocks, fence = hold.blocks[piece.first : piece.end], hold.fences.get(piece.region)
        if fence:
            fence()
        region, fault_file = self._regions[piece.region], self._options.fault_file
        views = region.outgoing(blocks) if fetch.checksum or not by_number else []
        checksum = crc32(views) if fetch.checksum else None
        if fault_file:
            views = corrupt(Path(fault_file), piece, views, self._ending)
        numbers: Sequence[int] = ()
        if by_number:
            numbers = misplaced(Path(fault_file), piece, blocks) if fault_file else blocks
        part = BlockPart(
            region=piece.region,
            first=piece.first,
            count=piece.count,
            number=piece.number,
            nbytes=piece.count * region.block_bytes,
            crc32=checksum,
            blocks=tuple(numbers),
        )
        return part, views

    def _wait_copied(self, channel: FramedSocket, number: int) -> None:
        """Wait until the peer has read the parts up to `number` from memory. If the blocks are withdrawn, the channel
        breaks."""
        assert self._memory is not None, "only then channels are attached"
        while True:
            if not self._memory.progress_until(channel.readable, self._options.timeout_s):
                raise TimeoutError("the peer has not read its parts in time")
            message = channel.receive_next()
            if message == Copied(number):
                return
            if not isinstance(message, KeepAlive):
                raise WireError("malformed", f"{type(message).__name__} instead of Copied")


def _mismatch(fetch: Fetch, hold: BlockLease) -> WireRefusal | None:
    if fetch.prompt and hold.prompt and fetch.prompt != hold.prompt:
        return WireRefusal("prompt", f"request {fetch.request_id} has different tokens here and on the decode instance")
    return None
