"""Requests between the ranks of a group: one authenticated TCP connection each, answered in a thread."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import TypeAlias

import msgspec

Address: TypeAlias = tuple[str, int]
Answer: TypeAlias = Callable[[bytes], bytes | None]
"""From a request to its answer; None: no answer. Raises msgspec.DecodeError for a request of another form."""
KEY_BYTES = 32
_REPLY_S = 30.0
_REQUEST_BYTES = 1 << 20


class Channel:
    """A rank's end: it answers the requests of other ranks, and sends its own."""

    def __init__(self, host: str, key: bytes, answer: Answer) -> None:
        """Listen.

        Args:
            host: address to listen on.
            key: secret of the group; connections without it are refused.
            answer: called in a thread for each request.
        """
        self._key, self._answer_to = key, answer
        self._listener = Listener((host, 0), "AF_INET", backlog=64)  # the key is checked in a thread of each connection
        threading.Thread(target=self._serve, daemon=True, name="kvroute-all-reduce").start()

    @property
    def address(self) -> Address:
        """Host and port at which it listens."""
        address = self._listener.address
        assert isinstance(address, tuple)
        return address

    def ask(self, address: Address, request: bytes) -> bytes | None:
        """Send a request to another rank, and return its answer; None if there is none."""
        try:
            with Client(address, "AF_INET", authkey=self._key) as connection:
                connection.send_bytes(request)
                return connection.recv_bytes() if connection.poll(_REPLY_S) else None
        except (OSError, EOFError, AuthenticationError):
            return None

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        try:
            with connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                answer = self._answer_to(connection.recv_bytes(_REQUEST_BYTES))
                if answer is not None:
                    connection.send_bytes(answer)
        except (OSError, EOFError, AuthenticationError, msgspec.DecodeError):
            return

    def close(self) -> None:
        """Answer no more requests."""
        self._listener.close()


def new_key() -> bytes:
    """Return a secret for a group."""
    return secrets.token_bytes(KEY_BYTES)


def own_host(target: Address) -> str:
    """Return the address of this machine on its path to `target`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
