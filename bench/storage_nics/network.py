"""A store and the storage NICs of several nodes, built from unnamed network namespaces; root only, Linux only.

Each node has a namespace with two devices: `snic`, whose rate is limited in both directions, leads to the store, and
`cnic`, without a limit, leads to the other nodes and to the namespace of this process, through a router in a namespace
of its own. Processes that start inside `node(k)` stay there. The namespaces exist as long as this process or a process
inside holds them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.wan.network import Unavailable, inside, namespace, run

STORE_PORT = 6379
_BURST_BYTES = 32 << 10
_QUEUE_BYTES = 1 << 20


class StorageNics:
    """`with StorageNics(3, 40e6) as network`: a store and three nodes with storage NICs of 40 Mbit/s.

    Raises:
        Unavailable: not root, or a tool or a kernel feature is missing.
    """

    def __init__(self, nodes: int, bits_per_s: float) -> None:
        self.nodes, self.bits_per_s = nodes, bits_per_s
        self._stack = ExitStack()
        self._namespaces: list[int] = []

    def __enter__(self) -> StorageNics:
        if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
            raise Unavailable("network namespaces need root, and iproute2's ip and tc")
        with ExitStack() as built:
            self._store = built.enter_context(namespace())
            with inside(self._store):
                run("ip", "link", "set", "lo", "up")
            router = built.enter_context(namespace())
            with inside(router):
                Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
            built.callback(_remove, self._device)
            self._join_outside(router)
            self._namespaces = [built.enter_context(namespace()) for _ in range(self.nodes)]
            for number, space in enumerate(self._namespaces):
                with inside(space):
                    run("ip", "link", "set", "lo", "up")
                self._join_store(number, space)
                self._join_router(number, space, router)
            self._stack = built.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def store(self) -> Iterator[None]:
        """Put the calling thread, and processes that it starts, beside the store."""
        with inside(self._store):
            yield

    @contextmanager
    def node(self, number: int) -> Iterator[None]:
        """Put the calling thread, and processes that it starts, on a node."""
        with inside(self._namespaces[number]):
            yield

    def address(self, number: int) -> str:
        """Return the address of a node, as seen from outside."""
        return f"{self._subnet}.{8 * number + 10}"

    def store_address(self, number: int) -> str:
        """Return the address of the store, as seen from a node."""
        return f"10.204.{number}.1"

    def received_bytes(self) -> list[int]:
        """Return the bytes that each storage NIC has received from the store, with all headers."""
        found = []
        for space in self._namespaces:
            with inside(space):
                (device,) = json.loads(run("ip", "-stats", "-json", "link", "show", "dev", "snic"))
            found.append(int(device["stats64"]["rx"]["bytes"]))
        return found

    def cut(self, number: int) -> None:
        """Take a storage NIC down, for good."""
        with inside(self._namespaces[number]):
            run("ip", "link", "set", "snic", "down")

    def _join_store(self, number: int, node: int) -> None:
        with inside(self._store):
            peer = f"/proc/{os.getpid()}/fd/{node}"
            run("ip", "link", "add", f"n{number}", "type", "veth", "peer", "name", "snic", "netns", peer)
            self._up(f"n{number}", f"{self.store_address(number)}/24", limited=True)
        with inside(node):
            self._up("snic", f"10.204.{number}.2/24", limited=True)

    def _join_outside(self, router: int) -> None:
        peer = f"/proc/{os.getpid()}/fd/{router}"
        run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "outside", "netns", peer)
        with inside(router):
            self._up("outside", f"{self._subnet}.1/30", limited=False)
        self._up(self._device, f"{self._subnet}.2/30", limited=False)
        run("ip", "route", "add", f"{self._subnet}.0/24", "via", f"{self._subnet}.1")

    def _join_router(self, number: int, node: int, router: int) -> None:
        at_router, peer = f"{self._subnet}.{8 * number + 9}", f"/proc/{os.getpid()}/fd/{node}"
        with inside(router):
            run("ip", "link", "add", f"n{number}", "type", "veth", "peer", "name", "cnic", "netns", peer)
            self._up(f"n{number}", f"{at_router}/30", limited=False)
        with inside(node):
            self._up("cnic", f"{self.address(number)}/30", limited=False)
            run("ip", "route", "add", "default", "via", at_router)

    def _up(self, device: str, address: str, *, limited: bool) -> None:
        run("ip", "address", "add", address, "dev", device)
        if limited:
            # A token bucket delays what is larger than its burst by itself; small packets keep the pace even.
            run("ip", "link", "set", device, "gso_max_segs", "1")
            rate = f"{round(self.bits_per_s)}bit"
            limits = ("burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))
            run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *limits)
        run("ip", "link", "set", device, "up")

    @property
    def _device(self) -> str:
        """Name of the device outside, unique among processes."""
        return f"kvs{os.getpid()}"[:15]

    @property
    def _subnet(self) -> str:
        """First three numbers of the nodes' addresses; they differ between processes that run at the same time, as a
        rule."""
        return f"10.203.{os.getpid() % 256}"


def _remove(device: str) -> None:
    run("ip", "link", "delete", device)
