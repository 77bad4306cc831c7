"""The switch as a UDP server in one thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from kvroute.switch.aggregator import Aggregator
from kvroute.switch.wire import DATA_BYTES
from kvroute.types import InputError

_BUFFER_BYTES = 8 * 2**20
_EXPIRE_S = 1.0


class UdpSwitch:
    """A bound socket and an aggregator."""

    def __init__(self, host: str, port: int, slots: int) -> None:
        """Bind; port 0 takes a free one.

        Raises:
            InputError: the address cannot be bound.
        """
        where, hint = f"{host}:{port}", "choose an address of this machine and a free port"
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

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to which it is bound."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Aggregate until `stopped` returns True; it is asked after every packet, and ten times a second."""
        self._socket.settimeout(0.1)
        expired_s = time.monotonic()
        while not stopped():
            try:
                packet, source = self._socket.recvfrom(DATA_BYTES + 1)
            except TimeoutError:
                pass
            else:
                for target, answer in self.aggregator.receive(packet, source, time.monotonic()):
                    assert isinstance(target, tuple)
                    self._send(answer, target)
            if time.monotonic() - expired_s > _EXPIRE_S:
                expired_s = time.monotonic()
                self.aggregator.expire(expired_s)

    def _send(self, answer: bytes, target: tuple[Any, ...]) -> None:
        try:
            self._socket.sendto(answer, target)
        except OSError:
            return  # such as a worker that cannot be reached; the protocol treats it as a lost packet

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
