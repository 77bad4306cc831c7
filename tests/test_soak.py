"""`make soak` finds what a test leaves open in that test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAVES_A_SOCKET = """
import gc
import socket

def test_leaves_a_socket():
    gc.disable()
    cycle = [socket.socket()]
    cycle.append(cycle)

def test_after_it():
    gc.enable()
"""


def test_a_socket_that_is_left_open_fails_its_own_test(tmp_path: Path) -> None:
    """The socket is part of a cycle, so it stays open until garbage is collected."""
    (tmp_path / "test_leak.py").write_text(LEAVES_A_SOCKET)
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "COLLECT_GARBAGE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    found = [line for line in done.stdout.splitlines() if line.startswith(("ERROR", "FAILED"))]
    assert len(found) == 1, done.stdout
    assert "test_leak.py::test_leaves_a_socket" in found[0]


def test_the_target_soak_collects_garbage() -> None:
    [command] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "tests/soak.py" in line]
    assert "COLLECT_GARBAGE=1" in command
