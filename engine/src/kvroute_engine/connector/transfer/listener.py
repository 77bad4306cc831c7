"""The listening socket of a KV server: accepts connections, limits their number and gives each one a thread."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvroute_engine.connector.transfer.channel import HANDSHAKE_S, FramedSocket, shut
from kvroute_engine.connector.transfer.handshake_limits import Handshakes

log = logging.getLogger(__name__)
REPORT_S = 10.0
"""Minimum interval between log lines on failed handshakes, in seconds, so that unknown peers cannot fill the log."""


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Limits on the server resources that peers may use, with and without a proof of the token."""

    handshake_s: float = HANDSHAKE_S
    """Time within which a peer must prove the token, in seconds."""
    handshakes: int = 256
    """Maximum connections whose peer has not proved the token yet: as many as one decode instance opens at once."""
    connections: int = 1024
    """Maximum connections whose peer has proved the token."""


Admit: TypeAlias = Callable[[], bool]
"""Called when the peer has proved the token. Returns False if its connection must end, because there are too many."""
Serve: TypeAlias = Callable[[FramedSocket, str, Admit], None]
"""Serves the peer of a channel, at an address, until it disconnects."""


LIMITS = ListenerLimits()


class PeerListener:
    """Listens from its creation on. `close` ends every thread and connection that it has started."""

    def __init__(self, host: str, port: int, timeout_s: float, serve: Serve, limits: ListenerLimits = LIMITS) -> None:
        """A peer must move a byte within `timeout_s`. `serve` runs in a separate thread for each connection."""
        self._timeout_s, self._serve, self._limits = timeout_s, serve, limits
        self._lock = threading.Lock()
        self._threads: dict[FramedSocket, threading.Thread] = {}
        self._handshakes: Handshakes[FramedSocket] = Handshakes(limits.handshakes)
        self._admitted: set[FramedSocket] = set()
        self._failures, self._report_at = 0, 0.0
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """Port on which it listens."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Abort all connections and wait for their threads."""
        self._closing.set()
        shut(self._socket)
        self._acceptor.join()
        with self._lock:
            threads = dict(self._threads)
        for channel in threads:
            channel.abort()
        for thread in threads.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._socket.accept()
            except OSError:
                if self._closing.is_set():
                    return
                self._closing.wait(0.05)  # no free descriptor, or the peer disconnected before it was accepted
                continue
            channel = FramedSocket(sock, self._timeout_s, self._limits.handshake_s)
            thread = threading.Thread(target=self._run, args=(channel, address[0]), name="kv-serve", daemon=True)
            with self._lock:
                self._threads[channel] = thread
                evicted = self._handshakes.begin(channel, address[0])
                evicted_thread = self._threads.get(evicted) if evicted else None
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads
                self._ended(channel)
            if evicted and evicted_thread:
                evicted.abort()
                evicted_thread.join()  # limits the number of threads, too

    def _run(self, channel: FramedSocket, peer: str) -> None:
        try:
            self._serve(channel, peer, lambda: self._admit(channel))
        except OSError as error:
            if not self._closing.is_set():
                self._report(channel, peer, error)
        finally:
            self._ended(channel)

    def _admit(self, channel: FramedSocket) -> bool:
        with self._lock:
            # A connection that has just been evicted is no longer in its handshake.
            if not self._handshakes.end(channel) or len(self._admitted) >= self._limits.connections:
                return False
            self._admitted.add(channel)
            return True

    def _ended(self, channel: FramedSocket) -> None:
        channel.close()
        with self._lock:
            self._handshakes.end(channel)
            self._admitted.discard(channel)
            del self._threads[channel]

    def _report(self, channel: FramedSocket, peer: str, error: OSError) -> None:
        now = time.monotonic()
        with self._lock:
            if channel in self._admitted:
                log.warning("KV connection from %s ended: %s", peer, error)
                return
            self._failures += 1
            if now < self._report_at:
                return
            failures, self._failures, self._report_at = self._failures, 0, now + REPORT_S
        log.warning("KV connections that failed their handshake: %d; the last one, from %s: %s", failures, peer, error)
