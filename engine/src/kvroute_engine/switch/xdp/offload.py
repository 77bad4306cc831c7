"""Hands running jobs over to the kernel, and takes them back: user space keeps the epochs, the kernel the sums."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvroute_engine.errors import InputError
from kvroute_engine.switch.xdp.libbpf import Program, XdpUnavailable

SOURCE = Path(__file__).with_name("aggregate.c")
_JOB = struct.Struct("=IIHBx")
_KEY = struct.Struct("=II")
_WORKER = struct.Struct("=4s4s2s2sBB12x6xQ")
_PACKETS, _RESULTS = 0, 1


class PacketSource(NamedTuple):
    """Where a worker's packets come from."""

    host: str
    """IPv4 address."""
    port: int
    interface: int
    """Index of the interface by which they arrive."""
    local: str
    """IPv4 address of the switch to which they go."""


class XdpOffload:
    """The XDP program on some interfaces.

    It takes a job if each of its workers is behind an interface of its own, because the kernel sends one copy of a
    result to each interface.
    """

    def __init__(self, interfaces: Sequence[str], slots: int, port: int) -> None:
        """Load and attach.

        Args:
            interfaces: names of the interfaces where workers are.
            slots: number of slots of the switch.
            port: UDP port of the switch.

        Raises:
            InputError: an interface that does not exist.
            XdpUnavailable: a missing tool, privilege or driver; nothing is attached.
        """
        indices = {}
        for name in interfaces:
            try:
                indices[name] = socket.if_nametoindex(name)
            except OSError:
                raise InputError(f"there is no interface {name}", where="--interface", hint="see `ip link`") from None
        self._interfaces, self._port = frozenset(indices.values()), port
        self._free = [(0, slots)]
        """Ranges of free slots: first, length; ascending."""
        self._jobs: dict[int, tuple[tuple[int, int], list[bytes]]] = {}
        """First slot and number of slots, and keys of the workers, by job."""
        self._links: list[int] = []
        self.program = Program(SOURCE, {"slots": slots})
        """The loaded program: `aggregate` on each interface, and `address` for each copy of a result."""
        try:
            self._jobs_map = self.program.map("jobs", _JOB.size)
            self._workers = self.program.map("workers", _WORKER.size)
            self._counters = self.program.map("counters", 8)
            ports = self.program.map("ports", 8)
            for name, index in indices.items():
                ports.set(struct.pack("=I", index), struct.pack("=Ii", index, self.program.descriptor("address")))
                self._attach(name, index)
        except BaseException:
            self.close()
            raise

    def _attach(self, name: str, index: int) -> None:
        try:
            self._links.append(self.program.attach("aggregate", index))
        except OSError as error:
            hint = "choose one whose driver supports XDP and that has no other XDP program"
            raise XdpUnavailable(f"interface {name}: {error.strerror}", where="XDP", hint=hint) from None

    @property
    def packets(self) -> int:
        """Data packets that the kernel has taken."""
        return self._counters.sum(_PACKETS)

    @property
    def results(self) -> int:
        """Chunks that the kernel has completed."""
        return self._counters.sum(_RESULTS)

    def begin(self, job: int, epoch: int, slots: int, addresses: Sequence[Hashable]) -> bool:
        """Take the data of a job from now on.

        Args:
            job: number of the job.
            epoch: its epoch. All packets of other epochs go to user space.
            slots: number of its slots.
            addresses: the Peer of each worker, by worker number.

        Returns:
            False if two workers share an interface, or one has none with the program; user space keeps the job.
        """
        self.end(job)
        peers = [address for address in addresses if isinstance(address, PacketSource)]
        used = {peer.interface for peer in peers}
        start = self._take(slots) if len(used) == len(addresses) and used <= self._interfaces else None
        if start is None:
            return False
        keys = [_KEY.pack(job, peer.interface) for peer in peers]
        self._jobs[job] = (start, slots), keys
        try:
            for number, (key, peer) in enumerate(zip(keys, peers, strict=True)):
                self._workers.set(key, self._worker(number, peer))
            self._jobs_map.set(struct.pack("=I", job), _JOB.pack(epoch, start, slots, len(peers)))
        except OSError:
            self.end(job)  # the kernel's table is full
            return False
        return True

    def _worker(self, number: int, peer: PacketSource) -> bytes:
        address, local = (socket.inet_aton(host) for host in (peer.host, peer.local))
        ports = (struct.pack(">H", port) for port in (peer.port, self._port))
        return _WORKER.pack(address, local, *ports, number, 0, 0)

    def end(self, job: int) -> None:
        """Give the data of a job back to user space, and free its slots."""
        if job not in self._jobs:
            return
        self._jobs_map.remove(struct.pack("=I", job))
        (start, slots), keys = self._jobs.pop(job)
        for key in keys:
            self._workers.remove(key)
        self._give(start, slots)

    def activity(self, job: int) -> tuple[int, int]:
        """Return the number of data packets of a job in this epoch, and the bitmap of the workers that sent them."""
        packets = heard = 0
        for key in self._jobs[job][1]:
            entry = self._workers.get(key)
            assert entry is not None, "entries exist as long as the job"
            *_, number, has_sent, count = _WORKER.unpack(entry)
            packets += count
            heard |= has_sent << number
        return packets, heard

    def _take(self, slots: int) -> int | None:
        """Reserve consecutive slots, the first that fit; None if the free ones are scattered."""
        for at, (start, length) in enumerate(self._free):
            if length >= slots:
                self._free[at : at + 1] = [(start + slots, length - slots)] if length > slots else []
                return start
        return None

    def _give(self, start: int, slots: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, length in sorted([*self._free, (start, slots)]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((first, length))
        self._free = merged

    def close(self) -> None:
        """Detach and unload the program."""
        for link in self._links:
            os.close(link)
        self._links.clear()
        self.program.close()
