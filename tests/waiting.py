"""Waiting for a condition, with limits so generous that a busy machine does not reach them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""A condition that should come true is waited for so long before the test fails."""
HANGS_S = 240.0
"""A scenario that takes longer hangs; below pytest's own timeout, so that it is torn down in order."""


async def becomes_true(condition: Callable[[], bool], poll_s: float = 0.005, patience_s: float = PATIENCE_S) -> bool:
    """Whether the condition comes true within the patience; other tasks of the loop run meanwhile."""
    limit = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(poll_s)
    return True


async def until(condition: Callable[[], bool], poll_s: float = 0.005) -> None:
    """Return once the condition is true; AssertionError where it does not come true."""
    assert await becomes_true(condition, poll_s), f"not true within {PATIENCE_S:.0f} s"
