"""One worker process: starts it, waits until it serves, sends it signals, and asks its admin port."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec

from kvroute.serve.config.worker import WorkerSpec
from kvroute.types import InputError

_ASK_S = 5.0
"""Longest time for a response of a worker's admin port."""
_POLL_S = 0.02


class WorkerProcess:
    """A worker from its start to its end. It ends when this process ends, because it reads its standard input."""

    def __init__(self, spec: WorkerSpec, command: Callable[[Path], Sequence[str]], folder: Path) -> None:
        """
        Args:
            spec: input of the worker.
            command: returns the arguments of the command line, for the path of the file with `spec`.
            folder: for that file; only this user may read it.
        """
        self.number, self._spec, self._command = spec.number, spec, command
        self._file = folder / f"worker-{spec.number}.json"
        self._process: asyncio.subprocess.Process | None = None
        self.admin_url = ""
        """URL of its admin port; empty until it serves."""
        self.unanswered = 0
        """Number of requests to its admin port that have timed out since it answered one."""

    @property
    def serves(self) -> bool:
        """Whether it serves: it was ready, and has not ended."""
        return bool(self.admin_url) and self._process is not None and self._process.returncode is None

    @property
    def started(self) -> bool:
        """Whether there is or was a process."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process is not None, "start first"
        return self._process.pid

    async def start(self) -> None:
        """Start the process; `ready` waits until it serves."""
        ready = Path(self._spec.ready_file)
        ready.unlink(missing_ok=True)
        self.admin_url, self.unanswered = "", 0
        self._file.write_bytes(msgspec.json.encode(self._spec))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvroute.cli.app", *self._command(self._file), stdin=asyncio.subprocess.PIPE
        )

    async def ready(self) -> bool:
        """Wait until it serves; return False if it has ended before."""
        assert self._process is not None, "start first"
        file = Path(self._spec.ready_file)
        while self._process.returncode is None:
            with suppress(OSError, msgspec.DecodeError):
                self.admin_url = msgspec.json.decode(file.read_bytes(), type=dict[str, str])["admin"]
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def ended(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        assert self._process is not None, "start first"
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing after its end."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def get(self, session: aiohttp.ClientSession, path: str, accept: str = "") -> bytes | None:
        """Return a page of its admin port; None if it does not answer."""
        try:
            async with session.get(self.admin_url + path, headers={"Accept": accept}, timeout=_timeout()) as response:
                self.unanswered = 0
                return await response.read() if response.status == 200 else None
        except TimeoutError:
            self.unanswered += 1
        except aiohttp.ClientError:
            pass  # it has ended, or is about to
        return None

    async def push(self, session: aiohttp.ClientSession, body: bytes) -> None:
        """Pass on pushed telemetry.

        Raises:
            InputError: the worker rejects it.
        """
        try:
            async with session.post(self.admin_url + "/telemetry", data=body, timeout=_timeout()) as response:
                if response.status == 400:
                    raise InputError((await response.json())["error"], where="push")
        except (aiohttp.ClientError, TimeoutError):
            return  # it has ended, and the next push reaches the one that replaces it


def _timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=_ASK_S)
