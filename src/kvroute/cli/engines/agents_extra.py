"""What `kvroute scheduler` and `kvroute agent` share: the optional packages, and the end by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from kvroute.cli.output import tell
from kvroute.types import InputError


def check_installed() -> None:
    """Raise an InputError if the packages of the extra `agents` are missing."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print causes beside our sentences
    try:
        import kvroute_engine.agent.metrics  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[agents]'") from None


def say(line: str) -> None:
    """Print a line on stderr at once."""
    tell([line])


async def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run until SIGTERM, SIGINT, or an error of the work."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task
