"""Programs under measurement: started on chosen cores, awaited, measured from outside (CPU time, memory), and ended.

A program is every process in the session of its first process, so its child processes are also measured and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bench.measurement import ROOT, Failed

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
END_S = 8.0
READY_S = 120.0
"""Time for `kvroute serve` to become ready, in seconds."""


class Program:
    """A child process in its own session; use it in a `with` statement."""

    def __init__(self, command: Sequence[str], *, name: str = "", cpus: Collection[int] = ()) -> None:
        self.name = name or Path(command[0]).name
        # Files instead of pipes: a router that logs a lot must not wait for a reader.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._child = subprocess.Popen(
                [*_pinned(cpus), *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            self._close()
            raise Failed(f"{self.name}: {error}") from error

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Process id of the first process, which is also the session's."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """True if the first process still runs."""
        return self._child.poll() is None

    def document(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return the first line on standard output that is a JSON object. Raises Failed if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = not self.alive
            *lines, _ = _text(self._output).split("\n")
            for line in lines:
                if line.startswith("{"):
                    document: dict[str, Any] = json.loads(line)
                    return document
            if ended:
                break
            time.sleep(0.02)
        raise Failed(f"{self.name} did not report that it is ready: {self.errors()}")

    def listens(self, port: int, timeout_s: float = 60.0) -> None:
        """Wait until the loopback port accepts connections. Raises Failed if the program ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if not self.alive:
                break
            time.sleep(0.05)
        raise Failed(f"{self.name} does not listen on {port}: {self.errors()}")

    def errors(self, most: int = 400) -> str:
        """Return the last line on standard error, or else on standard output."""
        lines = (_text(self._errors).strip() or _text(self._output).strip()).splitlines()
        return lines[-1][-most:] if lines else "it wrote nothing"

    def cpu_s(self) -> float:
        """Return CPU seconds of the whole session so far, including ended threads, in nanosecond resolution."""
        return session_cpu_s(self.pid)

    def rss_bytes(self) -> int:
        """Return the resident memory of the whole session; pages shared by processes count for each."""
        return sum(_rss_bytes(pid) for pid in _session(self.pid))

    def own_rss_bytes(self) -> int:
        """Return the resident memory of the first process."""
        return _rss_bytes(self.pid)

    def sockets(self) -> int:
        """Return the number of open sockets of the first process: listening, connected, and those of its event loop."""
        count = 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    count += os.readlink(entry.path).startswith("socket:")
        return count

    def send_signal(self, number: int) -> None:
        """Send a signal to the first process."""
        self._child.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status; None if it still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(timeout_s)
        return None

    def end(self) -> None:
        """End the session: SIGTERM to the first process, then SIGKILL to all."""
        if self._errors.closed:
            return
        if self.alive:
            self.send_signal(signal.SIGTERM)
            self.wait(END_S)
        for pid in _session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()
        self._close()

    def _close(self) -> None:
        self._output.close()
        self._errors.close()


def session_cpu_s(leader: int) -> float:
    """Return the CPU seconds of the processes of a session so far; 0 if there is no such session."""
    return sum(_process_cpu_s(pid) for pid in _session(leader)) if leader else 0.0


def _session(leader: int) -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session_of(pid) == leader]


def _pinned(cpus: Collection[int]) -> list[str]:
    """Return a command prefix that sets the cores; a runtime with one thread per core must see them from its start."""
    return ["taskset", "--cpu-list", ",".join(map(str, sorted(cpus)))] if cpus else []


def _text(file: IO[bytes]) -> str:
    """Return all output of a child so far, without changing the file offset."""
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")


def _session_of(pid: int) -> int | None:
    """Return the session id from /proc/PID/stat: the fourth field after the name, which may contain blanks."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return None


def _process_cpu_s(pid: int) -> float:
    """Read Linux's CPU clock of another process (clock_getcpuclockid(3)); the scheduler's clock is finer than ticks."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def free_ports(count: int) -> list[int]:
    """Return loopback ports that were just free, for programs that cannot choose their own."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in held]


async def served(ready: Path, program: Program) -> dict[str, str]:
    """Return the addresses that `kvroute serve --ready-file` writes. Raises Failed if it does not serve in time."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and program.alive:
        if ready.exists() and (text := ready.read_text()):
            return dict(json.loads(text))
        await asyncio.sleep(0.05)
    raise Failed(f"kvroute does not serve: {program.errors()}")
