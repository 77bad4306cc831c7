"""Two hosts and a lossy wide-area link between them, built from unnamed network namespaces; root only, Linux only.

A namespace exists as long as a process holds it. Only this process and its delay line hold these, and the delay line
ends with this process. Even after a SIGKILL nothing remains, and nothing outside is changed.

`tc` limits the rate (htb behind a queue of one bandwidth-delay product) and drops packets at random (a classic BPF
filter, packet by packet: tbf splits what the kernel has bundled). Some kernels have no netem, so `bench.wan.delay`
delays packets in user space; the direction of the data has the whole delay of the round trip.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NEWNET = 0x4000_0000
LEFT, RIGHT = "10.201.1.2", "10.201.2.2"
"""Address of the sender, and of the receiver."""
ROOT = Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSCTLS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0", "tcp_no_metrics_save": "1"}
"""Without `tcp_no_metrics_save` a connection would start with the metrics of an earlier one."""


class Unavailable(Exception):
    """This machine cannot provide such a network; the message lists what is missing."""


@dataclass(frozen=True, slots=True)
class Wan:
    """Properties of the link in the direction of the data."""

    rate_bits_per_s: float
    rtt_s: float
    loss: float = 0.0
    """Share of packets dropped, each independently."""

    @property
    def queue_bytes(self) -> int:
        """Size of the queue before the bottleneck: one bandwidth-delay product, or a few packets."""
        return max(round(self.rate_bits_per_s / 8 * self.rtt_s), 30_000)

    @property
    def payload_bytes_per_s(self) -> float:
        """Upper bound of TCP's payload rate: 1,448 of 1,514 bytes, without the headers of Ethernet, IP and TCP."""
        return self.rate_bits_per_s / 8 * 1448 / 1514


class Network:
    """`with Network(wan) as network`: sockets created inside `network.left()` or `network.right()` stay on that side.

    Raises:
        Unavailable: not root, or a tool or a kernel feature is missing.
    """

    def __init__(self, wan: Wan) -> None:
        self.wan = wan
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
            raise Unavailable("network namespaces need root, and iproute2's ip and tc")
        with ExitStack() as built:
            self._left, self._middle, self._right = (built.enter_context(namespace()) for _ in range(3))
            self._join("left", self._left, "10.201.1")
            self._join("right", self._right, "10.201.2")
            for space in (self._left, self._middle, self._right):
                with inside(space):
                    for name, value in _SYSCTLS.items():
                        Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")
            self._shape()
            if self.wan.rtt_s:
                built.enter_context(self._delayed())
            self._stack = built.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Put the calling thread, and threads that it starts, on the sending side."""
        with inside(self._left):
            yield

    @contextmanager
    def right(self) -> Iterator[None]:
        """Put the calling thread, and threads that it starts, on the receiving side."""
        with inside(self._right):
            yield

    def lost(self) -> tuple[int, int, int]:
        """Return the packets so far that crossed the link, that the filter dropped, and that a full queue dropped."""
        with inside(self._middle):
            output = run("tc", "-s", "qdisc", "show", "dev", "right")
        counters = {}
        for handle in ("20:", "30:"):
            section = output[output.index(f"bfifo {handle}") :]
            sent, dropped = re.search(r"Sent \d+ bytes (\d+) pkt \(dropped (\d+)", section).groups()  # type: ignore[union-attr]
            counters[handle] = int(sent), int(dropped)
        return counters["20:"][0], counters["30:"][1], counters["20:"][1]

    def _join(self, name: str, namespace: int, prefix: str) -> None:
        with inside(self._middle):
            peer = f"/proc/{os.getpid()}/fd/{namespace}"
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "wan", "netns", peer)
            run("ip", "address", "add", f"{prefix}.1/24", "dev", name)
            run("ip", "link", "set", name, "up")
        with inside(namespace):
            run("ip", "link", "set", "lo", "up")
            run("ip", "address", "add", f"{prefix}.2/24", "dev", "wan")
            run("ip", "link", "set", "wan", "up")
            run("ip", "route", "add", "default", "via", f"{prefix}.1")

    def _shape(self) -> None:
        rate = f"{round(self.wan.rate_bits_per_s)}bit"
        burst = "burst 16k cburst 16k quantum 1600"
        lines = [
            "qdisc add dev right root handle 1: tbf rate 20gbit burst 1600 limit 16m",
            "qdisc add dev right parent 1:1 handle 2: htb default 1",
            f"class add dev right parent 2: classid 2:1 htb rate {rate} {burst}",
            f"class add dev right parent 2: classid 2:2 htb rate {rate} {burst}",
            f"qdisc add dev right parent 2:1 handle 20: bfifo limit {self.wan.queue_bytes}",
            # This queue drops all packets that the filter sends to it, because every packet is larger than one byte.
            "qdisc add dev right parent 2:2 handle 30: bfifo limit 1",
        ]
        with inside(self._middle):
            for line in lines:
                run("tc", *line.split())
            if self.wan.loss:
                chance = round(self.wan.loss * (1 << 32))
                bytecode = f"4,32 0 0 4294963256,53 1 0 {chance},6 0 0 {0x2_0002},6 0 0 0"
                filtering = "filter add dev right parent 2: protocol ip prio 1 bpf bytecode"
                run("tc", *filtering.split(), bytecode)

    @contextmanager
    def _delayed(self) -> Iterator[None]:
        command = [sys.executable, "-m", "bench.wan.delay", str(os.getpid()), str(self.wan.rtt_s)]
        with inside(self._middle):
            line = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert line.stdout
        try:
            if line.stdout.readline().strip() != "ready":
                raise Unavailable("the delay line has not come up; is there /dev/net/tun?")
            with inside(self._middle):
                run("ip", "route", "add", "default", "dev", "delay", "table", "200")
                run("ip", "rule", "add", "iif", "left", "lookup", "200", "priority", "100")
            yield
        finally:
            line.kill()
            line.communicate()


@contextmanager
def namespace() -> Iterator[int]:
    """Create a network namespace; yield the descriptor that keeps it."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _LIBC.unshare(NEWNET):
            raise Unavailable(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        made = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _enter(home)
    finally:
        os.close(home)
    try:
        yield made
    finally:
        os.close(made)


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _enter(namespace)
        yield
    finally:
        _enter(home)
        os.close(home)


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
