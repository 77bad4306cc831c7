"""Fault injection for tests: a file selects a fault in the bytes between the cache and the network."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path

from kvroute_engine.connector.transfer.chunk_scheduler import Chunk
from kvroute_engine.connector.transfer.wire import WireError

_FAULT = re.compile(r"(corrupt|stall)-layer-(\d+)(?:-block-(\d+))?")
_CHECK_S = 0.05


def fault_of(text: str) -> tuple[str, int, int | None] | None:
    """Parse `corrupt-layer-2-block-5` into ("corrupt", 2, 5), with None for every block. Return None if invalid."""
    found = _FAULT.fullmatch(text.strip())
    return (found[1], int(found[2]), int(found[3]) if found[3] else None) if found else None


def corrupt(path: Path, piece: Chunk, views: list[memoryview], ending: threading.Event) -> list[memoryview]:
    """Apply the fault in the file: return other bytes than the cache's, or block until the file is removed.

    Raises:
        WireError: the server is closing.
    """
    match fault_of(path.read_text(encoding="utf-8")) if path.exists() else None:
        case ("corrupt", region, block) if region == piece.region:
            struck = range(piece.count) if block is None else [block - piece.first]
            return [memoryview(_damaged(b"".join(views), piece.count, struck))]
        case ("stall", region, _) if region == piece.region:
            while path.exists() and fault_of(path.read_text(encoding="utf-8")) and not ending.wait(_CHECK_S):
                pass
            if ending.is_set():
                raise WireError("reset", "closed")
    return views


def misplaced(path: Path, piece: Chunk, blocks: Sequence[int]) -> list[int]:
    """Apply the fault `corrupt` to a read from memory: return the numbers of other blocks."""
    match fault_of(path.read_text(encoding="utf-8")) if path.exists() else None:
        case ("corrupt", region, block) if region == piece.region:
            struck = range(piece.count) if block is None else [block - piece.first]
            return [number ^ 1 if at in struck else number for at, number in enumerate(blocks)]
    return list(blocks)


def _damaged(data: bytes, count: int, struck: range | list[int]) -> bytes:
    """Return `data`, which is `count` blocks, with the content of the blocks in `struck` changed."""
    size = len(data) // count
    damaged = bytearray(data)
    for number in struck:
        if 0 <= number < count:
            here = slice(number * size, (number + 1) * size)
            damaged[here] = bytes(byte ^ 0x15 for byte in data[here])
    return bytes(damaged)
