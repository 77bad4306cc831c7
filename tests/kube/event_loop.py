"""An event loop for a scenario, which fails if a connection is left open at the end.

A socket that is only collected as garbage is a ResourceWarning in some later test, or in none.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

from tests.waiting import HANGS_S, becomes_true


def scenario(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a scenario to its end, and until its last socket is closed.

    Raises:
        AssertionError: a transport is still open long after the end.
    """

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await coroutine
        assert await becomes_true(lambda: not open_transports(), poll_s=0.05), open_transports()

    asyncio.run(bounded())


def open_transports() -> list[asyncio.Transport]:
    """Return the transports of the running loop whose sockets are open. One over TLS closes its socket only when the
    peer has answered, some rounds of the loop after `close`."""
    loop = asyncio.get_running_loop()
    found = [obj for obj in gc.get_objects() if issubclass(type(obj), asyncio.Transport)]
    return [
        transport
        for transport in found
        if getattr(transport, "_loop", None) is loop and getattr(transport, "_sock", None) is not None
    ]
