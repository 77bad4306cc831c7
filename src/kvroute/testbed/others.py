"""Background traffic: a process that loads links with a constant share of UDP, from each link's end to the next place.

`python -m kvroute.testbed.others FILE`: the file gives sources, targets and rates. Packets are sent in bundles that the
kernel splits, because one call per packet would cost more than the links themselves.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvroute.testbed.namespaces import inside

PORT = 9
"""Discard port (RFC 863)."""
PAYLOAD_BYTES, WIRE_BYTES = 1472, 1514
BUNDLE_MAX = 8
_TICK_S = 2e-3
_UDP_SEGMENT = 103
"""setsockopt of linux/udp.h: the kernel splits what is sent into datagrams of this many bytes."""


@dataclass(slots=True)
class BackgroundStream:
    """Background traffic of one link."""

    socket: socket.socket
    bytes_per_s: float
    """Rate on the wire."""
    sent_bytes: float = 0.0

    def send(self, elapsed_s: float) -> None:
        """Send what is due, once it is a bundle. Packets that do not fit into the queue are lost."""
        due = int((elapsed_s * self.bytes_per_s - self.sent_bytes) // WIRE_BYTES)
        if due >= min(BUNDLE_MAX, 1 + self.bytes_per_s * 1e-2 // WIRE_BYTES):
            count = min(due, BUNDLE_MAX)
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                self.socket.send(_ZEROS[: count * PAYLOAD_BYTES])
            self.sent_bytes += count * WIRE_BYTES


_ZEROS = memoryview(bytes(BUNDLE_MAX * PAYLOAD_BYTES))


def stream(namespace: str, target: str, bytes_per_s: float) -> BackgroundStream:
    """Open a stream from a namespace to an address."""
    with inside(namespace):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    made.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, PAYLOAD_BYTES)
    made.connect((target, PORT))
    return BackgroundStream(made, bytes_per_s)


def sink(namespace: str) -> socket.socket:
    """Open a socket that is never read: the kernel drops packets that do not fit into the minimum buffer."""
    with inside(namespace):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
    made.bind(("0.0.0.0", PORT))
    return made


def main() -> None:
    """Run until the process is terminated."""
    plan, sinks = msgspec.json.decode(
        Path(sys.argv[1]).read_bytes(), type=tuple[list[tuple[str, str, float]], list[str]]
    )
    held = [sink(namespace) for namespace in sinks]
    streams = [stream(*arguments) for arguments in plan]
    began = time.monotonic()
    while held:
        for sender in streams:
            sender.send(time.monotonic() - began)
        time.sleep(_TICK_S)


if __name__ == "__main__":
    main()
