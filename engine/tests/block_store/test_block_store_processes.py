"""The block store on files with several processes: crashes, eviction by two writers, a folder without write access."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine.tests.block_store.blocks import ALL, EXTENT_BYTES, FORMAT, chain, opened, wrong

ROOT = Path(__file__).resolve().parents[3]
AT_ONCE = 5
LONGEST_S = 0.05
NOBODY_UID = 65_534


def writer(folder: Path, name: str, blocks: int) -> subprocess.Popen[str]:
    """Start a process that writes chains without end."""
    command = [sys.executable, "-m", "engine.tests.block_store.blocks", str(folder), name, str(blocks)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def published(lines: str) -> dict[str, int]:
    """Return the length of each chain that a writer reported, without a last line that the kill cut."""
    reports = [line.split() for line in lines.splitlines(keepends=True) if line.endswith("\n")]
    return {name: int(length) for name, length in reports}


def forked_writer(folder: Path, name: str) -> tuple[int, int]:
    """Fork a process that writes chains without end; return its ID and the descriptor of its reports."""
    reports, out = os.pipe()
    process = os.fork()
    if process == 0:
        from engine.tests.block_store import blocks

        os.dup2(out, 1)
        sys.stdout = os.fdopen(1, "w")
        sys.argv = ["blocks", str(folder), name, "100000"]
        try:
            blocks.main()
        finally:
            os._exit(1)
    os.close(out)
    return process, reports


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_no_published_block_is_lost_and_none_is_torn_by_kills(tmp_path: Path, kills: int) -> None:
    """Writers are killed at random points while others write; every reported block is then stored and intact."""
    draw = random.Random(kills)
    stored: dict[str, int] = {}
    for round_ in range(kills // AT_ONCE):
        started = [forked_writer(tmp_path, f"{round_}-{number}") for number in range(AT_ONCE)]
        texts = [os.read(reports, 5).decode() for _, reports in started]
        for (process, reports), text in zip(started, texts, strict=True):
            time.sleep(draw.uniform(0, LONGEST_S / AT_ONCE))
            os.kill(process, 9)
            os.waitpid(process, 0)
            with os.fdopen(reports) as rest:
                stored |= published((text + rest.read()).removeprefix("open\n"))
    store = opened(tmp_path, 100_000)
    assert len(stored) >= kills // 10
    for name, length in stored.items():
        keys = chain(name, length)
        assert store.match(keys) == length
        assert wrong(store, keys) == []
        assert store.read(keys, ALL, memoryview(bytearray(FORMAT.block_bytes * length))) == length
    assert list((tmp_path / "writing").iterdir()) == []
    store.close()


def test_two_processes_write_and_evict_together(tmp_path: Path) -> None:
    """The files fit into the capacity, no chain has a gap, and neither process reads a wrong byte."""
    capacity_blocks = 40
    writers = [writer(tmp_path, name, capacity_blocks) for name in ("x", "y")]
    texts = []
    for process in writers:
        assert process.stdout is not None
        texts += [process.stdout.readline() for _ in range(150)]
    for process in writers:
        process.kill()
        process.communicate()
    assert "wrong\n" not in texts
    files = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
    assert len(files) * EXTENT_BYTES <= capacity_blocks * EXTENT_BYTES
    stored = {path.name for path in files}
    for name in {text.split()[0] for text in texts if text != "open\n"}:
        present = [key.hex() in stored for key in chain(name, 8)]
        assert present == sorted(present, reverse=True)


def test_a_folder_without_write_access_is_one_sentence(tmp_path: Path) -> None:
    """Another user may read the store but not open it for writing."""
    opened(tmp_path).close()
    process = os.fork()
    if process == 0:
        code = 3
        try:
            if os.geteuid() == 0:
                for parent in tmp_path.parents[:3]:
                    parent.chmod(0o755)
                os.setuid(NOBODY_UID)
            else:
                (tmp_path / "lock").chmod(0o444)
            opened(tmp_path)
        except ValueError as error:
            code = 0 if "the store cannot be written (Permission denied)" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(process, 0)[1] == 0
