"""KV blocks read from a peer's memory: they arrive unchanged, count only if they were held, and TCP takes over."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.tests.connector.agents_in_process import Fabric
from engine.tests.connector.loopback import (
    BLOCKS,
    WAIT_S,
    Cache,
    FencedRegion,
    accept_client,
    ends,
    pull,
    scripted_peer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute_engine.connector.blocks import Extent, HostRegion
from kvroute_engine.connector.options import ConnectorSettings, read_options
from kvroute_engine.connector.scheduler import ConnectorStep, HeldBlocks, Pull
from kvroute_engine.connector.transfer.block_leases import Computing
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.remote_memory import BlockCopy, SharedMemory, joined, ranges
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer
from kvroute_engine.connector.transfer.wire import (
    HEADER_BYTES_MAX,
    Attach,
    Attached,
    BlockPart,
    Copied,
    Fetch,
    KeepAlive,
    LaneEnd,
    MemoryParts,
    WireError,
)
from kvroute_engine.connector.transfer_params import KvTransferParams
from kvroute_engine.connector.worker import ConnectorWorker
from kvroute_engine.errors import InputError

OPTIONS = ConnectorSettings(timeout_s=30.0)


@contextmanager
def reading(
    fabric: Fabric, source: Cache, target: Cache, options: ConnectorSettings = OPTIONS, **arguments: Any
) -> Iterator[tuple[TransferServer, TransferClient, PeerServer]]:
    """Run a server and a client that both have an agent."""
    theirs, ours = (SharedMemory(cache.regions, fabric.agent()) for cache in (source, target))
    with ends(source, target, options, options, reads_into=ours, memory=theirs, **arguments) as both:
        yield both
    reader = fabric.agents[max(fabric.agents)]
    assert reader.released == sum(read.reader is reader for read in fabric.reads)
    assert reader.known == [], "no connection uses the peer's agent any more"


class DeviceRegion(FencedRegion):
    """A region that claims to be in a GPU's memory."""

    def __init__(self, region: HostRegion) -> None:
        super().__init__(region, ["passed"])

    @property
    def extent(self) -> Extent:
        """Place of the blocks."""
        return replace(super().extent, kind="VRAM")


def until(condition: Any) -> None:
    """Wait for a condition."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def started(client: TransferClient, peer: PeerServer, blocks: Sequence[int]) -> None:
    """Start to pull a request."""
    client.start(BlockTransfer("d", peer, "p", 0, tuple(blocks)))


def ended(client: TransferClient) -> Result:
    """Return the next result."""
    result = client.wait(WAIT_S)
    assert result is not None, "the transfer hangs"
    return result


@settings(deadline=None, max_examples=60)
@given(
    layers=st.integers(1, 5),
    block_bytes=st.sampled_from([1, 7, 64, 4096]),
    gap_bytes=st.sampled_from([0, 3]),
    connections=st.integers(1, 6),
    checksum=st.booleans(),
    data=st.data(),
)
def test_blocks_arrive_unchanged(
    layers: int, block_bytes: int, gap_bytes: int, connections: int, checksum: bool, data: st.DataObject
) -> None:
    """Any blocks at any place arrive over any number of connections, and no other byte of the target changes."""
    held = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True))
    first = data.draw(st.integers(0, len(held) - 1))
    count = data.draw(st.integers(1, len(held) - first))
    targets = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count, unique=True))
    source, target = Cache(layers, block_bytes, gap_bytes, seed=1), Cache(layers, block_bytes, gap_bytes)
    fabric = Fabric()
    with reading(fabric, source, target, ConnectorSettings(connections=connections)) as (server, client, peer):
        server.hold("p", held)
        result = pull(client, peer, targets, first=first, checksum=checksum)
    total = layers * count * block_bytes
    assert (result.failure, result.nbytes, result.nixl_bytes) == ("", total, total)
    expected = Cache(layers, block_bytes, gap_bytes)
    for layer in range(layers):
        for there, here in zip(held[first : first + count], targets, strict=True):
            (view,) = expected.regions[layer].outgoing([here])
            view[:] = source.block(layer, there)
    assert np.array_equal(target.memory, expected.memory)
    assert sum(agent.released for agent in fabric.agents.values()) == len(fabric.reads)


def test_layers_are_read_as_they_are_computed() -> None:
    """A peer that waits for a prompt reads each layer when it has been computed, not before."""
    source, target, fabric = Cache(3, 64, seed=2), Cache(3, 64), Fabric()
    with reading(fabric, source, target) as (server, client, peer):
        client.start(BlockTransfer("d", peer, "p", 0, (4, 5), wait_s=WAIT_S))
        step = Computing("p", "p", (8, 9), 2)
        for layer in range(3):
            assert target.block(layer, 4) == bytes(64)
            server.computed(step, [layer])
            until(lambda layer=layer: target.block(layer, 5) == source.block(layer, 9))
        server.hold("p", [8, 9])
        assert ended(client).failure == ""


def test_blocks_that_were_withdrawn_during_a_read_do_not_count() -> None:
    """The server takes blocks back without waiting for the reader. What the reader gets from then on may be another
    request's."""
    source, target, fabric = Cache(2, 64, seed=3), Cache(2, 64), Fabric()
    fabric.held.set()
    with reading(fabric, source, target, ConnectorSettings(connections=1)) as (server, client, peer):
        server.hold("p", [1, 2])
        started(client, peer, [3, 4])
        until(lambda: fabric.reading)
        server.withdraw("p")
        source.memory[:] = 0
        fabric.held.clear()
        result = ended(client)
    assert target.block(0, 3) == bytes(64), "the read has ended after the blocks were overwritten"
    assert result.failure in ("gone", "reset")
    assert (result.nbytes, result.nixl_bytes) == (0, 0)


def test_a_cancelled_transfer_ends_only_after_its_reads() -> None:
    """Until then the peer's data may still be written into the blocks, which vLLM would use for another request."""
    source, target, fabric = Cache(1, 64, seed=4), Cache(1, 64), Fabric()
    fabric.held.set()
    with reading(fabric, source, target, ConnectorSettings(timeout_s=0.2)) as (server, client, peer):
        server.hold("p", [1])
        started(client, peer, [2])
        until(lambda: fabric.reading)
        client.cancel("d")
        until(lambda: not server._reading)
        after = time.monotonic() + 0.5  # the next messages to the server, which no longer listens, are due before
        until(lambda: time.monotonic() > after)
        assert client.results() == []
        fabric.held.clear()
        result = ended(client)
    assert (result.failure, result.nbytes) == ("cancelled", 0)
    assert target.block(0, 2) == source.block(0, 1)


def test_a_long_read_is_no_failure() -> None:
    """The client tells the server that it is still reading."""
    source, target, fabric = Cache(1, 64, seed=5), Cache(1, 64), Fabric()
    fabric.held.set()
    with reading(fabric, source, target, ConnectorSettings(timeout_s=3.0, connections=1)) as (server, client, peer):
        server.hold("p", [1])
        started(client, peer, [2])
        until(lambda: fabric.reading)
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 4.0)
        assert client.results() == []
        fabric.held.clear()
        assert ended(client).failure == ""
    assert len(fabric.reads) == 1


def test_regions_are_read_together() -> None:
    """A short prompt of 40 layers is one read. Layers that are still being written by the device are one read each."""
    source, target, fabric = Cache(40, 64, seed=8), Cache(40, 64), Fabric()
    passed: list[str] = []
    with reading(fabric, source, target, ConnectorSettings(timeout_s=30.0, connections=1)) as (server, client, peer):
        server.hold("p", [3, 5])
        assert pull(client, peer, [7, 2]).failure == ""
        assert [len(read.local) for read in fabric.reads] == [80]
        for layer in range(40):
            assert (target.block(layer, 7), target.block(layer, 2)) == (source.block(layer, 3), source.block(layer, 5))
        step = Computing("q", "q", (1,), 1)
        for layer in range(40):
            server.computed(step, [layer], partial(passed.append, str(layer)))
        client.start(BlockTransfer("e", peer, "q", 0, (9,)))
        assert ended(client).failure == ""
        assert [len(read.local) for read in fabric.reads[1:]] == [1] * 40
    assert passed == [str(layer) for layer in range(40)]


def test_a_message_without_parts_is_refused() -> None:
    """It would be confirmed without a read."""
    source, target, fabric = Cache(1, 64), Cache(1, 64), Fabric()
    offer = SharedMemory(source.regions, fabric.agent()).offer

    def peer_of(channel: FramedSocket) -> None:
        accept_client(channel)
        channel.expect(Attach)
        channel.send(offer)
        channel.expect(Fetch)
        channel.send(MemoryParts(()))
        channel.expect(Copied)

    with scripted_peer(peer_of) as peer:
        memory = SharedMemory(target.regions, fabric.agent())
        client = TransferClient(target.regions, target.layout, OPTIONS, environ={}, memory=memory)
        started(client, peer, [2])
        assert ended(client).failure == "malformed"
        client.close()


def test_a_silent_reader_is_given_up() -> None:
    """A peer that neither reads nor says that it is reading does not hold blocks forever."""
    source, fabric = Cache(1, 64, seed=6), Fabric()
    memory = SharedMemory(source.regions, fabric.agent())
    options = ConnectorSettings(timeout_s=0.3, hold_s=0.1)
    with ends(source, Cache(1, 64), options, options, memory=memory) as (server, client, peer):
        server.hold("p", [1])
        connections = client._pool
        channel, offer = connections.request(peer, Attach())
        assert isinstance(offer, Attached)
        assert offer.extents == tuple(region.extent for region in source.regions)
        channel.send(Fetch(request_id="p", first=0, count=1, transfer="t"))
        assert isinstance(channel.receive_next(), MemoryParts)
        until(lambda: bool(server.freed()))
        connections.drop(channel)


@pytest.mark.parametrize("failing", [1, 2])
def test_after_a_failed_read_tcp_is_used(failing: int, caplog: pytest.LogCaptureFixture) -> None:
    """The transfer is completed over TCP, and so are the next ones of this peer; the log says so once."""
    source, target, fabric = Cache(2, 64, seed=7), Cache(2, 64), Fabric()
    fabric.failing = failing
    with reading(fabric, source, target, ConnectorSettings(connections=1)) as (server, client, peer):
        for name in ("p", "q"):
            server.hold(name, [1, 2])
            result = pull(client, peer, [3, 4], request=name)
            assert (result.failure, result.nbytes, result.nixl_bytes) == ("", 256, 0)
    assert np.array_equal(target.memory[:, 192:320], source.memory[:, 64:192])
    messages = [record.getMessage() for record in caplog.records if "transferred over TCP" in record.getMessage()]
    assert len(messages) == 1
    assert "NIXL_ERR_REMOTE_DISCONNECT" in messages[0]


def test_idle_connections_are_not_used_after_a_failed_read() -> None:
    """Others to the same peer, which were opened for reads, do not read either."""
    source, target, fabric = Cache(1, 64, seed=15), Cache(1, 64), Fabric()
    fabric.held.set()
    with reading(fabric, source, target) as (server, client, peer):
        for name in ("p", "q", "r"):
            server.hold(name, [1])
        for name in ("p", "q"):
            client.start(BlockTransfer(name, peer, name, 0, (2,)))
        until(lambda: fabric.reading == 2)
        fabric.held.clear()
        assert [ended(client).nixl_bytes for _ in range(2)] == [64, 64]
        fabric.failing = 1
        assert pull(client, peer, [3], request="r").nixl_bytes == 0


def test_the_kernel_s_counters_of_connections_that_read_are_not_reported() -> None:
    """They would show a link that carries almost nothing, and the gateway would learn from them."""
    source, target, fabric = Cache(1, 64, seed=16), Cache(1, 64), Fabric()
    with reading(fabric, source, target) as (server, client, peer):
        for number in range(100):
            server.hold(f"p{number}", [1])
            assert pull(client, peer, [3], request=f"p{number}").nixl_bytes == 64
        sent = server.links()
    assert sum(link.nbytes for link, _ in sent.values()) < 2_000, "at most handshakes of new connections"


def test_nixl_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP is used for a time only, and then also idle connections for it are replaced. The peer's agent is added again,
    because a connection of UCX that has failed is not repaired."""
    source, target, fabric = Cache(1, 64, seed=8), Cache(1, 64), Fabric()
    fabric.failing = 1
    with reading(fabric, source, target, ConnectorSettings(connections=1)) as (server, client, peer):
        for name in ("p", "q"):
            server.hold(name, [1])
            assert pull(client, peer, [3], request=name).nixl_bytes == 0
        monkeypatch.setitem(client._pool._tcp_until, peer, 0.0)  # the time is over
        for name in ("r", "s"):
            server.hold(name, [1])
            result = pull(client, peer, [3], request=name)
            assert (result.failure, result.nixl_bytes) == ("", 64)
    assert [read.state for read in fabric.reads] == ["ERR", "DONE", "DONE"]


def test_a_peer_is_not_added_again_while_others_read_from_it() -> None:
    """UCX frees what reads in progress use when their peer is removed."""
    source, target, fabric = Cache(1, 64, seed=8), Cache(1, 64), Fabric()
    theirs, ours = (SharedMemory(cache.regions, fabric.agent()) for cache in (source, target))
    remote = ours.attach(theirs.offer)
    assert remote is not None
    fabric.held.set()
    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(remote.read, [BlockCopy(0, (n,), (n,))], lambda: None, 60.0) for n in range(2)]
        until(lambda: fabric.reading == 2)
        fabric.reads[0].state = "ERR"
        with pytest.raises(WireError, match="NIXL_ERR_REMOTE_DISCONNECT"):
            next(as_completed(reads, WAIT_S)).result()
        with pytest.raises(WireError, match="others have not ended"):
            ours.attach(theirs.offer)
        fabric.held.clear()
        theirs.progress_until(lambda: not fabric.reading, WAIT_S)
    again = ours.attach(theirs.offer)
    assert again is not None
    for user in (remote, again):
        assert fabric.agents["agent1"].known == ["agent0"]
        user.close()
    assert fabric.agents["agent1"].known == []


def test_agents_of_restarted_peers_are_removed() -> None:
    """Each restart has an agent of its own, whose connections and keys would stay in memory."""
    target, fabric = Cache(1, 64), Fabric()
    ours = SharedMemory(target.regions, fabric.agent())
    for _ in range(3):
        remote = ours.attach(SharedMemory(Cache(1, 64).regions, fabric.agent()).offer)
        assert remote is not None
        remote.close()
    assert fabric.agents["agent0"].known == []


def test_a_server_whose_agent_has_failed_sends_over_tcp(caplog: pytest.LogCaptureFixture) -> None:
    """Reads in progress end with their connection; the next one gets the bytes."""
    source, target, fabric = Cache(1, 64, seed=8), Cache(1, 64), Fabric()
    theirs, ours = (SharedMemory(cache.regions, fabric.agent()) for cache in (source, target))
    fabric.defective = "agent0"
    with ends(source, target, reads_into=ours, memory=theirs) as (server, client, peer):
        until(lambda: theirs.failed)
        server.hold("p", [1])
        result = pull(client, peer, [3])
    assert (result.failure, result.nbytes, result.nixl_bytes) == ("", 64, 0)
    assert [record for record in caplog.records if "NIXL_ERR_UNKNOWN" in record.getMessage()]
    with pytest.raises(WireError, match="the NIXL agent has failed"):
        theirs.progress_until(lambda: False, 1.0)


@pytest.mark.parametrize("theirs", [False, True])
def test_a_peer_whose_memory_cannot_be_read_sends_over_tcp(theirs: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It has no NIXL, or its agent is of no use here."""
    source, target, fabric = Cache(2, 64, seed=9), Cache(2, 64), Fabric()
    fabric.rejecting = True
    memory = SharedMemory(source.regions, fabric.agent()) if theirs else None
    ours = SharedMemory(target.regions, fabric.agent())
    with ends(source, target, reads_into=ours, memory=memory) as (server, client, peer):
        server.hold("p", [1, 2])
        result = pull(client, peer, [3, 4])
    assert (result.failure, result.nbytes, result.nixl_bytes) == ("", 256, 0)
    assert np.array_equal(target.memory[:, 192:320], source.memory[:, 64:192])
    why = "NIXL_ERR_BACKEND" if theirs else "it has no NIXL"
    assert [record for record in caplog.records if why in record.getMessage()]


def test_a_client_without_nixl_is_served_over_tcp() -> None:
    """A server with NIXL serves both kinds of clients."""
    source, target, fabric = Cache(2, 64, seed=10), Cache(2, 64), Fabric()
    with ends(source, target, memory=SharedMemory(source.regions, fabric.agent())) as (server, client, peer):
        server.hold("p", [1, 2])
        result = pull(client, peer, [3, 4])
    assert (result.failure, result.nbytes, result.nixl_bytes) == ("", 256, 0)
    assert not fabric.reads


def test_a_read_from_the_wrong_place_is_noticed_by_the_checksum(tmp_path: Path) -> None:
    """With `checksum` the transfer fails; without it, other bytes arrive: the fault of the live tests."""
    source, target, fabric = Cache(2, 64, seed=11), Cache(2, 64), Fabric()
    fault = tmp_path / "fault"
    fault.write_text("corrupt-layer-1", encoding="utf-8")
    with reading(fabric, source, target, ConnectorSettings(fault_file=str(fault), connections=1)) as (
        server,
        client,
        peer,
    ):
        server.hold("p", [4])
        assert pull(client, peer, [3], checksum=False).failure == ""
        assert (target.block(0, 3), target.block(1, 3)) == (source.block(0, 4), source.block(1, 5))
        server.hold("q", [4])
        assert pull(client, peer, [3], request="q").failure == "checksum"


def test_fences_are_passed_before_blocks_are_read_and_written() -> None:
    """The device may still use the earlier content of the target, or still compute the source."""
    order: list[str] = []
    source, target, fabric = Cache(1, 64, seed=12), Cache(1, 64), Fabric()
    with reading(fabric, source, target) as (server, client, peer):
        server.computed(Computing("p", "p", (1,), 1), [0], lambda: order.append("computed"))
        fence = partial(order.append, f"reads {len(fabric.reads)}")
        client.start(BlockTransfer("d", peer, "p", 0, (2,), fence=fence))
        result = ended(client)
    assert (result.failure, order) == ("", ["computed", "reads 0"])


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ((BLOCKS,), f"block {BLOCKS} or {BLOCKS} is not one of {BLOCKS} blocks"),
        ((-1,), "`int` >= 0 - at `$.parts[0].blocks[0]`"),
        ((1 << 63,), "`int` <= 16777215 - at `$.parts[0].blocks[0]`"),
        ((), "0 numbers of 1 blocks"),
        ((1, 2), "2 numbers of 1 blocks"),
    ],
)
def test_a_peer_cannot_name_other_memory(
    blocks: tuple[int, ...], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that names blocks outside the region, or too few or many, ends the transfer."""
    source, target, fabric = Cache(1, 64), Cache(1, 64), Fabric()
    offer = SharedMemory(source.regions, fabric.agent()).offer

    def peer_of(channel: FramedSocket) -> None:
        accept_client(channel)
        channel.expect(Attach)
        channel.send(offer)
        channel.expect(Fetch)
        channel.send(MemoryParts((BlockPart(region=0, first=0, count=1, number=0, nbytes=64, blocks=blocks),)))
        channel.expect(Copied)
        channel.send(LaneEnd())

    with scripted_peer(peer_of) as peer:
        client = TransferClient(
            target.regions, target.layout, OPTIONS, environ={}, memory=SharedMemory(target.regions, fabric.agent())
        )
        started(client, peer, [2])
        assert ended(client).failure == "malformed"
        client.close()
    assert not fabric.reads
    assert [record for record in caplog.records if sentence in record.getMessage()]


def test_an_offer_must_fit_into_a_message() -> None:
    """Otherwise each transfer would find a closed connection."""
    agent = Fabric().agent()
    agent.name = "x" * HEADER_BYTES_MAX
    memory = SharedMemory(Cache(2, 64).regions, agent)
    with pytest.raises(InputError, match=r"data_plane: NIXL's keys of 2 regions do not fit into a message"):
        memory.serve()


def test_another_number_of_regions_is_not_read() -> None:
    """The offer does not fit the local cache."""
    fabric = Fabric()
    three, two = (SharedMemory(Cache(n, 64).regions, fabric.agent()) for n in (3, 2))
    with pytest.raises(WireError, match="offers 3 regions, not 2"):
        two.attach(three.offer)


def test_a_cache_in_two_kinds_of_memory_is_not_read() -> None:
    """One read has one kind of memory on each side."""
    fabric = Fabric()
    theirs, ours = (SharedMemory(Cache(2, 64).regions, fabric.agent()) for _ in range(2))
    host, other = theirs.offer.extents
    with pytest.raises(WireError, match="offers host memory and device memory"):
        ours.attach(replace(theirs.offer, extents=(host, replace(other, kind="VRAM"))))
    first, second = Cache(2, 64).regions
    with pytest.raises(InputError, match="not in one kind of memory"):
        SharedMemory([first, DeviceRegion(second)], fabric.agent())


def test_a_new_connection_tells_the_last_part_that_was_read() -> None:
    """Otherwise the other parts of that message would be read again."""
    source, target, fabric = Cache(3, 64, seed=9), Cache(3, 64), Fabric()
    theirs = SharedMemory(source.regions, fabric.agent())
    fetches: list[Fetch] = []

    def peer_of(channel: FramedSocket) -> None:
        accept_client(channel)
        channel.expect(Attach)
        channel.send(theirs.offer)
        fetches.append(channel.expect(Fetch))
        if len(fetches) > 1:
            channel.send(LaneEnd())
            return
        channel.send(
            MemoryParts(
                tuple(BlockPart(region=n, first=0, count=1, number=n, nbytes=64, blocks=(4,)) for n in range(3))
            )
        )
        assert theirs.progress_until(channel.readable, WAIT_S)
        channel.expect(Copied)
        channel.send(KeepAlive())

    with scripted_peer(peer_of) as peer:
        memory = SharedMemory(target.regions, fabric.agent())
        client = TransferClient(
            target.regions, target.layout, ConnectorSettings(connections=1), environ={}, memory=memory
        )
        started(client, peer, [2])
        assert ended(client).failure == ""
        client.close()
    assert [fetch.after for fetch in fetches] == [-1, 2]
    assert [target.block(layer, 2) for layer in range(3)] == [source.block(layer, 4) for layer in range(3)]


def test_workers_use_the_plane_of_their_options() -> None:
    """Two workers transfer by NIXL if both ask for it, and count the bytes."""
    source, target, fabric = Cache(2, 64, seed=13), Cache(2, 64), Fabric()
    options = read_options({"data_plane": "nixl", "instance": "p0"})
    producer = ConnectorWorker(source.regions, source.layout, options, consumer=False, environ={}, agent=fabric.agent)
    consumer = ConnectorWorker(target.regions, target.layout, options, producer=False, environ={}, agent=fabric.agent)
    assert producer.address is not None
    host, port = producer.address
    producer.begin(ConnectorStep(holds=[HeldBlocks("p", "p", (1, 2))]))
    params = KvTransferParams(
        remote_engine_id="p",
        remote_request_id="p",
        remote_host=host,
        remote_port=port,
        remote_num_tokens=32,
        remote_prompt="",
        remote_instance="p0",
    )
    consumer.begin(ConnectorStep(pulls=[Pull("d", params, 0, (3, 4))]))
    until(lambda: "d" in consumer.ended()[1])
    counts = consumer.counts()
    assert (counts["nbytes"], counts["nixl_bytes"]) == ({"p0": 256}, {"p0": 256})
    consumer.close()
    producer.close()


def test_nixl_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for NIXL does not get TCP without notice."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    cache = Cache(1, 64)
    with pytest.raises(InputError) as caught:
        ConnectorWorker(cache.regions, cache.layout, read_options({"data_plane": "nixl"}))
    assert "data_plane is nixl, but nixl cannot be imported" in str(caught.value)
    with pytest.raises(InputError, match="data_plane"):
        read_options({"data_plane": "rdma"})


@given(
    pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=20),
    stride=st.sampled_from([8, 11]),
)
def test_joined_spans_cover_the_blocks(pairs: list[tuple[int, int]], stride: int) -> None:
    """Byte by byte, both sides name the same as the blocks do; no two adjacent spans could be one."""
    here, there = (np.array(side, np.int64) * stride for side in zip(*pairs, strict=True))
    spans = joined(here, there, 8)
    for side, rows in zip((here, there), spans, strict=True):
        assert [a + k for a in side for k in range(8)] == [a + k for a, n in rows for k in range(n)]
    for (a, n), (b, m), (c, _), (d, _) in zip(spans[0], spans[1], spans[0][1:], spans[1][1:], strict=False):
        assert (a + n, b + m) != (c, d)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10), st.integers(0, 1)), max_size=12))
def test_registered_ranges_are_disjoint(parts: list[tuple[int, int, int]]) -> None:
    """Regions may overlap in memory, as those of layers that lie in one block do. Ranges cover exactly their bytes."""
    extents = [Extent(address=a, stride_bytes=1, nbytes=n, blocks=1, device=device) for a, n, device in parts]
    covered = [(device, byte) for address, n, device in ranges(extents) for byte in range(address, address + n)]
    assert len(covered) == len(set(covered))
    assert set(covered) == {(device, a + k) for a, n, device in parts for k in range(n)}


def test_adjacent_regions_are_registered_separately() -> None:
    """They may be separate allocations of a GPU's memory: one key for both would be the first one's alone."""
    extents = [Extent(address=a, stride_bytes=64, nbytes=640, blocks=10, kind="VRAM") for a in (1000, 1640, 2280)]
    assert ranges(extents) == [(1000, 640, 0), (1640, 640, 0), (2280, 640, 0)]
