"""Waiting for a condition, with limits so long that a busy machine does not reach them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Time limit for a condition to become true, in seconds."""
HANGS_S = 240.0
"""Time limit of a scenario, in seconds. It is below pytest's own timeout, so that the teardown runs in order."""


async def becomes_true(condition: Callable[[], bool], poll_s: float = 0.005, patience_s: float = PATIENCE_S) -> bool:
    """Return whether the condition becomes true within the limit; other tasks of the loop run meanwhile."""
    limit = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(poll_s)
    return True


async def until(condition: Callable[[], bool], poll_s: float = 0.005) -> None:
    """Wait until the condition is true; raise AssertionError at the limit."""
    assert await becomes_true(condition, poll_s), f"not true within {PATIENCE_S:.0f} s"
