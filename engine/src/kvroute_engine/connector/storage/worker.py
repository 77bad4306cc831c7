"""The connector's use of a store in a vLLM worker: loads staged blocks layer by layer, copies full blocks and has them
written. No vllm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute_engine.connector.blocks import BlockLayout, Fence, Region
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.storage.loads import LoadPart
from kvroute_engine.connector.storage.plan import StorageStep
from kvroute_engine.connector.storage.write_back import Writes
from kvroute_engine.connector.transfer.block_writer import BlockWriter
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.pool import ConnectionPool, buffer_peer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer, TransferProgress

FAILED_STEPS = 2
"""Steps after one with a failed load whose writes are skipped: vLLM may have planned them before it learned of the
failure, and then they contain blocks computed from KV that did not arrive."""


@dataclass(frozen=True, slots=True)
class WrittenBlocks:
    """Report of one worker to the scheduler."""

    rank: int
    """Its tensor-parallel rank."""
    keys: tuple[bytes, ...]
    """Blocks that are in the store."""
    settled_number: int | None
    """Number of the last step whose writes are all over; None: some are not."""


class StorageWorker:
    """One tensor-parallel rank. Created only if a buffer server is configured."""

    def __init__(
        self,
        regions: Sequence[Region],
        layout: BlockLayout,
        options: ConnectorSettings,
        layers: Mapping[str, Sequence[int]],
        fence: Callable[[], Fence | None] = lambda: None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        layers: by a layer's name, the numbers of the regions that hold its KV.
        fence: makes a fence behind the work that the model has queued on its device.
        """
        self._regions, self._options, self._layers, self._rank = regions, options, layers, layout.rank
        self._fence = fence
        token = options.secret() if environ is None else options.secret(environ)
        self._client = TransferClient(regions, layout, options, environ=environ)
        self._pool = ConnectionPool(layout, options, token)
        self._writer = BlockWriter(
            self._pool, buffer_peer(options.buffer), options.write_back_bytes, checksum=options.checksum
        )
        self._loading: list[TransferProgress] = []
        self._failed_blocks: set[int] = set()
        self._copied: set[str] = set()
        self._step = StorageStep()
        self._skip = 0
        """Number of steps whose writes are still skipped."""
        self._settled_number = 0
        self._results: list[Result] = []

    def begin(self, step: StorageStep) -> None:
        """Copy the blocks to write, then start the loads of a step."""
        self._step = step
        for writes in step.writes:
            if not self._skip:
                self._copy(writes)
            if writes.ends:
                self._copied.add(writes.request_id)
        self._skip = max(self._skip - 1, 0)
        for part in step.unused:
            self._client.release(buffer_peer(part.data), part.read_id)
        self._loading = [
            self._client.start(self._transfer(load.request_id, part)) for load in step.loads for part in load.parts
        ]

    def wait_for_layer(self, layer: str) -> None:
        """Return when the staged blocks of a layer have arrived, or cannot arrive any more."""
        for progress in self._loading:
            progress.wait(self._layers.get(layer, ()))

    def finish(self) -> None:
        """End the loads of the step, and record the blocks that have not arrived."""
        for progress in self._loading:
            progress.wait(range(len(self._regions)))
        self._loading = []
        for result in self._client.results():
            self._results.append(result)
            if result.failure:
                self._failed_blocks.update(result.transfer.blocks)
                self._skip = FAILED_STEPS

    def ended(self) -> set[str]:
        """Return the requests that are over and whose blocks have been copied; each once."""
        copied, self._copied = self._copied, set()
        return copied

    def failed_blocks(self) -> set[int]:
        """Return the blocks whose load has failed; each once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @property
    def idle(self) -> bool:
        """True if nothing waits to be written or reported."""
        return self._writer.idle

    def results(self) -> list[Result]:
        """Return the loads that have ended since the last call, for the counts."""
        results, self._results = self._results, []
        return results

    def written(self) -> WrittenBlocks | None:
        """Return what the scheduler does not know yet; None if there is nothing."""
        keys, idle = tuple(self._writer.take_stored()), self._writer.idle
        settled_number = self._step.number if idle else None
        if not keys and (settled_number is None or settled_number == self._settled_number):
            return None
        if settled_number is not None:
            self._settled_number = settled_number
        return WrittenBlocks(self._rank, keys, settled_number)

    def close(self) -> None:
        """End all threads and connections."""
        self._pool.close()
        self._writer.close()
        self._client.close()

    def _copy(self, writes: Writes) -> None:
        """Copy the blocks that are not known to be stored, and queue them."""
        block_bytes = sum(region.block_bytes for region in self._regions)
        wanted = self._writer.wanted([write.key for write in writes.blocks], block_bytes)
        fresh = [writes.blocks[at] for at in wanted]
        if not fresh:
            return
        if computed := self._fence():
            computed()
        blocks = [write.block for write in fresh]
        columns = [
            np.frombuffer(b"".join(region.outgoing(blocks)), np.uint8).reshape(len(blocks), region.block_bytes)
            for region in self._regions
        ]
        for row, write in zip(np.concatenate(columns, axis=1), fresh, strict=True):
            self._writer.add(write.key, write.parent, row.tobytes())

    def _transfer(self, request_id: str, part: LoadPart) -> BlockTransfer:
        return BlockTransfer(
            request_id=f"{request_id} {part.read_id}",
            peer=buffer_peer(part.data),
            remote_request_id=part.read_id,
            first=part.first,
            blocks=part.blocks,
            checksum=self._options.checksum,
            prompt=part.key,
            release=not part.keep,
            fence=self._fence(),
        )
