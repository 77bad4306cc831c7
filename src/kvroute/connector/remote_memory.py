"""Reads of KV blocks directly from a peer's memory with NIXL, by RDMA where the hardware has it. No nixl import.

The decode instance reads, so that no peer ever writes into its cache. A read is optimistic: the prefill instance may
take its blocks back while they are being read. What was read counts only after the prefill instance has confirmed that
the blocks were held until the end of the read (see `wire.Copied`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvroute.connector.blocks import Extent, Region
from kvroute.connector.wire import Attached, WireError, encode
from kvroute.types import InputError

READ_BYTES_MAX, READ_BYTES_MIN = 128 << 20, 8 << 20
"""Largest read, and smallest one towards the end of a transfer, in bytes. Each costs two messages and some hundred
microseconds; they are the more, the more blocks are not adjacent."""
READ_BLOCKS_MAX = 8192
"""Most blocks of one read, so that their numbers fit into a frame's header."""
_BUSY_S = 0.02
"""Time for which a thread polls often, in seconds; a read takes less where the network is fast."""
_BUSY_PAUSE_S, _PAUSE_S = 50e-6, 1e-3
Spans = npt.NDArray[np.uint64]
"""Rows of address, bytes, device number."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Blocks of one region: those of the peer, `there`, are copied to `here`, in order."""

    region: int
    here: Sequence[int]
    there: Sequence[int]


class Agent(Protocol):
    """What is used of `nixl_agent`. Its errors are of no common class."""

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        """Register ranges of memory, given as (address, bytes, device number, name)."""
        ...

    def get_agent_metadata(self) -> bytes:
        """Return what another agent needs to read the registered memory."""
        ...

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        """Add another agent and return its name."""
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


class SharedMemory:
    """This rank's KV cache, which peers may read, and the caches of peers. Thread-safe."""

    def __init__(self, regions: Sequence[Region], agent: Agent) -> None:
        """Register the regions, which are all in host memory or all in device memory.

        Raises:
            InputError: the offer would be too long for a message.
        """
        self._agent, self._lock = agent, threading.Lock()
        self._extents = tuple(region.extent for region in regions)
        self._block_bytes = [region.block_bytes for region in regions]
        self._peers: dict[bytes, str] = {}
        """Names of the peers' agents, by their metadata."""
        self._closed = threading.Event()
        (self._kind,) = {extent.kind for extent in self._extents}
        agent.register_memory([(*span, "") for span in ranges(self._extents)], self._kind)
        self.offer = Attached(metadata=agent.get_agent_metadata(), extents=self._extents)
        """Answer to a peer that wants to read this cache."""
        try:
            encode(self.offer)
        except WireError as error:
            raise InputError(
                f"NIXL's keys of {len(self._extents)} regions do not fit into a message: {error}",
                where="kv_connector_extra_config.data_plane",
                hint="use tcp, or let UCX_TLS and UCX_NET_DEVICES name fewer transports",
            ) from None

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
            if offer.metadata not in self._peers:
                try:
                    name = self._agent.add_remote_agent(offer.metadata)
                except Exception as error:
                    raise WireError("nixl", f"the peer's NIXL agent cannot be added: {error}") from None
                self._peers[offer.metadata] = name.decode() if isinstance(name, bytes) else name
            return RemoteMemory(self, self._peers[offer.metadata], offer.extents)

    def read(self, peer: str, theirs: Sequence[Extent], copies: Sequence[BlockCopy]) -> Iterator[None]:
        """Copy blocks of a peer's regions, at `theirs`, into this cache; yields while the copy is in progress.

        A read that has begun must be continued to its end: until then bytes may arrive in the blocks `here`.

        Raises:
            WireError: the read failed; no byte arrives any more.
        """
        spans = [self._spans(self._extents[copy.region], theirs[copy.region], copy) for copy in copies]
        here, there = (np.concatenate(side) for side in zip(*spans, strict=True))
        try:
            with self._lock:
                local = self._agent.get_xfer_descs(here, self._kind)
                remote = self._agent.get_xfer_descs(there, theirs[0].kind)
                handle = self._agent.initialize_xfer("READ", local, remote, peer)
                state = self._agent.transfer(handle)
            while state == "PROC":
                if self._closed.is_set():
                    raise WireError("reset", "closed")
                yield
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            with self._lock:
                self._agent.release_xfer_handle(handle)
        except OSError:
            raise
        except Exception as error:
            raise WireError("nixl", f"a read from the peer's memory failed: {error}") from None
        if state != "DONE":
            raise WireError("nixl", f"a read from the peer's memory ended in state {state}")

    def _spans(self, mine: Extent, theirs: Extent, copy: BlockCopy) -> tuple[Spans, Spans]:
        here, there = joined(addresses(mine, copy.here), addresses(theirs, copy.there), self._block_bytes[copy.region])
        return _on_device(here, mine.device), _on_device(there, theirs.device)

    def progress_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Let peers without RDMA read until `ready` returns True. Return False if it does not in time."""
        began = time.monotonic()
        for pause_s in _pauses():
            if ready():
                return True
            if time.monotonic() - began >= timeout_s:
                return False
            with self._lock:
                self._agent.get_new_notifs()
            time.sleep(pause_s)
        return False

    def close(self) -> None:
        """Give up reads in progress. The process is about to end: its cache is not used any more."""
        self._closed.set()


class RemoteMemory:
    """A peer's KV cache, with the same layout as this one."""

    def __init__(self, memory: SharedMemory, peer: str, extents: tuple[Extent, ...]) -> None:
        self._memory, self._peer, self._extents = memory, peer, extents

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
