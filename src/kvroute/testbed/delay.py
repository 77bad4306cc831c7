"""Delay lines: TUN devices that return every packet routed into them after a fixed time, in order.

`python -m kvroute.testbed.delay PLAN READY`: for kernels without netem, one process for all hosts. A host's own packets
to a far host pass through a device of the host before they leave it. So every direction is delayed once, and
acknowledgements are delayed, too.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvroute.testbed.namespaces import inside

LEAST_S = 5e-4
"""Minimum delay of a line, in seconds. The timing of a line is not exact enough for shorter ones."""
_TUNSETIFF = 0x4004_54CA
_TUN, _NO_PACKET_INFO = 0x0001, 0x1000
_PACKET_BYTES = 2048


@dataclass(slots=True)
class Line:
    """One device, and the packets in it with the times at which they leave."""

    device: int
    delay_s: float
    held: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now: float) -> None:
        """Read all packets that have arrived."""
        try:
            while True:
                self.held.append((now + self.delay_s, os.read(self.device, _PACKET_BYTES)))
        except BlockingIOError:
            pass

    def give(self, now: float) -> None:
        """Write all packets that are due."""
        while self.held and self.held[0][0] <= now:
            os.write(self.device, self.held.popleft()[1])


def line(namespace: str, name: str, delay_s: float) -> Line:
    """Create a device in a namespace. It is removed when this process ends."""
    with inside(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _TUN | _NO_PACKET_INFO))
    return Line(device, delay_s)


def run(lines: list[Line]) -> None:
    """Run forever. `select` counts in microseconds, epoll's timeout in milliseconds."""
    devices = {line.device: line for line in lines}
    while True:
        due_s = min((line.held[0][0] for line in lines if line.held), default=None)
        wait_s = None if due_s is None else max(due_s - time.monotonic(), 0.0)
        ready, _, _ = select.select(list(devices), (), (), wait_s)
        now = time.monotonic()
        for device in ready:
            devices[device].take(now)
        for line in lines:
            line.give(now)


def main() -> None:
    """Run until the process is terminated."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[tuple[str, str, float]])
    lines = [line(*arguments) for arguments in plan]
    Path(sys.argv[2]).write_bytes(b"{}")
    run(lines)


if __name__ == "__main__":
    main()
