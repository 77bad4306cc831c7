"""The shards of a buffer server: one for each tensor-parallel rank, opened when the first engine of this rank
connects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvroute_engine.block_store import BlockFormat, BlockStore
from kvroute_engine.block_store.location import StoreLocation
from kvroute_engine.buffer.arena import Arena
from kvroute_engine.connector.blocks import BlockLayout
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.block_receiver import BlockReceiver
from kvroute_engine.connector.transfer.handshake import difference
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.errors import InputError

READ_BYTES = 64 << 20
"""Maximum size of one read from the store, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The blocks of one rank: its part of the store, its slots, and the server of held blocks."""

    layout: BlockLayout
    store: BlockStore
    arena: Arena
    server: TransferServer

    def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> int:
        """Read blocks from the store into slots. Return the number of leading blocks that were read."""
        layers, done = range(len(self.layout.region_bytes)), 0
        blocks_max = max(1, READ_BYTES // self.arena.block_bytes)
        for count, memory in self.arena.pieces(slots, blocks_max):
            found = self.store.read(keys[done : done + count], layers, memory)
            done += found
            if found < count:
                break
        return done


class Shards:
    """All ranks of the one model that a buffer server serves. Thread-safe."""

    def __init__(
        self,
        location: StoreLocation,
        options: ConnectorSettings,
        quota_bytes: int,
        on_release: Callable[[], None],
        *,
        lock_memory: bool = False,
    ) -> None:
        """Args: `quota_bytes`: memory of all shards together; `on_release`: see `TransferServer`; `lock_memory`: see
        `Arena`."""
        self._location, self._options, self._quota_bytes = location, options, quota_bytes
        self._on_release, self._lock_memory = on_release, lock_memory
        self._shards: dict[int, Shard] = {}
        self._lock = threading.Lock()

    def complete(self) -> list[Shard]:
        """Return the shards by rank; none as long as a rank is missing."""
        with self._lock:
            shards = [self._shards[rank] for rank in sorted(self._shards)]
        return shards if shards and len(shards) == shards[0].layout.tp else []

    def opened(self) -> list[Shard]:
        """Return the shards that are open, by rank."""
        with self._lock:
            return [self._shards[rank] for rank in sorted(self._shards)]

    def of(self, layout: BlockLayout) -> Shard:
        """Return the shard of a layout that `mismatch` has accepted."""
        with self._lock:
            return self._shards[layout.rank]

    def mismatch(self, layout: BlockLayout) -> str:
        """Open the shard of a layout. Return why that is not possible; empty: it is open."""
        with self._lock:
            for shard in self._shards.values():
                if reason := difference(replace(shard.layout, rank=layout.rank), layout):
                    return reason
            if layout.rank in self._shards:
                return ""
            try:
                self._shards[layout.rank] = self._open(layout)
            except InputError as error:
                return str(error)
            return ""

    def close(self) -> None:
        """End the transfers of all shards."""
        for shard in self.opened():
            shard.server.close()

    def _open(self, layout: BlockLayout) -> Shard:
        sizes = set(layout.region_bytes)
        if len(sizes) != 1:
            raise InputError("layers of different sizes are not supported", where="KV cache")
        form = BlockFormat(
            f"{layout.model} {layout.dtype}", len(layout.region_bytes), layout.block_tokens, layout.region_bytes[0]
        )
        arena = Arena(form.layers, form.layer_bytes, self._quota_bytes // layout.tp, locked=self._lock_memory)
        if not arena.slots:
            raise InputError(
                f"a block has {form.block_bytes} bytes, more than the quota of {self._quota_bytes // layout.tp}",
                where="buffer",
                hint="increase the quota",
            )
        store = self._location.open(form, f"rank{layout.rank}of{layout.tp}", layout.tp)
        server = TransferServer(
            arena.regions,
            layout,
            self._options,
            listen=False,
            receiver=BlockReceiver(store, form.block_bytes),
            on_release=self._on_release,
        )
        return Shard(layout, store, arena, server)
