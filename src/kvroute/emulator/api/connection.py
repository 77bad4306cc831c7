"""What an emulated completion needs of its connection: to be woken, to fail on request, to end without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvroute.emulator.engine.faults import Fault
from kvroute.emulator.errors import EngineError


class ConnectionAborted(Exception):
    """The connection must be closed without a response, because a fault was injected."""


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Address from which an instance's KV is fetched."""

    host: str
    kv_port: int
    engine_id: str


class Notifier:
    """Notifies the coroutine that waits for changes in the sequences of one request."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Signal a change."""
        self._event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` returns True. It is checked after every change."""
        while not condition():
            self._event.clear()
            await self._event.wait()


async def fail(fault: Fault) -> None:
    """Fail as the fault specifies. A request that hangs does so until its client disconnects."""
    if fault.status == "hang":
        await asyncio.get_running_loop().create_future()
    if fault.status == "reset":
        raise ConnectionAborted
    assert isinstance(fault.status, int)
    raise EngineError("an injected failure", status=fault.status)
