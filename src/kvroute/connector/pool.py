"""Connections to prefill instances' servers: opened, authenticated, kept for the next transfer, closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.connector.blocks import Layout
from kvroute.connector.channel import FramedSocket, probed, tune
from kvroute.connector.handshake import greet
from kvroute.connector.options import KV_CLASS, STORAGE_CLASS, Options
from kvroute.connector.wire import Message, Request, WireError

IDLE_MAX = 64
"""Maximum number of idle connections to one peer."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill instance's server, and the traffic class of its packets."""

    host: str
    port: int
    instance: str = ""
    traffic_class: str = KV_CLASS

    @property
    def source(self) -> str:
        """Name of the peer in metrics."""
        return self.instance or f"{self.host}:{self.port}"


def buffer_peer(address: str) -> Peer:
    """Return the buffer server at `host:port`."""
    host, _, port = address.rpartition(":")
    return Peer(host.strip("[]"), int(port), f"buffer {address}", STORAGE_CLASS)


class ConnectionPool:
    """Every connection belongs to one thread or is idle. `close` aborts all of them."""

    def __init__(self, layout: Layout, options: Options, token: str) -> None:
        self._layout, self._options, self._token = layout, options, token
        self._idle: dict[Peer, list[FramedSocket]] = {}
        self._open: set[FramedSocket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def request(self, peer: Peer, message: Request, payload: Sequence[memoryview] = ()) -> tuple[FramedSocket, Message]:
        """Send on an idle connection, or on a new one if that has died. Return the header of the response.

        Raises:
            OSError: no server at this address, or it uses another protocol; `WireError` as for `receive_next`.
        """
        while (channel := self._kept(peer)) is not None:
            try:
                channel.send(message, payload)
                return channel, channel.receive_next()
            except OSError as error:
                self.drop(channel)
                if not _died_idle(error):
                    raise
        channel = self._connect(peer)
        try:
            channel.send(message, payload)
            return channel, channel.receive_next()
        except BaseException:
            self.drop(channel)
            raise

    def keep(self, peer: Peer, channel: FramedSocket) -> None:
        """Keep a connection whose response has been read to its end."""
        with self._lock:
            idle = self._idle.setdefault(peer, [])
            if not self._closed and len(idle) < IDLE_MAX:
                idle.append(channel)
                return
        self.drop(channel)

    def drop(self, channel: FramedSocket) -> None:
        """Close a connection that is no longer usable."""
        channel.close()
        with self._lock:
            self._open.discard(channel)

    def close(self) -> None:
        """Abort transfers in progress (they fail with `reset`). No connection is opened any more."""
        with self._lock:
            self._closed = True
            idle = [channel for channels in self._idle.values() for channel in channels]
            self._idle.clear()
            busy = self._open.difference(idle)
        for channel in idle:
            self.drop(channel)
        for channel in busy:
            channel.abort()  # its thread closes it: otherwise the descriptor could be reused before the thread wakes

    def _kept(self, peer: Peer) -> FramedSocket | None:
        with self._lock:
            idle = self._idle.get(peer)
            return idle.pop() if idle else None

    def _connect(self, peer: Peer) -> FramedSocket:
        sock = socket.create_connection((peer.host, peer.port), self._options.timeout_s)
        channel = FramedSocket(sock, self._options.timeout_s)
        with self._lock:
            if self._closed:
                channel.close()
                raise WireError("reset", "closed")
            self._open.add(channel)
        try:
            dscp = self._options.dscp.get(peer.traffic_class, 0)
            control, buffer_bytes = self._options.congestion_control, self._options.buffer_bytes
            tune(sock, dscp, control=control, buffer_bytes=buffer_bytes)
            with probed(sock):
                greet(channel, self._token, self._layout, peer.traffic_class, self._options.instance)
        except BaseException:
            self.drop(channel)
            raise
        return channel


def _died_idle(error: OSError) -> bool:
    """Return whether an idle connection failed because its peer had restarted, not because it refuses or hangs."""
    return error.code == "reset" if isinstance(error, WireError) else isinstance(error, ConnectionError)
