"""Small blocks whose bytes follow from their key, for tests of the block store; as a program, a writer to be killed."""

from __future__ import annotations

import hashlib
import sys
from itertools import pairwise
from pathlib import Path

from kvroute_engine.block_store import BlockFormat, PosixStore, PosixStoreSpec

FORMAT = BlockFormat("toy", layers=3, block_tokens=4, layer_bytes=4000)
EXTENT_BYTES = 4096 + FORMAT.block_bytes
ALL = range(FORMAT.layers)


def content(key: bytes) -> bytes:
    """Return the block of a key."""
    return hashlib.shake_128(key).digest(FORMAT.block_bytes)


def chain(name: str, length: int) -> list[bytes]:
    """Return the keys of a prompt's blocks."""
    keys = [hashlib.blake2b(name.encode(), digest_size=16).digest()]
    while len(keys) < length:
        keys.append(hashlib.blake2b(keys[-1], digest_size=16).digest())
    return keys[:length]


def opened(folder: Path, blocks: int = 1000, verify: bool = True) -> PosixStore:
    """Open a store with room for that many blocks."""
    return PosixStore(folder, FORMAT, PosixStoreSpec(capacity_bytes=blocks * EXTENT_BYTES, verify=verify))


def write_chain(store: PosixStore, keys: list[bytes]) -> int:
    """Write blocks in order; return how many are stored."""
    for count, (parent, key) in enumerate(pairwise([b"", *keys])):
        if not store.write(key, parent, memoryview(content(key))):
            return count
    return len(keys)


def wrong(store: PosixStore, keys: list[bytes]) -> list[bytes]:
    """Return those of the blocks' leading keys whose bytes are not theirs."""
    into = memoryview(bytearray(FORMAT.block_bytes * len(keys)))
    count = store.read(keys, ALL, into)
    size = FORMAT.block_bytes
    return [key for at, key in enumerate(keys[:count]) if into[at * size : (at + 1) * size] != content(key)]


def report(line: str) -> None:
    """Print a line at once, before this process may be killed."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Write chains without end and report each published block's chain and position: FOLDER NAME CAPACITY_BLOCKS."""
    folder, name, blocks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    store = opened(folder, blocks)
    report("open")
    number = 0
    while True:
        keys = chain(f"{name}-{number}", 8)
        for depth in range(len(keys)):
            if write_chain(store, keys[: depth + 1]) == depth + 1:
                report(f"{name}-{number} {depth + 1}")
        if wrong(store, keys):
            report("wrong")
        number += 1


if __name__ == "__main__":
    main()
