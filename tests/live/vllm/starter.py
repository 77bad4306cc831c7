"""The test session's side of `preloaded.py`: servers of vLLM that start by forking a process that has imported vLLM."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class Started:
    """A process that is no child of this one; it has the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self._handle = None

    def poll(self) -> int | None:
        """Return None while the process runs, and -1 when it has ended: its exit status is not known here."""
        return None if self._handle is not None and not self._ended(0.0) else -1

    def wait(self) -> None:
        """Wait until the process has ended."""
        if self._handle is not None:
            self._ended(None)

    def _ended(self, timeout_s: float | None) -> bool:
        assert self._handle is not None
        if select.select([self._handle], [], [], timeout_s)[0]:
            os.close(self._handle)
            self._handle = None
            return True
        return False


class Preloaded:
    """The process that has imported vLLM. It ends with `close`, or with this process, which holds its standard input.

    Args:
        python: the Python of vLLM's environment.
        environment: what libraries read while they are imported.
    """

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("preloaded.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        answer = self._answer()
        assert answer == "ready\n", f"preloaded.py did not import vLLM; it said {answer!r}"

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, *, fresh: bool
    ) -> Started:
        """Start a server on the cores of this process; it is not ready yet.

        Args:
            arguments: those of the command `vllm`.
            environment: all of the server's environment.
            folder: its working directory.
            log: file to which its output is appended.
            fresh: it imports vLLM itself.
        """
        assert self._process.stdin is not None
        what = {"argv": list(arguments), "env": dict(environment), "cwd": str(folder), "log": str(log), "fresh": fresh}
        what["cores"] = sorted(os.sched_getaffinity(0))
        self._process.stdin.write(f"{json.dumps(what)}\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer.strip().isdigit(), f"preloaded.py does not start servers any more; it said {answer!r}"
        return Started(int(answer))

    def close(self) -> None:
        """End the process, and servers that still run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()
