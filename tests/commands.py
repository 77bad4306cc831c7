"""Starts `kvroute` as a process without its imports, which take a second: one process of the test run has imported it
and forks itself for each command.

A test of the start or exit itself, of limits or closed files that a process gets from its parent, or of a package that
is missing starts `python -m kvroute.cli.app`. So do tests of `serve` and `epp` that wait until these serve: they return
pages of LLVM's library to the system (`release_compiler`), which a process may not do whose parent had loaded it.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_SHIM = Path(__file__).with_name("command_shim.py")
_VARIABLE = "KVROUTE_COMMANDS_OF_TESTS"
_ROOT = _SHIM.parents[1]


def kvroute_command(*arguments: str) -> list[str]:
    """Return the command line of a process that runs `kvroute` with these arguments."""
    return [sys.executable, "-I", "-S", str(_SHIM), _address(), *arguments]


@cache
def folder_with_kvroute() -> Path:
    """Return a folder for PATH whose program `kvroute` is such a process."""
    program = Path(_address()).with_name("kvroute")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {_SHIM} {_address()} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program.parent


@cache
def _address() -> str:
    """Return the address of the process that forks itself; start it if no parent has. It ends with this process."""
    if found := os.environ.get(_VARIABLE):
        return found
    folder = tempfile.TemporaryDirectory(prefix="kvroute-")
    address = f"{folder.name}/commands"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)
        command = [sys.executable, "-m", "tests.command_server", str(listener.fileno())]
        server = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(listener.fileno(),)
        )

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    os.environ[_VARIABLE] = address
    return address
