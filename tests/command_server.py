"""A process that has imported `kvroute`, and forks itself for each command: see `tests.commands`.

Usage: python -m tests.command_server SOCKET_NUMBER; it ends, and kills its commands, when standard input ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import pkgutil
import selectors
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module

import kvroute
from kvroute.cli.app import main
from kvroute.types import InputError

_WITHOUT = ("kvroute_engine.connector", "kvroute.load.timing")
"""Packages that run beside an engine, whose libraries take seconds to import."""


def import_all() -> None:
    """Import every module whose libraries are installed."""
    for module in pkgutil.walk_packages(kvroute.__path__, "kvroute."):
        if not module.name.startswith(_WITHOUT):
            with suppress(ImportError, InputError):
                import_module(module.name)


def received(client: socket.socket) -> tuple[list[int], list[bytes]]:
    """Return the standard streams and the fields of a job, see `command_shim`."""
    length, streams, _, _ = socket.recv_fds(client, 8, 3)
    fields = client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL).split(b"\0")
    return streams, fields


class Forks:
    """The commands that run."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.clients: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.ended, ends = socket.socketpair()
        for end in (self.ended, ends):
            end.setblocking(False)
        self.ends = ends
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(ends.fileno(), warn_on_full_buffer=False)

    def next_command(self) -> list[bytes] | None:
        """Serve until a job arrives and return its fields in a new process; return None when standard input ends."""
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.ended, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is self.ended:
                    self._report()
                elif key.fileobj is self.listener:
                    if fields := self._fork(self.listener.accept()[0]):
                        return fields
                else:
                    self._signal(key.data)

    def kill(self) -> None:
        """Kill every command."""
        for process in self.clients:
            os.kill(process, signal.SIGKILL)

    def _fork(self, client: socket.socket) -> list[bytes] | None:
        streams, fields = received(client)
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.selector.close()
            for opened in (self.listener, self.ended, self.ends, client, *self.clients.values()):
                opened.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return fields
        for stream in streams:
            os.close(stream)
        self.clients[process] = client
        self.selector.register(client, selectors.EVENT_READ, process)
        return None

    def _signal(self, process: int) -> None:
        """Send a process the signals that its client got, or kill it if the client is gone."""
        client = self.clients.get(process)
        if client is None:
            return
        numbers = client.recv(16)
        for number in numbers or [signal.SIGKILL]:
            os.kill(process, number)
        if not numbers:
            self.selector.unregister(client)

    def _report(self) -> None:
        """Tell the clients whose processes have ended how they did."""
        self.ended.recv(4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = self.clients.pop(ended[0])
                with suppress(KeyError):
                    self.selector.unregister(client)
                with suppress(OSError):
                    client.sendall(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, "big", signed=True))
                client.close()


def become(fields: list[bytes]) -> None:
    """Give this process the folder, arguments, environment and standard streams of a job."""
    folder, count, *rest = fields
    os.chdir(folder)
    sys.argv = ["kvroute", *map(os.fsdecode, rest[: int(count)])]
    os.environb.clear()
    for variable in rest[int(count) :]:
        name, _, value = variable.partition(b"=")
        os.environb[name] = value
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)


class Exit:
    """Ends a process after the other functions of `atexit`: to delete every module would take half a second."""

    code = 1
    """The exit code of an uncaught exception."""

    def __call__(self) -> None:
        """See the class."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self.code)


def run(fields: list[bytes], at_exit: Exit) -> None:
    """Run a job in this process."""
    become(fields)
    try:
        main()
    except SystemExit as ended:
        at_exit.code = int(ended.code or 0)


if __name__ == "__main__":
    atexit.register(at_exit := Exit())
    import_all()
    gc.freeze()
    forks = Forks(socket.socket(fileno=int(sys.argv[1])))
    if job := forks.next_command():
        run(job, at_exit)
    else:
        forks.kill()
