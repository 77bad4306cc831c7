"""Others' traffic: a process that keeps links busy with a steady share of UDP, each from its own end to the next place.

`python -m kvroute.testbed.others FILE`: the file says where, whither, and how fast. Packets go in bundles, which the
kernel cuts: one call per packet would cost more than the links themselves.
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
"""Discard (RFC 863)."""
PAYLOAD_BYTES, WIRE_BYTES = 1472, 1514
BUNDLE_MAX = 8
_TICK_S = 2e-3
_UDP_SEGMENT = 103
"""setsockopt of linux/udp.h: the kernel cuts what is sent into pieces of so many bytes."""


@dataclass(slots=True)
class Stream:
    """One link's."""

    socket: socket.socket
    bytes_per_s: float
    """On the wire."""
    sent_bytes: float = 0.0

    def send(self, elapsed_s: float) -> None:
        """What is due, once it is a bundle; what does not fit into the queue is lost, as others' packets are."""
        due = int((elapsed_s * self.bytes_per_s - self.sent_bytes) // WIRE_BYTES)
        if due >= min(BUNDLE_MAX, 1 + self.bytes_per_s * 1e-2 // WIRE_BYTES):
            count = min(due, BUNDLE_MAX)
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                self.socket.send(_ZEROS[: count * PAYLOAD_BYTES])
            self.sent_bytes += count * WIRE_BYTES


_ZEROS = memoryview(bytes(BUNDLE_MAX * PAYLOAD_BYTES))


def stream(namespace: str, target: str, bytes_per_s: float) -> Stream:
    """From a namespace to an address."""
    with inside(namespace):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    made.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, PAYLOAD_BYTES)
    made.connect((target, PORT))
    return Stream(made, bytes_per_s)


def sink(namespace: str) -> socket.socket:
    """Takes packets without anybody reading them: the kernel drops what does not fit into the least buffer."""
    with inside(namespace):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
    made.bind(("0.0.0.0", PORT))
    return made


def main() -> None:
    """Until it is ended."""
    plan, sinks = msgspec.json.decode(
        Path(sys.argv[1]).read_bytes(), type=tuple[list[tuple[str, str, float]], list[str]]
    )
    held = [sink(namespace) for namespace in sinks]
    streams = [stream(*each) for each in plan]
    began = time.monotonic()
    while held:
        for each in streams:
            each.send(time.monotonic() - began)
        time.sleep(_TICK_S)


if __name__ == "__main__":
    main()
