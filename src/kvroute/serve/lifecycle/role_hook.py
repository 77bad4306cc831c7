"""The operator's hooks, which make an engine serve another role, start or stop: a POST to a URL, or a program.

The operator decides what it does, for example restart the engine or patch a deployment. It receives the instance and
the roles, and its status or exit code reports whether the instance serves the new role.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import aiohttp

from kvroute.serve.config.offload import RoleSwitchSection, hook_url
from kvroute.types import Instance, Role
from kvroute_engine.files.units import Duration

_TERMINATE_S = 5.0
"""Time between SIGTERM and SIGKILL when a program is ended, in seconds."""


class Hook(Protocol):
    """A hook as the settings define it: a URL or a command."""

    @property
    def url(self) -> str | None:
        """URL that receives a POST."""

    @property
    def command(self) -> list[str] | None:
        """Program and arguments."""

    @property
    def timeout_s(self) -> Duration:
        """Time limit."""


async def switch_role(section: RoleSwitchSection, instance: Instance, before: Role, role: Role) -> str:
    """Call the hook to switch an instance's role; return the reason if that fails, empty on success.

    On a timeout, or if the caller is cancelled, a program is ended together with its child processes.
    """
    assert instance.endpoint is not None
    message = {"instance": instance.name, "role": role, "from": before}
    return await call_hook(section, instance.endpoint.url, message)


async def call_hook(hook: Hook, endpoint: str, message: Mapping[str, str | int]) -> str:
    """Call a hook with a message; return the reason if that fails, empty on success.

    A URL receives the message as JSON. A program has it in its environment, with names in capitals, and ENDPOINT. On a
    timeout, or if the caller is cancelled, a program is ended together with its child processes.
    """
    try:
        async with asyncio.timeout(float(hook.timeout_s)):
            if hook.url is not None:
                return await _post(hook_url(hook.url, endpoint), message)
            variables = {name.upper(): str(value) for name, value in message.items()}
            return await _run(hook.command or [], {**variables, "ENDPOINT": endpoint})
    except TimeoutError:
        return f"the hook took longer than {float(hook.timeout_s):g} s"


async def _post(url: str, message: Mapping[str, str | int]) -> str:
    patient = aiohttp.ClientTimeout(total=None)
    try:
        async with (
            aiohttp.ClientSession(timeout=patient) as session,
            session.post(url, json=dict(message), allow_redirects=False) as answer,
        ):
            return "" if 200 <= answer.status < 300 else f"the hook returned status {answer.status}"
    except (aiohttp.ClientError, OSError) as error:
        return f"the hook cannot be reached ({type(error).__name__})"


async def _run(command: list[str], message: dict[str, str]) -> str:
    null = asyncio.subprocess.DEVNULL
    try:
        program = await asyncio.create_subprocess_exec(
            *command, stdin=null, stdout=null, env={**os.environ, **message}, start_new_session=True
        )
    except OSError as error:
        return f"{command[0]} cannot be run ({error.strerror})"
    try:
        code = await program.wait()
    finally:
        if program.returncode is None:
            await _end(program)
    if code < 0:
        return f"the hook was killed by signal {-code}"
    return f"the hook exited with code {code}" if code else ""


async def _end(program: asyncio.subprocess.Process) -> None:
    """End all processes in the session of a program."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(program.wait(), _TERMINATE_S)
            return
