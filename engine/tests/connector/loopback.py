"""The connector's two ends over loopback with caches in host memory, and scripted peers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvroute_engine.connector.blocks import BlockLayout, ByteArray, Extent, HostRegion
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.authentication import session
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.remote_memory import SharedMemory
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer
from kvroute_engine.connector.transfer.wire import VERSION, Challenge, Hello, Welcome

BLOCKS = 24
WAIT_S = 120.0
TOKEN = ConnectorSettings(token="secret", timeout_s=5.0)


class Cache:
    """KV cache of an instance: `layers` regions of `BLOCKS` blocks with a gap after each block."""

    def __init__(self, layers: int, block_bytes: int, gap_bytes: int = 0, seed: int | None = None) -> None:
        stride = block_bytes + gap_bytes
        draw = np.random.default_rng(seed)
        shape = (layers, BLOCKS * stride)
        self.memory: ByteArray = np.zeros(shape, np.uint8) if seed is None else draw.integers(0, 256, shape, np.uint8)
        self.regions = [HostRegion.of(layer, block_bytes, stride) for layer in self.memory]
        self.layout = BlockLayout(model="tiny", dtype="bfloat16", block_tokens=32, region_bytes=(block_bytes,) * layers)

    def block(self, layer: int, block: int) -> bytes:
        """Return the bytes of one block."""
        (view,) = self.regions[layer].outgoing([block])
        return bytes(view)


class FencedRegion:
    """A region that is read and written only after a fence: the device may still work with its content."""

    def __init__(self, region: HostRegion, passed: list[str]) -> None:
        """Args: `passed`: not empty once the fence has been passed."""
        self._region, self._passed = region, passed
        self.block_bytes, self.chunk_bytes_max = region.block_bytes, region.chunk_bytes_max

    @property
    def extent(self) -> Extent:
        """Place of the blocks."""
        return self._region.extent

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes in place."""
        assert self._passed, "read before the fence"
        return self._region.outgoing(blocks)

    def incoming(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return a buffer."""
        return [memoryview(bytearray(len(blocks) * self.block_bytes))]

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        """Copy the buffer into place."""
        assert self._passed, "written before the fence"
        rest = views[0]
        for view in self._region.incoming(blocks):
            view[:], rest = rest[: len(view)], rest[len(view) :]


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def ends(
    source: Cache,
    target: Cache,
    server: ConnectorSettings = TOKEN,
    client: ConnectorSettings = TOKEN,
    reads_into: SharedMemory | None = None,
    **arguments: Any,
) -> Iterator[tuple[TransferServer, TransferClient, PeerServer]]:
    """Run a server and a client and close them at the end; check that no thread and no file descriptor of them is
    left. Args: `reads_into`: the client's memory; `arguments` of the server."""
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    serving = TransferServer(source.regions, source.layout, server, environ={}, **arguments)
    pulling = TransferClient(target.regions, target.layout, client, environ={}, memory=reads_into)
    try:
        yield serving, pulling, PeerServer(*serving.address, "prefill0")
    finally:
        pulling.close()
        serving.close()
        if arguments.get("memory"):
            arguments["memory"].close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(WAIT_S)  # one whose connection has just ended may still be on its last lines
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def pull(
    client: TransferClient,
    peer: PeerServer,
    blocks: Sequence[int],
    *,
    first: int = 0,
    checksum: bool = True,
    request: str = "p",
) -> Result:
    """Pull the positions from `first` on of a request on the peer into local `blocks`."""
    client.start(BlockTransfer("d", peer, request, first, tuple(blocks), checksum))
    result = client.wait(WAIT_S)
    assert result is not None, "the transfer hangs"
    return result


@contextmanager
def pulling(target: Cache, options: ConnectorSettings) -> Iterator[TransferClient]:
    """Run a client without a server."""
    client = TransferClient(target.regions, target.layout, options, environ={})
    try:
        yield client
    finally:
        client.close()


@contextmanager
def scripted_peer(part: Any) -> Iterator[PeerServer]:
    """Run a peer that executes `part` on each connection and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                try:
                    part(FramedSocket(sock, WAIT_S))
                except OSError:
                    continue  # the client has closed the connection

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield PeerServer("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def accept_client(channel: FramedSocket) -> None:
    """Do the handshake of a server without a token."""
    challenge = Challenge(VERSION, b"n" * 16)
    channel.send(challenge)
    keys = session("", challenge, channel.expect(Hello))
    channel.send(Welcome(keys.server_proof))
    channel.secure(send_key=keys.server_key, receive_key=keys.client_key)
