"""Ctrl-C: one line, exit code 130, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.cli_rig import CLUSTER
from tests.waiting import PATIENCE_S

LONG = ("simulate", CLUSTER, "--policy", "round-robin", "--requests", "20000", "--seeds", "4", "--workers", "2")


def group_of(process: subprocess.Popen[str]) -> list[str]:
    """Return the command lines of the live processes of its group."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
        if int(group) == process.pid and state != "Z":
            found.append(command)
    return found


def becomes(process: subprocess.Popen[str], least: int, most: int) -> bool:
    """Wait until the number of live processes of the group is within these bounds."""
    limit = time.monotonic() + PATIENCE_S
    while not least <= len(group_of(process)) <= most:
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["to the group, as a terminal does", "to the process"])
def test_an_interruption_ends_the_command_and_its_workers(tmp_path: Path, send: Callable[[int, int], None]) -> None:
    """The parent, the server of forks, the tracker of resources and two workers run; an interruption ends them while
    cells run that would take minutes."""
    command = [sys.executable, "-m", "kvroute.cli.app", *LONG]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert becomes(process, 5, 5), group_of(process)
            send(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert becomes(process, 0, 0), group_of(process)
        finally:
            if group_of(process):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert errors.splitlines() == ["Simulating: 4 runs", "kvroute: interrupted"]
