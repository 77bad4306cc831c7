"""Read bandwidth of full blocks from a store on files, compared with plain sequential preadv of the same files.

`python -m bench.store [--json]`. Each round measures all ways in turn, in rotated order. The page cache is either warm
(all files were read before) or cold (the files' pages are dropped before each measurement). fio reads the same files
with one job and psync, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.measurement import Row, show

from kvroute_engine.block_store import BlockFormat, PosixStore, PosixStoreSpec

FORMAT = BlockFormat("bench", layers=32, block_tokens=64, layer_bytes=128 * 1024)
BLOCKS, ROUNDS = 128, 5
TARGET = 0.8


class Reading:
    """A store of one chain and the ways to read it; each way returns GB/s (1e9 bytes)."""

    def __init__(self, folder: Path) -> None:
        self._keys = [number.to_bytes(16, "big") for number in range(1, BLOCKS + 1)]
        self._nbytes = BLOCKS * FORMAT.block_bytes
        self._into = memoryview(bytearray(os.urandom(FORMAT.block_bytes)) * BLOCKS)
        capacity_bytes = 2 * self._nbytes
        self._checked = PosixStore(folder, FORMAT, PosixStoreSpec(capacity_bytes=capacity_bytes))
        self._unchecked = PosixStore(folder, FORMAT, PosixStoreSpec(capacity_bytes=capacity_bytes, verify=False))
        for parent, key in pairwise([b"", *self._keys]):
            assert self._checked.write(key, parent, self._into[: FORMAT.block_bytes])
        os.sync()
        self._paths = [next((folder / "blocks").rglob(key.hex())) for key in self._keys]

    def close(self) -> None:
        """End the threads of both stores."""
        self._checked.close()
        self._unchecked.close()

    def drop(self) -> None:
        """Drop the files' pages from the page cache."""
        for path in self._paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def plain(self) -> float:
        """Read the files one after the other with one preadv each."""
        began = time.perf_counter()
        size, header = FORMAT.block_bytes, 4096
        for at, path in enumerate(self._paths):
            fd = os.open(path, os.O_RDONLY)
            assert os.preadv(fd, [self._into[at * size : (at + 1) * size]], header) == size
            os.close(fd)
        return self._nbytes / (time.perf_counter() - began) / 1e9

    def store(self) -> float:
        """Read all blocks and compare their checksums."""
        return self._by(self._checked)

    def store_unchecked(self) -> float:
        """Read all blocks without checksums."""
        return self._by(self._unchecked)

    def fio(self) -> float:
        """Return the bandwidth that fio reports for the same files."""
        command = [
            "fio",
            "--name=read",
            "--rw=read",
            f"--bs={FORMAT.block_bytes}",
            "--ioengine=psync",
            "--invalidate=0",
        ]
        command += ["--readonly", "--output-format=json", f"--opendir={self._paths[0].parents[1]}"]
        command += ["--file_service_type=sequential"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        [job] = json.loads(printed[printed.index("{") :])["jobs"]
        return float(job["read"]["bw_bytes"]) / 1e9

    def _by(self, store: PosixStore) -> float:
        began = time.perf_counter()
        assert store.read(self._keys, range(FORMAT.layers), self._into) == BLOCKS
        return self._nbytes / (time.perf_counter() - began) / 1e9


def measured(reading: Reading, state: str) -> list[Row]:
    """Return the rows of one state of the page cache."""
    methods: list[Callable[[], float]] = [reading.plain, reading.store, reading.store_unchecked]
    methods += [reading.fio] if shutil.which("fio") else []
    reading.plain()
    figures: dict[str, list[float]] = {method.__name__: [] for method in methods}
    for number in range(ROUNDS):
        for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
            if state == "cold":
                reading.drop()
            figures[method.__name__].append(method())
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ours = {"store": "checksums compared", "store_unchecked": "without checksums"}
    peers = {"plain": "sequential preadv", "fio": "fio"}
    return [
        Row(
            measure=f"full blocks read, {state} page cache, {how}, against {peer_name}",
            unit="GB/s",
            better="higher",
            ours=medians[name],
            peer=medians[peer],
            peer_name=peer_name,
            target=TARGET * medians[peer],
            note="" if "fio" in medians else "fio is not installed",
        )
        for name, how in ours.items()
        for peer, peer_name in peers.items()
        if peer in medians
    ]


def main() -> None:
    """Write a store into a temporary folder, read it in both states of the page cache, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--folder", type=Path, help="where the store is written; default the system's temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        reading = Reading(Path(name))
        rows = [row for state in ("warm", "cold") for row in measured(reading, state)]
        reading.close()
    show(rows, given.json)


if __name__ == "__main__":
    main()
