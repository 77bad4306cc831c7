"""Stands for a process of `kvroute` that `tests.command_server` forks; it starts in a hundredth of a second.

Usage: python -I -S command_shim.py SOCKET ARGUMENT...

The process gets the arguments, environment, folder and standard streams of this one, and the signals that arrive here.
It is killed if this process ends first. The exit code, or the signal that ended the process, becomes that of this one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ask for the process, and end as it does."""
    address, *arguments = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    fields = [os.getcwdb(), str(len(arguments)).encode(), *map(os.fsencode, arguments)]
    fields += [name + b"=" + value for name, value in os.environb.items()]
    job = b"\0".join(fields)
    socket.send_fds(server, [len(job).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(job)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = server.recv(4, socket.MSG_WAITALL)
    code = int.from_bytes(status, "big", signed=True) if status else 125
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
