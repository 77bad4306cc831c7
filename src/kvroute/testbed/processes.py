"""Processes of a testbed. Each is started with a mark in its environment, by which it is found and ended even if its
parent has died.

The mark is set before a process runs its first instruction, so no process is ever missed. A list of ids that is written
afterwards could miss one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

MARK = "KVROUTE_TESTBED"
END_S = 5.0
"""Time from SIGTERM to SIGKILL, in seconds."""


def begin(command: Sequence[str], mark: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one. Its output goes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, MARK: mark},
        )


def marked(mark: str) -> list[int]:
    """Return the ids of the processes with a mark, their children included, but never this one or its parents."""
    ours = _line_of_descent()
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and int(folder.name) not in ours and _carries(int(folder.name), mark)
    ]


def end(mark: str, patience_s: float = END_S) -> int:
    """Terminate every process with the mark, kill those that do not end in time, and wait. Return their number."""
    ended: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        handles = dict(filter(None, (_handle(pid, mark) for pid in marked(mark))))
        ended |= set(handles)
        for handle in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
        _wait(list(handles.values()), patience_s)
        for handle in handles.values():
            os.close(handle)
    return len(ended)


def cpu_s(mark: str) -> float:
    """Return the CPU seconds that the processes with the mark have used so far."""
    ticks = 0
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or access is denied
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def _handle(pid: int, mark: str) -> tuple[int, int] | None:
    """Return (id, descriptor). The mark is checked once the descriptor is open: an id may have been reused."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    if _carries(pid, mark):
        return pid, handle
    os.close(handle)
    return None


def _wait(handles: Sequence[int], timeout_s: float) -> None:
    poller = select.poll()
    for handle in handles:
        poller.register(handle, select.POLLIN)
    left = set(handles)
    while left and (ready := poller.poll(timeout_s * 1e3)):
        for handle, _ in ready:
            poller.unregister(handle)
            left.discard(handle)


def _line_of_descent() -> set[int]:
    line, pid = set(), os.getpid()
    while pid > 1 and pid not in line:
        line.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            break
    return line
