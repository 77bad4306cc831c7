"""The storage NIC and buffer of an emulated node, in virtual time: order, times, quota, cancellation, write-back."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.emulator.errors import ApiError
from kvroute.emulator.kv.storage import (
    HOLD_S,
    EmulatedBufferRead,
    ModelledNic,
    StorageNode,
    StoredBlocks,
)
from kvroute.emulator.kv.storage_tier import StorageTier
from kvroute.emulator.prompt import EmulatedPrompt
from kvroute_engine.block_keys import block_keys

MODEL, BLOCK_BYTES, RATE = "m", 10.0, 100.0
KEYS = [bytes([number]) for number in range(100)]


class Virtual:
    """A clock whose time passes only in `advance`."""

    def __init__(self) -> None:
        self.time, self._alarms, self._order = 0.0, list[tuple[float, int, list[Callable[[], None]]]](), count()

    def now(self) -> float:
        return self.time

    def at(self, when_s: float, ring: Callable[[], None]) -> VirtualAlarm:
        cell = [ring]
        heapq.heappush(self._alarms, (when_s, next(self._order), cell))
        return VirtualAlarm(cell)

    async def advance(self, to: float) -> None:
        """Let the time pass; tasks run after every alarm."""
        await settle()
        while self._alarms and self._alarms[0][0] <= to + 1e-9:
            self.time, _, cell = heapq.heappop(self._alarms)
            for ring in cell:
                ring()
            await settle()
        self.time = to


class VirtualAlarm:
    def __init__(self, cell: list[Callable[[], None]]) -> None:
        self._cell = cell

    def cancel(self) -> None:
        self._cell.clear()


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def node(buffer_bytes: float = 1e9) -> tuple[Virtual, StorageNode]:
    clock, store = Virtual(), StoredBlocks()
    store.add(MODEL, KEYS)
    return clock, StorageNode(clock, ModelledNic(clock, store, RATE, RATE / 2), buffer_bytes)


def stored(storage: StorageNode) -> StoredBlocks:
    assert isinstance(storage.medium, ModelledNic)
    return storage.medium.store


def begun(storage: StorageNode, name: str, blocks: int) -> asyncio.Task[EmulatedBufferRead]:
    return asyncio.ensure_future(storage.read(name, MODEL, KEYS[:blocks], BLOCK_BYTES))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_reads_are_served_in_order_at_the_rate_of_the_nic(sizes: list[int]) -> None:
    async def main() -> None:
        clock, storage = node()
        tasks = [begun(storage, f"r{number}", blocks) for number, blocks in enumerate(sizes)]
        await settle()
        ends_s = np.cumsum(sizes) * BLOCK_BYTES / RATE
        for number, (task, end_s) in enumerate(zip(tasks, ends_s.tolist(), strict=True)):
            if sizes[number]:
                await clock.advance(end_s - 1e-6)
                assert not task.done()
            await clock.advance(end_s)
            read = await task
            assert (read.blocks, read.kv_bytes) == (sizes[number], sizes[number] * BLOCK_BYTES)
            assert read.waited_s == pytest.approx(end_s - read.in_service_s)
        assert storage.queued_bytes == 0
        assert storage.buffered_bytes == storage.read_bytes == sum(sizes) * BLOCK_BYTES

    run(main())


def test_a_full_buffer_blocks_the_next_reads_until_it_is_released() -> None:
    async def main() -> None:
        clock, storage = node(buffer_bytes=100.0)
        first, second, third = (begun(storage, name, blocks) for name, blocks in (("a", 8), ("b", 5), ("c", 1)))
        await clock.advance(50.0)
        assert (first.done(), second.done(), third.done()) == (True, False, False)  # first in, first out: c waits, too
        storage.release("a")
        await clock.advance(51.0)
        assert second.done()
        assert third.done()
        assert storage.buffered_bytes == 60.0
        for name in ("b", "c", "c", "never"):
            storage.release(name)
        assert storage.buffered_bytes == 0.0
        with pytest.raises(ApiError, match=r"raise `storage\.buffer`"):
            await storage.read("d", MODEL, KEYS[:11], BLOCK_BYTES)

    run(main())


@pytest.mark.parametrize("when_s", [0.0, 0.3, 5.0], ids=["waiting for room", "reading", "complete"])
def test_a_cancelled_read_frees_its_room(when_s: float) -> None:
    async def main() -> None:
        clock, storage = node(buffer_bytes=60.0)
        holder = begun(storage, "holder", 6) if not when_s else None
        await settle()
        task = begun(storage, "a", 5)
        await clock.advance(when_s)
        assert task.done() == (when_s == 5.0)
        if task.done():
            storage.release("a")
        else:
            task.cancel()
        await settle()
        if holder is not None:
            await clock.advance(1.0)
            storage.release("holder")
        assert storage.buffered_bytes == 0.0
        assert storage.queued_bytes == 0.0
        again = begun(storage, "a", 6)
        await clock.advance(10.0)
        assert (await again).blocks == 6

    run(main())


def test_a_buffer_that_nothing_fetches_is_released_after_its_hold_time() -> None:
    async def main() -> None:
        clock, storage = node()
        task = begun(storage, "a", 5)
        await clock.advance(1.0)
        assert task.done()
        with pytest.raises(ApiError, match="exists"):
            await storage.read("a", MODEL, KEYS[:1], BLOCK_BYTES)
        await clock.advance(0.5 + HOLD_S - 0.1)
        assert storage.complete_read("a") is not None
        await clock.advance(1.0 + HOLD_S)
        assert storage.complete_read("a") is None
        assert storage.buffered_bytes == 0.0

    run(main())


def test_only_leading_blocks_that_are_stored_are_read() -> None:
    async def main() -> None:
        clock, storage = node()
        task = asyncio.ensure_future(storage.read("a", MODEL, [KEYS[0], b"other", KEYS[1]], BLOCK_BYTES))
        await clock.advance(1.0)
        assert (await task).blocks == 1
        other = asyncio.ensure_future(storage.read("b", "another model", KEYS[:3], BLOCK_BYTES))
        await clock.advance(2.0)
        assert (await other).blocks == 0

    run(main())


def test_full_blocks_are_stored_when_the_nic_has_written_them() -> None:
    """Of a prompt of 40 tokens and an output of 10, three blocks of 16; the second write adds one."""

    async def main() -> None:
        clock, storage = node()
        tier = StorageTier(storage, MODEL, 16, BLOCK_BYTES, None)
        prompt = EmulatedPrompt.of(np.arange(40), 16, salt="tenant")
        keys = block_keys(np.concatenate([np.arange(40), np.frombuffer(b"word" * 10, "<u4")]), 16, "tenant")
        tier.write_back(prompt)
        await clock.advance(0.39)
        assert stored(storage).match(MODEL, keys) == 0
        await clock.advance(0.4)
        assert stored(storage).match(MODEL, keys) == 2
        tier.write_back(prompt, [b"word"] * 10)
        await clock.advance(0.6)
        assert stored(storage).match(MODEL, keys) == 3
        assert storage.written_bytes == 30.0
        assert stored(storage).match(MODEL, block_keys(np.arange(40), 16)) == 0  # without the salt
        assert tier.staged_tokens(prompt, 0, 2, keys[1].hex()) == 32
        assert tier.staged_tokens(prompt, 0, 2, keys[0].hex()) == 0
        assert tier.staged_tokens(prompt, 0, 3, keys[2].hex()) == 0

    run(main())
