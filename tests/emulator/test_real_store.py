"""An emulated node on a real block store in a folder: bytes, order, damage, and a store that fails."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import until
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.emulator.clock import WallClock
from kvroute.emulator.kv.real_store import RealStore
from kvroute.emulator.kv.storage import StorageNode
from kvroute.emulator.kv.storage_tier import StorageTier
from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.types import InputError
from kvroute_engine.block_keys import block_keys
from kvroute_engine.block_store.location import StoreLocation

MODEL, BLOCK, BLOCK_BYTES, SCALE = "a/model", 16, 1e7, 1e-3
TOKENS = np.arange(10 * BLOCK)
KEYS = block_keys(TOKENS, BLOCK)


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[StorageNode]:
    """Run a node of a cluster whose store is this folder."""
    location = StoreLocation(str(folder), 10_000_000)
    storage = StorageNode(WallClock(), RealStore(location, BLOCK, lambda _: BLOCK_BYTES, SCALE), 1e9)
    try:
        yield storage
    finally:
        await storage.close()


async def write(storage: StorageNode) -> None:
    """Write the blocks of a prompt back."""
    StorageTier(storage, MODEL, BLOCK, BLOCK_BYTES, None).write_back(EmulatedPrompt.of(TOKENS, BLOCK))
    await until(lambda: storage.written_bytes > 0)


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/blocks/*/*") if path.is_file())


def test_one_node_reads_what_another_one_has_written(tmp_path: Path) -> None:
    """Every block is in the store with its scaled size, and is written once."""

    async def main() -> None:
        async with node(tmp_path) as here, node(tmp_path) as there:
            await write(here)
            assert [path.stat().st_size for path in files(tmp_path)] == [4096 + round(BLOCK_BYTES * SCALE)] * 10
            StorageTier(there, MODEL, BLOCK, BLOCK_BYTES, None).write_back(EmulatedPrompt.of(TOKENS, BLOCK))
            read = await there.read("a", MODEL, KEYS, BLOCK_BYTES)
            assert (read.blocks, read.kv_bytes) == (10, 10 * BLOCK_BYTES)
            assert read.in_service_s > 0
            assert (there.buffered_bytes, there.read_bytes) == (10 * BLOCK_BYTES, 10 * BLOCK_BYTES)
            assert there.written_bytes == 0
            assert (await there.read("b", "another", KEYS, BLOCK_BYTES)).blocks == 0

    run(main)


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_read_ends_before_a_block_that_is_lost(tmp_path: Path, damage: str) -> None:
    async def main() -> None:
        async with node(tmp_path) as storage:
            await write(storage)
            (path,) = [path for path in files(tmp_path) if path.name == KEYS[4].hex()]
            if damage == "removed":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-1] + b"x")
            assert (await storage.read("a", MODEL, KEYS, BLOCK_BYTES)).blocks == 4
            assert storage.buffered_bytes == 4 * BLOCK_BYTES
            storage.release("a")
            assert storage.buffered_bytes == 0

    run(main)


def test_a_store_that_fails_has_no_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, whatever the number of failures."""

    async def main() -> None:
        async with node(tmp_path) as storage:
            shutil.rmtree(tmp_path)
            tmp_path.write_bytes(b"")
            tier = StorageTier(storage, MODEL, BLOCK, BLOCK_BYTES, None)
            with caplog.at_level(logging.WARNING):
                tier.write_back(EmulatedPrompt.of(TOKENS, BLOCK))
                for name in ("a", "b"):
                    assert (await storage.read(name, MODEL, KEYS, BLOCK_BYTES)).blocks == 0
            assert caplog.text.count("the store fails") == 1
            assert storage.written_bytes == 0

    run(main)


def test_a_store_for_a_cluster_without_one_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["emulate", "examples/small.yaml", "--store", str(tmp_path)])
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("small: the cluster file has no store; add a section `storage`")
