"""The decode instance's side: pulls a request's blocks over several connections into its own KV cache.

Every transfer ends in exactly one `Result`, successful or not. In both cases the producer is notified that it may free
the blocks, unless the transfer says otherwise. Data that a broken connection has not delivered is fetched over another
one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvroute_engine.connector.blocks import BlockLayout, Region
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.authentication import fresh_nonce
from kvroute_engine.connector.transfer.pool import ConnectionPool, PeerServer
from kvroute_engine.connector.transfer.remote_memory import SharedMemory
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer, TransferLane, TransferProgress
from kvroute_engine.connector.transfer.wire import Release, Released

log = logging.getLogger(__name__)
SHARE_BYTES_MIN = 256 << 10
"""Minimum bytes per connection: for fewer, an additional connection is not worth its round trips."""
THREADS_MAX = 256


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a transfer; `failure` is empty, or one word as in `WireError.code`."""

    transfer: BlockTransfer
    nbytes: int
    seconds: float
    failure: str = ""
    nixl_bytes: int = 0
    """Part of `nbytes` that was read from the peer's memory."""


class TransferClient:
    """Starts transfers and returns their results. `close` ends all of them."""

    def __init__(
        self,
        regions: Sequence[Region],
        layout: BlockLayout,
        options: ConnectorSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        """Args: `memory`: the regions, into which peers' blocks are read by NIXL; None: TCP only."""
        self._regions, self._options, self._clock = regions, options, clock
        token = options.secret() if environ is None else options.secret(environ)
        self._pool = ConnectionPool(layout, options, token, memory)
        self._lock = threading.Lock()
        self._running: dict[str, TransferProgress] = {}
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kv-pull")

    def start(self, transfer: BlockTransfer) -> TransferProgress:
        """Start a transfer. Its outcome will be among `results`."""
        assert transfer.blocks, "a transfer of no blocks is a release"
        progress = TransferProgress(transfer, self._regions, fresh_nonce().hex(), self._clock())
        with self._lock:
            self._running[transfer.request_id] = progress
        # A transfer whose prompt has not been started yet waits with one connection.
        self._widen(progress, 1 if transfer.wait_s else self._connections(transfer))
        return progress

    def cancel(self, request_id: str) -> None:
        """Cancel a transfer that is no longer needed. It ends soon, with the failure `cancelled`."""
        with self._lock:
            progress = self._running.get(request_id)
        if progress:
            progress.cancel()

    def release(self, peer: PeerServer, remote_request_id: str) -> None:
        """Notify `peer` that the request will not be fetched. If the message is lost, the blocks expire."""
        self._threads.submit(self._release, peer, remote_request_id)

    def results(self) -> list[Result]:
        """Return the transfers that have ended since the last call."""
        ended = []
        while not self._results.empty():
            ended.append(self._results.get())
        return ended

    def wait(self, timeout_s: float) -> Result | None:
        """Return the next transfer to end, or None if none ends in time."""
        try:
            return self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Abort the transfers in progress (they fail with `reset`) and wait for all threads."""
        self._pool.close()
        self._threads.shutdown(wait=True)

    def _connections(self, transfer: BlockTransfer) -> int:
        nbytes = len(transfer.blocks) * sum(region.block_bytes for region in self._regions)
        return max(1, min(transfer.connections or self._options.connections, nbytes // SHARE_BYTES_MIN))

    def _widen(self, progress: TransferProgress, lanes: int) -> None:
        """Use `lanes` connections for the transfer from now on."""
        with progress.lock:
            fresh = range(progress.lanes, lanes)
            progress.lanes = max(progress.lanes, lanes)
            progress.lanes_left += len(fresh)
        wide = self._connections(progress.transfer)
        for number in fresh:
            beat_s = self._options.timeout_s / 4
            lane = TransferLane(number, progress, self._pool, lambda: self._widen(progress, wide), beat_s)
            try:
                self._threads.submit(self._run, progress, lane)
            except RuntimeError:  # closed in the meantime
                self._ended(progress, "reset")

    def _run(self, progress: TransferProgress, lane: TransferLane) -> None:
        try:
            failure = lane.carry()
        except Exception:
            # Our own bug: the request must still end, because vLLM would wait for it forever.
            log.exception("KV transfer of %s", progress.transfer.request_id)
            failure = "bug"
        self._ended(progress, failure)

    def _ended(self, progress: TransferProgress, failure: str) -> None:
        with progress.lock:
            progress.lanes_left -= 1
            progress.failure = progress.failure or failure
            if progress.lanes_left:
                return
        transfer, seconds = progress.transfer, self._clock() - progress.began
        # A lane may fail while the others transfer everything. If no lane has failed, everything must be there.
        failure = "" if progress.complete else progress.failure or "malformed"
        with self._lock:
            if self._running.get(transfer.request_id) is progress:
                del self._running[transfer.request_id]
        self._results.put(Result(transfer, progress.nbytes, seconds, failure, progress.nixl_bytes))
        with progress.lock:
            progress.ended = True
            progress.lock.notify_all()
        if transfer.release:
            self._release(transfer.peer, transfer.remote_request_id)

    def _release(self, peer: PeerServer, remote_request_id: str) -> None:
        try:
            channel, reply = self._pool.request(peer, Release(remote_request_id))
        except OSError as error:
            log.info("%s could not be informed that %s may be freed: %s", peer.source, remote_request_id, error)
            return
        if isinstance(reply, Released):
            self._pool.keep(peer, channel)
        else:
            self._pool.drop(channel)
