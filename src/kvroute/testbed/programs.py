"""The programs of one testbed, as children of this process: started, awaited, ended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvroute.testbed import processes
from kvroute.testbed.runs import NamedTestbed
from kvroute.types import InputError

READY_S = 120.0
"""Time limit until a program is ready, in seconds; several start at once on few cores."""


@dataclass(slots=True)
class Programs:
    """Programs of a testbed, each with a log in its folder."""

    run: NamedTestbed
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def begin(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        """Start a program. It outlives this process."""
        child = processes.begin(command, self.run.name, self.run.folder / f"{name}.log")
        self._children.append(child)
        return child

    def wait_ready(self, child: subprocess.Popen[bytes], ready: Path) -> bytes:
        """Wait until a program is ready. Return the JSON object in the file `ready`, which is named like its log.

        Raises:
            InputError: the program has ended, or is not ready in time.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and child.poll() is None:
            if ready.exists() and (word := ready.read_bytes()).rstrip().endswith(b"}"):
                return word
            time.sleep(0.02)
        log = ready.with_suffix(".log")
        output = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
        why = output[-1].removeprefix("kvroute: ") if output else f"no output for {READY_S:g} s"
        raise InputError(f"{ready.stem} of testbed {self.run.name} did not become ready: {why}")

    def end(self, child: subprocess.Popen[bytes]) -> None:
        """Terminate a program, and kill it if it does not end in time."""
        child.terminate()
        try:
            child.wait(processes.END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._children.remove(child)

    def forget(self, *, wait: bool = True) -> None:
        """Forget all programs: they have been ended, or (`wait` is False) they continue without a parent."""
        for child in self._children:
            if wait:
                child.wait()
            else:
                child.returncode = 0  # otherwise its object would warn that it still runs
        self._children.clear()
