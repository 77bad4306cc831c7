"""A delay line: it returns the packets routed to the device `delay` after a fixed time, in order.

`bench.wan.network` runs it inside its middle namespace: `python -m bench.wan.delay PARENT SECONDS`. Bundles of segments
pass as a whole (virtio-net header), so a few thousand reads per second carry hundreds of megabits.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x4004_54CA, 0x4004_54D0, 0x4004_54D8
_TUN, _NO_PACKET_INFO, _VNET_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUM, _TSO4 = 1, 2
_HEADER_BYTES = 10
_BUNDLE_BYTES = 70_000
_DEATH_SIGNAL = 1


def device(name: str) -> int:
    """Create a TUN device that is up; return its descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _TUN | _NO_PACKET_INFO | _VNET_HEADER))
    fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER_BYTES))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _CHECKSUM | _TSO4)
    subprocess.run(["ip", "link", "set", name, "txqueuelen", "10000", "up"], check=True)
    return tun


def run(tun: int, delay_s: float) -> None:
    """Delay packets forever."""
    held: deque[tuple[float, bytes]] = deque()
    poller = select.epoll()
    poller.register(tun, select.EPOLLIN)
    while True:
        poller.poll(max(held[0][0] - time.monotonic(), 0.0) if held else None)
        try:
            while True:
                packet = os.read(tun, _BUNDLE_BYTES)
                held.append((time.monotonic() + delay_s, packet))
        except BlockingIOError:
            pass
        now = time.monotonic()
        while held and held[0][0] <= now:
            os.write(tun, held.popleft()[1])


def main() -> None:
    """Run until the parent ends, for any reason."""
    parent, delay_s = int(sys.argv[1]), float(sys.argv[2])
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return
    tun = device("delay")
    print("ready", flush=True)
    run(tun, delay_s)


if __name__ == "__main__":
    main()
