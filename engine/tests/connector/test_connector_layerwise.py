"""KV that is sent while it is computed, and connections that break, over loopback with real bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from engine.tests.connector.loopback import (
    BLOCKS,
    WAIT_S,
    Cache,
    accept_client,
    ends,
    pull,
    pulling,
    scripted_peer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.block_leases import Computing
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.congestion import SentCounters
from kvroute_engine.connector.transfer.handshake import greet
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer
from kvroute_engine.connector.transfer.wire import BlockPart, Fetch, KeepAlive

ALL = tuple(range(BLOCKS))


def early(peer: PeerServer, prompt: str = "") -> BlockTransfer:
    """Return a transfer of all blocks of a prompt that is not computed yet."""
    return BlockTransfer("d", peer, "p", 0, ALL, prompt=prompt, wait_s=WAIT_S)


def ended(client: TransferClient) -> Result:
    """Wait for the only transfer; return its result."""
    result = client.wait(WAIT_S)
    assert result is not None, "the transfer hangs"
    return result


@settings(deadline=None, max_examples=30)
@given(
    layers=st.integers(1, 4),
    chunks=st.lists(st.integers(1, BLOCKS), min_size=1, max_size=3, unique=True).map(sorted),
    fetched_first=st.booleans(),
    checksum=st.booleans(),
)
def test_blocks_that_are_not_computed_are_never_sent(
    layers: int, chunks: list[int], fetched_first: bool, checksum: bool
) -> None:
    """A block's bytes are written just before it is reported as computed; a reader that is too early would get zeros.

    The prompt is computed in chunks, each one layer by layer. All bytes arrive unchanged.
    """
    source, target = Cache(layers, 64), Cache(layers, 64)
    wanted = np.random.default_rng(1).integers(1, 256, source.memory.shape, np.uint8)
    if chunks[-1] < BLOCKS:
        chunks = [*chunks, BLOCKS]
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        transfer = BlockTransfer("d", peer, "p", 0, ALL, checksum, wait_s=WAIT_S)
        if fetched_first:
            client.start(transfer)
        done = 0
        for chunk in chunks:
            for layer in range(layers):
                source.memory[layer, done * 64 : chunk * 64] = wanted[layer, done * 64 : chunk * 64]
                server.computed(Computing("p", "vllm-p", ALL[:chunk], chunk), [layer])
            done = chunk
        if not fetched_first:
            client.start(transfer)
        server.hold("p", ALL, "vllm-p")
        result = ended(client)
        assert (result.failure, result.nbytes) == ("", wanted.size)
        freed: list[tuple[str, bool]] = []
        while not freed:
            freed = [(request.request_id, request.expired) for request in server.freed()]
    assert np.array_equal(target.memory, wanted)
    assert freed == [("vllm-p", False)]


def test_a_layer_arrives_before_the_next_one_is_computed() -> None:
    """Computing and sending overlap: layer 0 has arrived before layer 1 is computed."""
    source, target = Cache(2, 64, seed=1), Cache(2, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        client.start(early(peer))
        server.computed(Computing("p", "p", ALL, BLOCKS), [0])
        while not np.array_equal(target.memory[0], source.memory[0]):
            assert client.results() == []
        assert not target.memory[1].any()
        server.computed(Computing("p", "p", ALL, BLOCKS), [1])
        assert ended(client).failure == ""
        assert server.freed() == []  # vLLM has not finished with the request
        server.hold("p", ALL)
        while not server.freed():
            assert server.held
    assert np.array_equal(target.memory, source.memory)


def test_a_layer_is_read_only_after_its_fence() -> None:
    """On a device the bytes are complete only after the fence."""
    source, target = Cache(1, 64), Cache(1, 64)

    def fence() -> None:
        source.memory[:] = 7

    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        client.start(early(peer))
        server.computed(Computing("p", "p", ALL, BLOCKS), [0], fence)
        assert ended(client).failure == ""
        server.hold("p", ALL)
    assert (target.memory == 7).all()


def test_withdrawn_blocks_are_no_longer_read() -> None:
    """Bytes written after `withdraw` returns are never sent; the pull fails."""
    source, target = Cache(2, 64, seed=2), Cache(2, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        client.start(early(peer))
        server.computed(Computing("p", "p", ALL, BLOCKS), [0])
        while not np.array_equal(target.memory[0], source.memory[0]):
            assert client.results() == []
        wanted = source.memory[0].copy()
        server.withdraw("p")
        source.memory[:] = 0
        server.computed(Computing("p", "p", ALL, BLOCKS), [0, 1])  # recomputed: too late for this transfer ID
        assert ended(client).failure in ("gone", "reset")
        server.hold("p", ALL)
        while server.held:
            server.freed()
    assert np.array_equal(target.memory[0], wanted)
    assert not target.memory[1].any()


def test_withdraw_waits_for_readers() -> None:
    """A server thread is about to read a block: `withdraw` returns only after this thread has finished."""
    source, target = Cache(1, 64, seed=2), Cache(1, 64)
    reading, go = threading.Event(), threading.Event()

    def fence() -> None:
        reading.set()
        go.wait(WAIT_S)

    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        client.start(early(peer))
        server.computed(Computing("p", "p", ALL, BLOCKS), [0], fence)
        reading.wait(WAIT_S)
        taking = threading.Thread(target=server.withdraw, args=("p",))
        taking.start()
        assert ended(client).failure == "gone"
        assert taking.is_alive()
        go.set()
        taking.join()
    assert not target.memory.any()


def test_an_abandoned_connection_gets_no_more_chunks() -> None:
    """The server stalls for longer than the client's timeout and then continues: the old connection gets no more
    chunks."""
    source, target = Cache(10, 64, seed=8), Cache(10, 64)
    calls: list[int] = []
    go = threading.Event()

    def fence() -> None:
        calls.append(1)
        if len(calls) == 1:
            go.wait(WAIT_S)

    with ends(source, target, ConnectorSettings(timeout_s=2.0), ConnectorSettings(timeout_s=2.0)) as (
        server,
        client,
        peer,
    ):
        client.start(early(peer))
        server.computed(Computing("p", "p", ALL, BLOCKS), [0])
        server.computed(Computing("p", "p", ALL, BLOCKS), [1], fence)
        while not np.array_equal(target.memory[1], source.memory[1]):
            assert client.results() == []
        go.set()
        for region in range(2, 10):
            server.computed(Computing("p", "p", ALL, BLOCKS), [region])
        assert ended(client).failure == ""
    assert len(calls) == 2
    assert np.array_equal(target.memory, source.memory)


def test_the_pull_of_a_half_computed_cancelled_prompt_is_refused() -> None:
    """Layers that are not computed are never sent; vLLM gets the blocks back as soon as no thread reads them."""
    source, target = Cache(2, 64, seed=3), Cache(2, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        client.start(early(peer))
        server.computed(Computing("p", "vllm-p", ALL, BLOCKS), [0])
        while not np.array_equal(target.memory[0], source.memory[0]):
            assert client.results() == []
        server.drop("p", "vllm-p")
        assert ended(client).failure == "gone"
        freed: list[tuple[str, bool]] = []
        while not freed:
            freed = [(request.request_id, request.expired) for request in server.freed()]
        assert freed == [("vllm-p", False)]
    assert not target.memory[1].any()


def test_the_pull_of_a_prompt_that_is_never_computed_is_refused() -> None:
    """The pull is refused whether vLLM has started the prompt, so that its blocks must be freed, or not."""
    source, target = Cache(1, 64, seed=3), Cache(1, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        client.start(early(peer))
        server.forget("p")
        assert ended(client).failure == "gone"
        server.drop("q", "vllm-q")
        assert [(request.request_id, request.expired) for request in server.freed()] == [("vllm-q", False)]


def test_another_prompt_under_the_same_name_is_refused() -> None:
    """The router has confused two requests."""
    source, target = Cache(1, 64, seed=4), Cache(1, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        server.computed(Computing("p", "p", ALL, BLOCKS, prompt="theirs"), [0])
        client.start(early(peer, prompt="ours"))
        assert ended(client).failure == "prompt"
        server.hold("p", ALL)
    assert not target.memory.any()


def test_a_pull_of_more_blocks_than_the_prompt_has_is_refused() -> None:
    """The decode instance requests more blocks than the prompt has."""
    source, target = Cache(1, 64, seed=4), Cache(1, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        server.computed(Computing("p", "p", ALL[:3], 3), [0])
        client.start(early(peer))
        server.hold("p", ALL[:3])
        assert ended(client).failure == "range"


@pytest.mark.parametrize("begun", [False, True], ids=["not-begun", "half-computed"])
def test_a_waiting_client_gets_keepalive_messages(begun: bool) -> None:
    """The messages come several times per timeout, before a prompt is started and while it is computed."""
    source = Cache(2, 64, seed=5)
    with (
        ends(source, Cache(2, 64), ConnectorSettings(timeout_s=0.2), ConnectorSettings()) as (server, _, peer),
        socket.create_connection((peer.host, peer.port), WAIT_S) as sock,
    ):
        if begun:
            server.computed(Computing("p", "p", (4,), 1), [0])
        channel = FramedSocket(sock, WAIT_S)
        greet(channel, "", source.layout, "kv", "x")
        channel.send(Fetch(request_id="p", first=0, count=1, transfer="t", wait_s=WAIT_S))
        if begun:
            part = channel.expect(BlockPart)
            channel.receive_into([memoryview(bytearray(part.nbytes))])
        assert [channel.expect(KeepAlive) for _ in range(3)] == [KeepAlive()] * 3
        server.forget("p")


def test_a_cancelled_transfer_ends() -> None:
    """The prompt is never started; a second cancellation has no effect."""
    with ends(Cache(1, 64), Cache(1, 64), ConnectorSettings(timeout_s=0.2), ConnectorSettings()) as (
        server,
        client,
        peer,
    ):
        client.start(early(peer))
        client.cancel("d")
        assert ended(client).failure == "cancelled"
        client.cancel("d")
        assert server.held == 0


def test_bytes_sent_are_reported_after_the_connection_is_closed() -> None:
    """The counters are read once more before the connection is closed."""
    source, target = Cache(1, 64 << 10, seed=9), Cache(1, 64 << 10)
    with serving(source) as (server, peer):
        with pulling(target, ConnectorSettings(connections=1, instance="decode0")) as client:
            server.hold("p", ALL)
            assert pull(client, peer, ALL).failure == ""
        sent, deadline = SentCounters(), time.monotonic() + WAIT_S
        while sent.nbytes - sent.again_bytes < source.memory.size and time.monotonic() < deadline:
            sent = sum((link_sent for link_sent, _ in server.links().values()), sent)
    assert sent.nbytes - sent.again_bytes >= source.memory.size


class TcpProxy:
    """A relay between client and server: connection k carries `cuts[k]` bytes to the client and is then cut. The first
    connection that has carried `stall_at` bytes to the client stalls: it stays open and carries nothing more."""

    def __init__(self, target: PeerServer, cuts: list[int], stall_at: int | None) -> None:
        self._target, self._cuts, self._stall_at = target, cuts, stall_at
        self._stalling = threading.Lock()
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._came = threading.Condition()
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()
        self.peer = PeerServer("127.0.0.1", self._listener.getsockname()[1])
        self.stalled = 0
        self.accepted = 0

    def close(self) -> None:
        """Stop all threads."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in self._sockets:
            shutdown(sock)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._sockets:
            sock.close()
        self._stack.close()

    def has(self, connections: int) -> None:
        """Wait until this number of connections has been accepted."""
        with self._came:
            assert self._came.wait_for(lambda: self.accepted >= connections, WAIT_S), f"only {self.accepted} came"

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._came:
                self.accepted += 1
                self._came.notify_all()
            far = socket.create_connection((self._target.host, self._target.port))
            limit = self._cuts.pop(0) if self._cuts else None
            self._sockets += [near, far]
            for source, sink, most, stalls in ((near, far, None, False), (far, near, limit, True)):
                self._threads.append(threading.Thread(target=self._carry, args=(source, sink, most, stalls)))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket, limit: int | None, stalls: bool) -> None:
        carried = 0
        try:
            while limit is None or carried < limit:
                data = source.recv(65536 if limit is None else min(limit - carried, 65536))
                if not data:
                    break
                sink.sendall(data)
                carried += len(data)
                if stalls and self._should_stall(carried):
                    return
        except OSError:
            pass  # one side has closed
        shutdown(source)
        shutdown(sink)

    def _should_stall(self, carried: int) -> bool:
        with self._stalling:
            if self._stall_at is None or carried < self._stall_at or self.stalled:
                return False
            self.stalled += 1
            return True


def shutdown(sock: socket.socket) -> None:
    """Shut the socket down if it is still connected."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


@contextmanager
def proxied(peer: PeerServer, cuts: list[int], stall_at: int | None = None) -> Iterator[TcpProxy]:
    """Run a relay in front of `peer`."""
    proxy = TcpProxy(peer, cuts, stall_at)
    try:
        yield proxy
    finally:
        proxy.close()


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(2_500, 12_000), max_size=6),
    connections=st.integers(1, 3),
    layerwise=st.booleans(),
)
def test_chunks_of_a_broken_connection_arrive_over_another_one(
    cuts: list[int], connections: int, layerwise: bool
) -> None:
    """Connections break anywhere after their first part; every byte arrives unchanged."""
    source, target = Cache(12, 2 << 10, seed=6), Cache(12, 2 << 10)
    with (
        pulling(target, ConnectorSettings(connections=connections)) as client,
        serving(source) as (server, peer),
        proxied(peer, [60_000 + cut for cut in cuts]) as proxy,
    ):
        transfer = BlockTransfer("d", proxy.peer, "p", 0, ALL, checksum=True, wait_s=WAIT_S * layerwise)
        client.start(transfer)
        for region in range(12 * layerwise):
            server.computed(Computing("p", "p", ALL, BLOCKS), [region])
        server.hold("p", ALL)
        result = ended(client)
        assert (result.failure, result.nbytes) == ("", target.memory.size)
        client.close()
    assert np.array_equal(source.memory, target.memory)


def test_an_early_transfer_opens_all_its_connections_when_data_arrives() -> None:
    """All three are opened, whichever of them carries the most bytes."""
    source, target = Cache(12, 4 << 10, seed=6), Cache(12, 4 << 10)
    with (
        pulling(target, ConnectorSettings(connections=3)) as client,
        serving(source) as (server, peer),
        proxied(peer, []) as proxy,
    ):
        client.start(BlockTransfer("d", proxy.peer, "p", 0, ALL, wait_s=WAIT_S))
        server.computed(Computing("p", "p", ALL, BLOCKS), [0])
        proxy.has(3)
        server.hold("p", ALL)
        assert ended(client).failure == ""
        client.close()
    assert np.array_equal(source.memory, target.memory)


def test_a_client_without_data_waits_on_one_connection() -> None:
    """The maximum number of connections has no effect, because most of the time no data is sent."""
    source = Cache(12, 4 << 10, seed=6)
    with (
        pulling(Cache(12, 4 << 10), ConnectorSettings(connections=3)) as client,
        serving(source) as (server, peer),
        proxied(peer, []) as proxy,
    ):
        client.start(BlockTransfer("d", proxy.peer, "p", 0, ALL, wait_s=WAIT_S))
        server.forget("p")
        assert ended(client).failure == "gone"
        proxy.has(2)  # and one to cancel the wait
        client.close()
        assert proxy.accepted == 2


def test_a_stalled_connection_does_not_block_the_others() -> None:
    """One of two connections stalls after a few bytes: the other one carries the rest, and the lost chunk is sent
    again."""
    source, target = Cache(12, 32 << 10, seed=7), Cache(12, 32 << 10)
    with (
        pulling(target, ConnectorSettings(connections=2, timeout_s=2.0)) as client,
        serving(source) as (server, peer),
        proxied(peer, [], stall_at=100_000) as proxy,
    ):
        server.hold("p", ALL)
        client.start(BlockTransfer("d", proxy.peer, "p", 0, ALL))
        assert ended(client).failure == ""
        client.close()
        assert proxy.stalled == 1
    assert np.array_equal(source.memory, target.memory)


@contextmanager
def serving(source: Cache) -> Iterator[tuple[TransferServer, PeerServer]]:
    """Run a server without a client."""
    server = TransferServer(source.regions, source.layout, ConnectorSettings(), environ={})
    try:
        yield server, PeerServer(*server.address)
    finally:
        server.close()


def test_a_peer_that_disconnects_repeatedly_is_abandoned() -> None:
    """The client abandons the peer after three connections in a row without a part."""
    knocks: list[Fetch] = []

    def peer_without_blocks(channel: FramedSocket) -> None:
        accept_client(channel)
        knocks.append(channel.expect(Fetch))

    with scripted_peer(peer_without_blocks) as peer, pulling(Cache(1, 64), ConnectorSettings()) as client:
        assert pull(client, peer, [0]).failure == "reset"
    assert len(knocks) == 3
