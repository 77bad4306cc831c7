"""The switch as a UDP server in one thread; the kernel can take over the sums (XDP)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Hashable, Sequence

from kvroute_engine.addresses import host_port
from kvroute_engine.errors import InputError
from kvroute_engine.switch.aggregator import Aggregator
from kvroute_engine.switch.status import SwitchStatus
from kvroute_engine.switch.wire import DATA_BYTES, SLOTS_MAX
from kvroute_engine.switch.xdp import PacketSource, XdpOffload, XdpUnavailable

_BUFFER_BYTES = 8 * 2**20
_EXPIRE_S = 1.0
_PACKET_INFO = 8
"""IP_PKTINFO of Linux: the kernel tells by which interface, and for which address, a packet has arrived."""
_INFO = struct.Struct("=i4s4s")


class UdpSwitch:
    """A bound socket and an aggregator, whose sums the kernel computes after `offload`."""

    def __init__(self, host: str, port: int, slots: int) -> None:
        """Bind; port 0 takes a free one.

        Raises:
            InputError: the address cannot be bound.
        """
        self._slots = slots
        self.xdp: XdpOffload | None = None
        where, hint = host_port(host, port), "choose an address of this machine and a free port"
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise InputError(f"{where} is no address: {error.strerror}", where="--host", hint=hint) from error
        self._socket = socket.socket(family, kind)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise InputError(f"{where} cannot be bound: {error.strerror}", where="--port", hint=hint) from error
        self.aggregator = Aggregator(slots, time.time_ns())

    def offload(self, interfaces: Sequence[str]) -> None:
        """Let the kernel sum the packets that arrive by these interfaces (XDP). Call it before `serve`.

        Raises:
            InputError: an interface that does not exist.
            XdpUnavailable: this machine or process cannot do it; the switch works without.
        """
        if self._socket.family != socket.AF_INET:
            raise XdpUnavailable("the switch listens on IPv6", where="XDP", hint="give an IPv4 address as --host")
        self.xdp = XdpOffload(interfaces, self._slots, self.address[1])
        self._socket.setsockopt(socket.IPPROTO_IP, _PACKET_INFO, 1)
        self.aggregator = Aggregator(self._slots, time.time_ns(), offload=self.xdp)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to which it is bound."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def serve(self, stopped: Callable[[], bool], each_second: Callable[[], None] | None = None) -> None:
        """Aggregate until `stopped` returns True; it is asked after every packet, and ten times a second.
        `each_second` is called at the start and about once a second."""
        self._socket.settimeout(0.1)
        receive = self._receive if self.xdp is None else self._receive_with_interface
        expired_s = time.monotonic() - _EXPIRE_S
        while not stopped():
            try:
                packet, source = receive()
            except TimeoutError:
                pass
            else:
                for target, answer in self.aggregator.receive(packet, source, time.monotonic()):
                    self._send(answer, target)
            if time.monotonic() - expired_s > _EXPIRE_S:
                expired_s = time.monotonic()
                self.aggregator.expire(expired_s)
                if each_second is not None:
                    each_second()

    def _receive(self) -> tuple[bytes, Hashable]:
        return self._socket.recvfrom(DATA_BYTES + 1)

    def _receive_with_interface(self) -> tuple[bytes, Hashable]:
        packet, ancillary, _, source = self._socket.recvmsg(DATA_BYTES + 1, socket.CMSG_SPACE(_INFO.size))
        interface, local = 0, bytes(4)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.IPPROTO_IP, _PACKET_INFO):
                interface, _, local = _INFO.unpack(data)
        return packet, PacketSource(source[0], source[1], interface, socket.inet_ntoa(local))

    def _send(self, answer: bytes, target: Hashable) -> None:
        assert isinstance(target, tuple)
        try:
            self._socket.sendto(answer, target[:2] if isinstance(target, PacketSource) else target)
        except OSError:
            return  # such as a worker that cannot be reached; the protocol treats it as a lost packet

    def counts(self) -> tuple[int, int]:
        """Return the packets received and the chunks completed, by the kernel or here."""
        ours = self.aggregator
        kernel = (0, 0) if self.xdp is None else (self.xdp.packets, self.xdp.results)
        return ours.packets + kernel[0], ours.results + kernel[1]

    def status(self) -> SwitchStatus:
        """Return the present state."""
        host, port = self.address
        packets, chunks = self.counts()
        plane = "python" if self.xdp is None else "xdp"
        slots = min(self._slots, SLOTS_MAX)
        return SwitchStatus(
            time.time(), host_port(host, port), plane, slots, self.aggregator.free_slots, packets, chunks
        )

    def close(self) -> None:
        """Close the socket, and detach from the kernel."""
        if self.xdp is not None:
            self.xdp.close()
        self._socket.close()
