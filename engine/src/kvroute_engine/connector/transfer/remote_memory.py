"""Reads of KV blocks directly from a peer's memory with NIXL, by RDMA where the hardware has it. No nixl import.

The decode instance reads, so that no peer ever writes into its cache. A read is optimistic: the prefill instance may
take its blocks back while they are being read. What was read counts only after the prefill instance has confirmed that
the blocks were held until the end of the read (see `wire.Copied`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvroute_engine.connector.blocks import Extent, Region
from kvroute_engine.connector.transfer.wire import Attached, WireError, encode
from kvroute_engine.errors import InputError

log = logging.getLogger(__name__)
READ_BYTES_MAX, READ_BYTES_MIN = 128 << 20, 8 << 20
"""Largest read, and smallest one towards the end of a transfer, in bytes. Each costs two messages and some hundred
microseconds, and more if blocks are not adjacent."""
READ_BLOCKS_MAX = 8192
"""Most blocks of one read, so that their numbers fit into a frame's header."""
_BUSY_S = 0.02
"""Time for which a thread polls often, in seconds; a read takes less where the network is fast."""
_BUSY_PAUSE_S, _PAUSE_S = 50e-6, 1e-3
_PROGRESS_S = 10e-3
"""Interval at which reads of peers make progress while no thread waits for them, in seconds."""
_GRACE_S = 0.2
"""Time after a failed read in which other parts of it may still arrive, in seconds: NIXL reports the first failure."""
Spans = npt.NDArray[np.uint64]
"""Rows of address, bytes, device number."""
_OPTION = "kv_connector_extra_config.data_plane"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Blocks of one region: those of the peer, `there`, are copied to `here`, in order."""

    region: int
    here: Sequence[int]
    there: Sequence[int]


class NixlAgent(Protocol):
    """The methods of `nixl_agent` that kvroute uses. Its exceptions have no common base class."""

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        """Register ranges of memory, given as (address, bytes, device number, name)."""
        ...

    def get_agent_metadata(self) -> bytes:
        """Return what another agent needs to read the registered memory."""
        ...

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        """Add another agent and return its name."""
        ...

    def remove_remote_agent(self, agent: str) -> None:
        """Disconnect from another agent and forget it. There must be no read from it."""
        ...

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        """Return descriptors of spans."""
        ...

    def initialize_xfer(self, operation: str, local: Any, remote: Any, remote_agent: str) -> Any:
        """Prepare a transfer; the two lists of descriptors correspond."""
        ...

    def transfer(self, handle: Any) -> str:
        """Begin a transfer. Return its state: `PROC`, `DONE` or `ERR`."""
        ...

    def check_xfer_state(self, handle: Any) -> str:
        """Return the state of a transfer."""
        ...

    def release_xfer_handle(self, handle: Any) -> None:
        """Free a transfer that has ended."""
        ...

    def get_new_notifs(self) -> Any:
        """Let transports without RDMA make progress."""
        ...


@dataclass(slots=True, eq=False)
class _PeerAgent:
    """The agent of a peer. It is removed when no connection uses it."""

    metadata: bytes
    name: str
    users: int = 0
    """Number of connections that read from the peer's memory."""
    reads: int = 0
    """Number of reads in progress."""
    broken: bool = False
    """True if a read has failed: UCX does not repair its connection to the peer."""


class SharedMemory:
    """This rank's KV cache, which peers may read, and the caches of peers. Thread-safe: the agent is called under a
    lock, because UCX does not lock by itself."""

    def __init__(self, regions: Sequence[Region], agent: NixlAgent) -> None:
        """Register the regions.

        Raises:
            InputError: they are not all in host memory, or all in device memory.
        """
        self._agent, self._lock = agent, threading.Lock()
        self._extents = tuple(region.extent for region in regions)
        self._block_bytes = [region.block_bytes for region in regions]
        self._peers: dict[bytes, _PeerAgent] = {}
        """The peers' agents, by their metadata."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.failed = False
        """True once the agent has failed, so that peers must use TCP."""
        kinds = {extent.kind for extent in self._extents}
        if len(kinds) != 1:
            raise InputError(
                "the KV cache is not in one kind of memory, host or device",
                where=_OPTION,
                hint="use tcp",
            )
        (self._kind,) = kinds
        agent.register_memory([(*span, "") for span in ranges(self._extents)], self._kind)
        self.offer = Attached(metadata=agent.get_agent_metadata(), extents=self._extents)
        """Answer to a peer that wants to read this cache."""

    def serve(self) -> None:
        """Let peers read: their reads also make progress while no thread waits for them.

        Raises:
            InputError: the offer would be too long for a message.
        """
        try:
            encode(self.offer)
        except WireError as error:
            raise InputError(
                f"NIXL's keys of {len(self._extents)} regions do not fit into a message: {error}",
                where=_OPTION,
                hint="use tcp, or let UCX_TLS and UCX_NET_DEVICES name fewer transports",
            ) from None
        self._thread = threading.Thread(target=self._progressing, name="kvroute-nixl", daemon=True)
        self._thread.start()

    def attach(self, offer: Attached) -> RemoteMemory | None:
        """Return the memory that a peer offers; None if it offers none.

        Raises:
            WireError: the offer is not usable here.
        """
        if not offer.metadata:
            return None
        if len(offer.extents) != len(self._extents):
            raise WireError("nixl", f"the peer offers {len(offer.extents)} regions, not {len(self._extents)}")
        if len({extent.kind for extent in offer.extents}) > 1:
            raise WireError("nixl", "the peer offers host memory and device memory")
        with self._lock:
            peer = self._peers.get(offer.metadata)
            if peer is None:
                peer = self._peers[offer.metadata] = _PeerAgent(offer.metadata, self._added(offer.metadata))
            elif peer.broken:
                if peer.reads:
                    raise WireError("nixl", "an earlier read from the peer has failed and others have not ended")
                del self._peers[offer.metadata]
                self._remove(peer)
                peer.name, peer.broken = self._added(offer.metadata), False
                self._peers[offer.metadata] = peer
            peer.users += 1
        return RemoteMemory(self, peer, offer.extents)

    def detach(self, peer: _PeerAgent) -> None:
        """A connection that `attach` was called for is closed, and reads nothing any more."""
        with self._lock:
            peer.users -= 1
            if not peer.users and self._peers.get(peer.metadata) is peer:
                del self._peers[peer.metadata]
                self._remove(peer)

    def _added(self, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise WireError("nixl", f"the peer's NIXL agent cannot be added: {error}") from None
        return name.decode() if isinstance(name, bytes) else name

    def _remove(self, peer: _PeerAgent) -> None:
        try:
            self._agent.remove_remote_agent(peer.name)
        except Exception as error:
            log.warning("the NIXL agent %s cannot be removed: %s", peer.name, error)

    def read(self, peer: _PeerAgent, theirs: Sequence[Extent], copies: Sequence[BlockCopy]) -> Iterator[None]:
        """Copy blocks of a peer's regions, at `theirs`, into this cache; yields while the copy is in progress.

        A read that has begun must be continued to its end: until then bytes may arrive in the blocks `here`.

        Raises:
            WireError: the read failed. Nothing was seen to arrive after `_GRACE_S`, but NIXL does not guarantee it.
        """
        spans = [self._spans(self._extents[copy.region], theirs[copy.region], copy) for copy in copies]
        here, there = (np.concatenate(side) for side in zip(*spans, strict=True))
        handle, failure = None, ""
        with self._lock:
            peer.reads += 1
        try:
            try:
                with self._lock:
                    local = self._agent.get_xfer_descs(here, self._kind)
                    remote = self._agent.get_xfer_descs(there, theirs[0].kind)
                    handle = self._agent.initialize_xfer("READ", local, remote, peer.name)
                    state = self._agent.transfer(handle)
                while state == "PROC":
                    if self._closed.is_set():
                        raise WireError("reset", "closed")
                    yield
                    with self._lock:
                        state = self._agent.check_xfer_state(handle)
                failure = "" if state == "DONE" else f"ended in state {state}"
            except OSError:
                raise
            except Exception as error:
                failure = f"failed: {error}"
            if failure:
                yield from self._grace()
        finally:
            with self._lock:
                if handle is not None:
                    with suppress(Exception):  # it may have been freed with the connection to the peer
                        self._agent.release_xfer_handle(handle)
                peer.broken = peer.broken or bool(failure)
                peer.reads -= 1
        if failure:
            raise WireError("nixl", f"a read from the peer's memory {failure}")

    def _grace(self) -> Iterator[None]:
        """Yield until the other parts of a failed read have arrived or failed, too."""
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end and self._progressed():
            yield

    def _spans(self, mine: Extent, theirs: Extent, copy: BlockCopy) -> tuple[Spans, Spans]:
        here, there = joined(addresses(mine, copy.here), addresses(theirs, copy.there), self._block_bytes[copy.region])
        return _on_device(here, mine.device), _on_device(there, theirs.device)

    def progress_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Let peers without RDMA read until `ready` returns True. Return False if it does not in time.

        Raises:
            WireError: the agent has failed.
        """
        began = time.monotonic()
        for pause_s in _pauses():
            if ready():
                return True
            if time.monotonic() - began >= timeout_s:
                return False
            if not self._progressed():
                raise WireError("nixl", "the NIXL agent has failed")
            time.sleep(pause_s)
        return False

    def _progressing(self) -> None:
        while not self._closed.wait(_PROGRESS_S):
            if not self._progressed():
                return

    def _progressed(self) -> bool:
        """Let reads make progress. Return False once the agent has failed."""
        if self.failed:
            return False
        try:
            with self._lock:
                self._agent.get_new_notifs()
        except Exception as error:
            self.failed = True
            log.warning("KV is transferred over TCP from now on, because the NIXL agent has failed: %s", error)
        return not self.failed

    def close(self) -> None:
        """Give up reads in progress. The process is about to end: its cache is not used any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()


class RemoteMemory:
    """A peer's KV cache, with the same layout as this one."""

    def __init__(self, memory: SharedMemory, peer: _PeerAgent, extents: tuple[Extent, ...]) -> None:
        self._memory, self._peer, self._extents = memory, peer, extents

    def close(self) -> None:
        """The connection to the peer is closed, and reads nothing any more. Call it once."""
        self._memory.detach(self._peer)

    def read(self, copies: Sequence[BlockCopy], beat: Callable[[], None], beat_s: float) -> None:
        """Carry out copies, at least one. Returns when all bytes are there.

        Args:
            beat: called every `beat_s` seconds. If it fails, the read is still continued to its end.

        Raises:
            WireError: the read failed, and no byte arrives any more.
            OSError: `beat` failed.
        """
        failure: OSError | None = None
        began = time.monotonic()
        reading = self._memory.read(self._peer, self._extents, copies)
        for _, pause_s in zip(reading, _pauses(), strict=False):
            time.sleep(pause_s)
            if failure is None and time.monotonic() - began >= beat_s:
                began = time.monotonic()
                try:
                    beat()
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure


def ranges(extents: Collection[Extent]) -> list[tuple[int, int, int]]:
    """Return the memory of regions as disjoint ranges (address, bytes, device number).

    Regions that overlap are parts of one tensor. Regions that are only adjacent may be separate allocations of a GPU's
    memory, which hardware cannot read through one key.
    """
    found: list[tuple[int, int, int]] = []
    for device, start, end in sorted((e.device, e.address, e.address + e.nbytes) for e in extents):
        if found and found[-1][2] == device and start < found[-1][0] + found[-1][1]:
            address, nbytes, _ = found[-1]
            found[-1] = (address, max(nbytes, end - address), device)
        else:
            found.append((start, end - start, device))
    return found


def addresses(extent: Extent, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the address of each block.

    Raises:
        WireError: a block is not part of the region.
    """
    numbers = np.asarray(blocks, np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < extent.blocks:
        raise WireError("malformed", f"block {numbers.min()} or {numbers.max()} is not one of {extent.blocks} blocks")
    return extent.address + numbers * extent.stride_bytes


def joined(
    here: npt.NDArray[np.int64], there: npt.NDArray[np.int64], nbytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Join blocks that are adjacent on both sides. Return rows (address, bytes) of each side; the rows correspond.

    Args:
        here, there: address of each block on the two sides.
        nbytes: size of a block.
    """
    starts = np.flatnonzero(np.r_[True, (np.diff(here) != nbytes) | (np.diff(there) != nbytes)])
    sizes = np.diff(np.r_[starts, len(here)]) * nbytes
    return np.c_[here[starts], sizes], np.c_[there[starts], sizes]


def _on_device(rows: npt.NDArray[np.int64], device: int) -> Spans:
    spans: Spans = np.c_[rows, np.full(len(rows), device)].astype(np.uint64)
    return spans


def _pauses() -> Iterator[float]:
    """Yield pauses between two polls, in seconds: short ones first."""
    busy_until = time.monotonic() + _BUSY_S
    while time.monotonic() < busy_until:
        yield _BUSY_PAUSE_S
    while True:
        yield _PAUSE_S
