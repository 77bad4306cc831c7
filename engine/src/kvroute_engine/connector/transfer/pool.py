"""Connections to prefill instances' servers: opened, authenticated, kept for the next transfer, closed."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvroute_engine.addresses import host_port
from kvroute_engine.connector.blocks import BlockLayout
from kvroute_engine.connector.options import KV_CLASS, STORAGE_CLASS, ConnectorSettings
from kvroute_engine.connector.transfer.channel import FramedSocket, probed, tune
from kvroute_engine.connector.transfer.handshake import greet
from kvroute_engine.connector.transfer.remote_memory import RemoteMemory, SharedMemory
from kvroute_engine.connector.transfer.wire import Attach, Attached, Message, Request, WireError

log = logging.getLogger(__name__)
IDLE_MAX = 64
"""Maximum number of idle connections to one peer."""


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A prefill instance's server, and the traffic class of its packets."""

    host: str
    port: int
    instance: str = ""
    traffic_class: str = KV_CLASS

    @property
    def source(self) -> str:
        """Name of the peer in metrics."""
        return self.instance or host_port(self.host, self.port)


def buffer_peer(address: str) -> PeerServer:
    """Return the buffer server at `host:port`."""
    host, _, port = address.rpartition(":")
    return PeerServer(host.strip("[]"), int(port), f"buffer {address}", STORAGE_CLASS)


TCP_S = 60.0
"""Time for which a peer's KV is transferred over TCP after NIXL has failed, in seconds."""


class ConnectionPool:
    """Every connection belongs to one thread or is idle. `close` aborts all of them."""

    def __init__(
        self, layout: BlockLayout, options: ConnectorSettings, token: str, memory: SharedMemory | None = None
    ) -> None:
        """Args: `memory`: the local KV cache, into which peers' blocks are read by NIXL; None: TCP only."""
        self._layout, self._options, self._token, self._memory = layout, options, token, memory
        self._remote: dict[FramedSocket, RemoteMemory] = {}
        self._tcp_until: dict[PeerServer, float] = {}
        """Peers whose KV is transferred over TCP, and until when, on the clock `time.monotonic`."""
        self._idle: dict[PeerServer, list[FramedSocket]] = {}
        self._open: set[FramedSocket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def request(
        self, peer: PeerServer, message: Request, payload: Sequence[memoryview] = ()
    ) -> tuple[FramedSocket, Message]:
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

    def remote_memory(self, channel: FramedSocket) -> RemoteMemory | None:
        """Return the peer's memory from which parts are read; None if their bytes come over this connection."""
        return self._remote.get(channel)

    def use_tcp(self, peer: PeerServer, why: object) -> None:
        """Transfer the KV of a peer over TCP for a while."""
        with self._lock:
            known = self._avoids_nixl(peer)
            self._tcp_until[peer] = time.monotonic() + TCP_S
        if not known:
            log.warning("the KV of %s is transferred over TCP: %s", peer.source, why)

    def keep(self, peer: PeerServer, channel: FramedSocket) -> None:
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
            remote = self._remote.pop(channel, None)
        if remote is not None:
            remote.close()

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

    def _kept(self, peer: PeerServer) -> FramedSocket | None:
        while True:
            with self._lock:
                idle = self._idle.get(peer)
                channel = idle.pop() if idle else None
                if channel is None or (channel in self._remote) == self._uses_nixl(peer):
                    return channel
            self.drop(channel)

    def _avoids_nixl(self, peer: PeerServer) -> bool:
        return time.monotonic() < self._tcp_until.get(peer, 0.0)

    def _uses_nixl(self, peer: PeerServer) -> bool:
        return self._memory is not None and peer.traffic_class != STORAGE_CLASS and not self._avoids_nixl(peer)

    def _connect(self, peer: PeerServer) -> FramedSocket:
        """Return a new connection, which reads from the peer's memory if both sides have NIXL."""
        channel = self._greeted(peer)
        if self._memory is None or not self._uses_nixl(peer):
            return channel
        try:
            channel.send(Attach())
            remote = self._memory.attach(channel.expect(Attached))
        except BaseException as error:
            self.drop(channel)
            if not (isinstance(error, WireError) and error.code == "nixl"):
                raise
            self.use_tcp(peer, error)
            return self._greeted(peer)
        if remote is None:
            self.use_tcp(peer, "it has no NIXL")
        else:
            with self._lock:
                self._remote[channel] = remote
        return channel

    def _greeted(self, peer: PeerServer) -> FramedSocket:
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
