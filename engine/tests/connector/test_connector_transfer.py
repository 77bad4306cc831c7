"""KV blocks over loopback: they arrive unchanged or the transfer reports the reason; nothing hangs or leaks."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine.tests.connector.loopback import (
    BLOCKS,
    TOKEN,
    WAIT_S,
    Cache,
    Clock,
    FencedRegion,
    accept_client,
    ends,
    pull,
    pulling,
    scripted_peer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute_engine.connector.blocks import runs
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.scheduler import ConnectorScheduler, ConnectorStep, HeldBlocks, Pull
from kvroute_engine.connector.transfer.authentication import session
from kvroute_engine.connector.transfer.channel import BUFFER_BYTES, PROBE_S, FramedSocket, mark, probed, tune
from kvroute_engine.connector.transfer.chunk_scheduler import Chunk
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.faults import corrupt
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer
from kvroute_engine.connector.transfer.wire import (
    VERSION,
    BlockPart,
    Challenge,
    Fetch,
    Hello,
    Welcome,
    WireError,
)
from kvroute_engine.connector.transfer_params import KvTransferParams
from kvroute_engine.connector.worker import ConnectorWorker


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
    source, target = Cache(layers, block_bytes, gap_bytes, seed=1), Cache(layers, block_bytes)
    options = ConnectorSettings(connections=connections)
    with ends(source, target, options, options) as (server, client, peer):
        server.hold("p", held)
        result = pull(client, peer, targets, first=first, checksum=checksum)
    assert (result.failure, result.nbytes) == ("", layers * count * block_bytes)
    expected = np.zeros_like(target.memory)
    for layer in range(layers):
        for there, here in zip(held[first : first + count], targets, strict=True):
            expected[layer, here * block_bytes : (here + 1) * block_bytes] = np.frombuffer(
                source.block(layer, there), np.uint8
            )
    assert np.array_equal(target.memory, expected)


def test_a_large_transfer_is_shared_among_connections() -> None:
    """24 blocks of 4 layers x 256 KiB exceed the socket buffers, so both ends work at the same time."""
    source, target = Cache(4, 256 << 10, seed=2), Cache(4, 256 << 10)
    with ends(source, target) as (server, client, peer):
        server.hold("p", range(BLOCKS))
        result = pull(client, peer, range(BLOCKS))
        assert result.nbytes == BLOCKS * 4 * (256 << 10)
    assert np.array_equal(source.memory, target.memory)


@pytest.mark.parametrize("layer", [0, 2])
def test_only_a_checksum_detects_a_damaged_layer(tmp_path: Path, layer: int) -> None:
    """The fault changes bytes between cache and network. Afterwards the same connections carry correct bytes again."""
    fault_file = tmp_path / "fault"
    fault_file.write_text(f"corrupt-layer-{layer}\n", encoding="utf-8")
    source, target = Cache(3, 64, seed=3), Cache(3, 64)
    with ends(source, target, ConnectorSettings(fault_file=str(fault_file)), ConnectorSettings()) as (
        server,
        client,
        peer,
    ):
        server.hold("p", [5])
        assert pull(client, peer, [7]).failure == "checksum"
        server.hold("q", [5])
        assert client_result(client, peer, "q").failure == ""
        assert [target.block(k, 0) == source.block(k, 5) for k in range(3)] == [k != layer for k in range(3)]
        fault_file.unlink()
        server.hold("r", [5])
        assert client_result(client, peer, "r", checksum=True).failure == ""
        assert [target.block(k, 0) for k in range(3)] == [source.block(k, 5) for k in range(3)]


@given(first=st.integers(0, 5), block=st.integers(0, 9), checksum=st.booleans())
@settings(deadline=None, max_examples=30)
def test_the_fault_damages_one_block_alone(
    tmp_path_factory: pytest.TempPathFactory, first: int, block: int, checksum: bool
) -> None:
    """The fault is in block `block` of the prompt, whichever part is requested; the checksum detects it if the part
    contains it."""
    fault_file = tmp_path_factory.mktemp("fault") / "fault"
    fault_file.write_text(f"corrupt-layer-1-block-{block}", encoding="utf-8")
    source, target = Cache(2, 64, seed=4), Cache(2, 64)
    held, targets = range(10, 18), range(8 - first)
    with ends(source, target, ConnectorSettings(fault_file=str(fault_file)), ConnectorSettings()) as (
        server,
        client,
        peer,
    ):
        server.hold("p", held)
        result = pull(client, peer, targets, first=first, checksum=checksum)
    struck = first <= block < len(held)
    assert result.failure == ("checksum" if struck and checksum else "")
    wrong = [
        (layer, here + first)
        for layer in range(2)
        for here in targets
        if target.block(layer, here) != source.block(layer, held[here + first])
    ]
    assert wrong == ([(1, block)] if struck else [])


def client_result(client: TransferClient, peer: PeerServer, remote: str, checksum: bool = False) -> Result:
    """Pull one block of request `remote` into block 0."""
    client.start(BlockTransfer("d", peer, remote, 0, (0,), checksum))
    result = client.wait(WAIT_S)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("server", "client", "change", "failure"),
    [
        pytest.param(TOKEN, ConnectorSettings(token="guess"), {}, "token", id="wrong-token"),
        pytest.param(TOKEN, ConnectorSettings(), {}, "token", id="no-token"),
        pytest.param(TOKEN, TOKEN, {"tp": 2}, "layout", id="other-tp"),
        pytest.param(TOKEN, TOKEN, {"region_bytes": (64, 32)}, "layout", id="other-blocks"),
        pytest.param(TOKEN, TOKEN, {"dtype": "float16"}, "layout", id="other-dtype"),
    ],
)
def test_unauthenticated_clients_are_rejected(
    server: ConnectorSettings, client: ConnectorSettings, change: dict[str, Any], failure: str
) -> None:
    """Such clients are rejected before any byte of KV is sent, and the blocks stay held for other peers."""
    source, target = Cache(2, 64, seed=4), Cache(2, 64)
    target.layout = msgspec.structs.replace(target.layout, **change)
    with ends(source, target, server, client) as (serving, pulling, peer):
        serving.hold("p", [1])
        assert pull(pulling, peer, [0]).failure == failure
        assert serving.held == 1
    assert not target.memory.any()


def test_a_client_without_the_token_gets_an_error_and_is_disconnected() -> None:
    """The client may be one that does not check the server's proof."""
    source = Cache(1, 64, seed=12)
    with (
        ends(source, Cache(1, 64), TOKEN, TOKEN) as (server, _, peer),
        socket.create_connection((peer.host, peer.port), WAIT_S) as sock,
    ):
        server.hold("p", [0])
        channel = FramedSocket(sock, WAIT_S)
        challenge = channel.expect(Challenge)
        hello = Hello(
            version=VERSION,
            nonce=b"c" * 16,
            host=peer.host,
            port=peer.port,
            layout=source.layout,
            traffic_class="kv",
            instance="x",
        )
        channel.send(msgspec.structs.replace(hello, proof=session("guess", challenge, hello).client_proof))
        channel.send(Fetch(request_id="p", first=0, count=1, transfer="t"))
        with pytest.raises(WireError, match="a different token"):
            channel.expect(BlockPart)
        with pytest.raises(ConnectionError):
            channel.expect(BlockPart)


def test_a_server_without_the_token_gets_no_data() -> None:
    """The server gets neither the token nor any data."""
    target = Cache(1, 64)
    received: list[bytes] = []

    def peer_without_token(channel: FramedSocket) -> None:
        channel.send(Challenge(VERSION, b"n" * 16))
        hello = channel.expect(Hello)
        received.append(msgspec.msgpack.encode(hello))
        channel.send(Welcome(hello.proof))

    with scripted_peer(peer_without_token) as peer, pulling(target, TOKEN) as client:
        assert pull(client, peer, [0]).failure == "token"
    assert b"secret" not in received[0]
    assert not target.memory.any()


@pytest.mark.parametrize("sent", [0, 1, 63, 64, 100, 127])
def test_a_peer_that_dies_during_a_transfer_is_a_failure(sent: int) -> None:
    """The peer dies after any number of bytes of two layers of 64; the received blocks are then invalid."""
    source, target = Cache(2, 64, seed=5), Cache(2, 64)

    def peer_that_dies(channel: FramedSocket) -> None:
        accept_client(channel)
        channel.expect(Fetch)
        for layer in range(2):
            rest = memoryview(source.block(layer, 0))[: max(0, sent - 64 * layer)]
            channel.send(BlockPart(region=layer, first=0, count=1, number=layer, nbytes=64), [rest])
            if len(rest) < 64:
                return

    with scripted_peer(peer_that_dies) as peer, pulling(target, ConnectorSettings()) as client:
        assert pull(client, peer, [0], checksum=False).failure == "reset"


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(BlockPart(region=1, first=4, count=1, number=0, nbytes=64), id="other-layer"),
        pytest.param(BlockPart(region=-1, first=4, count=1, number=0, nbytes=64), id="no-layer"),
        pytest.param(BlockPart(region=0, first=4, count=1, number=0, nbytes=65), id="other-size"),
        pytest.param(BlockPart(region=0, first=3, count=1, number=0, nbytes=64), id="before"),
        pytest.param(BlockPart(region=0, first=4, count=2, number=0, nbytes=128), id="behind"),
        pytest.param(BlockPart(region=0, first=4, count=0, number=0, nbytes=0), id="nothing"),
    ],
)
def test_a_chunk_that_was_not_requested_is_malformed(part: BlockPart) -> None:
    """Nothing is written."""
    target = Cache(1, 64)

    def peer_with_a_wrong_chunk(channel: FramedSocket) -> None:
        accept_client(channel)
        channel.expect(Fetch)
        channel.send(part, [memoryview(bytes([255]) * part.nbytes)])

    with scripted_peer(peer_with_a_wrong_chunk) as peer, pulling(target, ConnectorSettings()) as client:
        assert pull(client, peer, [0], first=4).failure == "malformed"
    assert not target.memory.any()


def test_a_silent_peer_times_out() -> None:
    """The peer accepts the connection and never sends anything."""
    listener = socket.create_server(("127.0.0.1", 0))
    peer = PeerServer("127.0.0.1", listener.getsockname()[1])
    with listener, pulling(Cache(1, 64), ConnectorSettings(timeout_s=0.05)) as client:
        assert pull(client, peer, [0]).failure == "timeout"


def test_a_pull_fails_if_the_port_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pulling(Cache(1, 64), ConnectorSettings()) as client:
        assert pull(client, PeerServer("127.0.0.1", port), [0]).failure == "refused"


def test_closing_the_server_aborts_transfers_in_progress(tmp_path: Path) -> None:
    """A stalled transfer ends when either side closes; `close` does not wait for the peer."""
    fault_file = tmp_path / "fault"
    fault_file.write_text("stall-layer-1", encoding="utf-8")
    source, target = Cache(2, 64, seed=6), Cache(2, 64)
    with ends(source, target, ConnectorSettings(fault_file=str(fault_file)), ConnectorSettings()) as (
        server,
        client,
        peer,
    ):
        server.hold("p", [0])
        client.start(BlockTransfer("d", peer, "p", 0, (0,)))
        server.close()
        result = client.wait(WAIT_S)
        assert result is not None
        assert result.failure in ("reset", "refused")


@pytest.mark.parametrize("repeat", range(20))
def test_closing_the_client_aborts_transfers_in_progress(tmp_path: Path, repeat: int) -> None:
    """The threads may be connecting, in the handshake, or waiting for the first or a later layer."""
    fault_file = tmp_path / "fault"
    fault_file.write_text(f"stall-layer-{repeat % 2}", encoding="utf-8")
    source, target = Cache(2, 64, seed=6), Cache(2, 64)
    with ends(source, target, ConnectorSettings(fault_file=str(fault_file)), ConnectorSettings()) as (
        server,
        client,
        peer,
    ):
        server.hold("p", [0])
        client.start(BlockTransfer("d", peer, "p", 0, (0,)))
        if repeat >= 10:
            while not server.links():
                time.sleep(0.001)
        client.close()
        result = client.wait(WAIT_S)
        assert result is not None
        assert result.failure == "reset"


def test_closing_the_server_does_not_send_a_stalled_layer(tmp_path: Path) -> None:
    """The end of the server must not complete the transfer."""
    fault_file = tmp_path / "fault"
    fault_file.write_text("stall-layer-1", encoding="utf-8")
    views, ending = [memoryview(b"kv")], threading.Event()
    ending.set()
    assert corrupt(fault_file, Chunk(region=0, first=0, count=1, number=0), views, ending) == views
    with pytest.raises(WireError, match="reset"):
        corrupt(fault_file, Chunk(region=1, first=0, count=1, number=1), views, ending)


def test_the_handshake_detects_a_server_that_is_gone() -> None:
    """The peer may have dropped the connection without a reset; then only a keepalive probe detects it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        before = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        with probed(sock):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PROBE_S
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == before


def test_the_client_reconnects_to_a_restarted_server() -> None:
    """The client keeps connections to a server that is gone; it detects this and opens new ones."""
    source, target = Cache(1, 64, seed=7), Cache(1, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        server.hold("p", [0])
        assert pull(client, peer, [0]).failure == ""
        server.close()
        again = TransferServer(source.regions, source.layout, ConnectorSettings(port=peer.port), environ={})
        try:
            again.hold("q", [3])  # the release of the first request may still be in flight
            assert pull(client, peer, [1], request="q").failure == ""
        finally:
            again.close()
    assert target.block(0, 1) == source.block(0, 3)


def test_blocks_are_freed_by_a_release_or_a_timeout() -> None:
    """A successful transfer, a failed one, a release message and a timeout each free a request once."""
    source, target, clock = Cache(1, 64, seed=8), Cache(1, 64), Clock()
    with ends(source, target, ConnectorSettings(hold_s=10.0), ConnectorSettings(), clock=clock) as (
        server,
        client,
        peer,
    ):
        for request in ("p", "short", "unwanted", "forgotten"):
            server.hold(request, [0])
        assert pull(client, peer, [0]).failure == ""
        assert pull(client, peer, [0, 1]).failure == "gone"
        client.start(BlockTransfer("d", peer, "short", 0, (0, 1)))
        result = client.wait(WAIT_S)
        assert result is not None
        assert result.failure == "range"
        client.release(peer, "unwanted")
        freed: set[str] = set()
        while len(freed) < 3:
            freed |= {freed_request.request_id for freed_request in server.freed() if not freed_request.expired}
        assert freed == {"p", "short", "unwanted"}
        clock.now = 10.0
        assert [(freed_request.request_id, freed_request.expired) for freed_request in server.freed()] == [
            ("forgotten", True)
        ]
        client.start(BlockTransfer("d", peer, "forgotten", 0, (0,)))
        late = client.wait(WAIT_S)
        assert late is not None
        assert late.failure == "gone"
        assert server.freed() == []


@pytest.mark.parametrize(("digest", "failure"), [("digest1", ""), ("digest2", "prompt")])
def test_two_prompts_under_one_name_are_not_mixed(caplog: pytest.LogCaptureFixture, digest: str, failure: str) -> None:
    """The second hold is rejected with a log line, and its blocks are freed. A fetch of the first prompt succeeds, a
    fetch of the second one is refused."""
    source, target = Cache(1, 64, seed=13), Cache(1, 64)
    prefill = ConnectorWorker(source.regions, source.layout, ConnectorSettings(), consumer=False, environ={})
    try:
        prefill.begin(ConnectorStep(holds=[HeldBlocks("t", "first", (3,), "digest1")]))
        prefill.begin(ConnectorStep(holds=[HeldBlocks("t", "second", (5,), "digest2")]))
        assert "request second cannot be fetched" in caplog.text
        assert prefill.ended()[0] == {"second"}
        assert prefill.address is not None
        with pulling(target, ConnectorSettings()) as client:
            client.start(BlockTransfer("d", PeerServer(*prefill.address), "t", 0, (0,), prompt=digest))
            result = client.wait(WAIT_S)
    finally:
        prefill.close()
    assert result is not None
    assert result.failure == failure
    assert target.block(0, 0) == (bytes(64) if failure else source.block(0, 3))


def test_a_fetch_may_arrive_before_the_scheduler_reports_the_prompt() -> None:
    """The router may be faster than the engine's next step; if the prompt never comes, the fetch is refused."""
    source, target = Cache(1, 64, seed=9), Cache(1, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        client.start(BlockTransfer("d", peer, "p", 0, (0,)))
        assert client.results() == []
        server.hold("p", [4])
        result = client.wait(WAIT_S)
        assert result is not None
        assert result.failure == ""
    with ends(source, target, ConnectorSettings(), ConnectorSettings(), unknown_wait_s=0.0) as (server, client, peer):
        assert pull(client, peer, [0]).failure == "unknown"
    patient = ConnectorSettings(timeout_s=3.0)  # on both sides: the refusal still comes before the client times out
    with ends(source, target, patient, patient) as (server, client, peer):
        assert pull(client, peer, [0]).failure == "unknown"


@settings(deadline=None, max_examples=40)
@given(noise=st.binary(min_size=1, max_size=200), framed=st.booleans())
def test_random_bytes_do_not_stop_the_server(noise: bytes, framed: bool) -> None:
    """An unknown peer may send any bytes; the next transfer succeeds."""
    source, target = Cache(1, 64, seed=10), Cache(1, 64)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer):
        with socket.create_connection((peer.host, peer.port)) as unauthenticated:
            unauthenticated.sendall((len(noise).to_bytes(4, "big") if framed else b"") + noise)
        server.hold("p", [2])
        assert pull(client, peer, [0]).failure == ""


@given(blocks=st.lists(st.integers(0, 12)), joined=st.booleans())
def test_runs_expand_to_the_same_blocks(blocks: list[int], joined: bool) -> None:
    block_runs = list(runs(blocks, joined))
    assert [block for first, count in block_runs for block in range(first, first + count)] == blocks
    if joined:
        assert all(a + n != b for (a, n), (b, _) in pairwise(block_runs))


@pytest.mark.parametrize(
    ("family", "host", "level", "option"),
    [
        pytest.param(socket.AF_INET, "127.0.0.1", socket.IPPROTO_IP, socket.IP_TOS, id="v4"),
        pytest.param(socket.AF_INET6, "::1", socket.IPPROTO_IPV6, socket.IPV6_TCLASS, id="v6"),
    ],
)
def test_packets_have_the_code_point_of_their_traffic_class(family: int, host: str, level: int, option: int) -> None:
    """AF11 is code point 10, which is 40 in the byte."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        mark(sock, 10)
        assert sock.getsockopt(level, option) == 40


@pytest.mark.parametrize("control", ["reno", ""])
def test_the_requested_congestion_control_is_set(control: str) -> None:
    """The name is the kernel's; every kernel has reno."""
    with socket.socket() as untouched, socket.socket() as sock:
        tune(sock, 0, control=control)
        plain, tuned = (
            opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for opened in (untouched, sock)
        )
    assert tuned.rstrip(b"\0") == (control.encode() or plain.rstrip(b"\0"))


@pytest.mark.parametrize("limit", [None, 212_992, BUFFER_BYTES], ids=["unknown", "small", "large"])
def test_buffers_are_fixed_only_if_the_kernel_grants_the_requested_size(tmp_path: Path, limit: int | None) -> None:
    """A fixed size below the requested one would stop TCP's own growth of the buffer."""
    buffers = (socket.SO_SNDBUF, socket.SO_RCVBUF)
    if limit is not None:
        for name in ("wmem_max", "rmem_max"):
            (tmp_path / name).write_text(f"{limit}\n", encoding="ascii")
    with socket.socket() as untouched, socket.socket() as sock:
        tune(sock, 0, limits=tmp_path)
        plain, tuned = ([opened.getsockopt(socket.SOL_SOCKET, b) for b in buffers] for opened in (untouched, sock))
        assert (tuned == plain) == (limit != BUFFER_BYTES)


@given(tokens=st.integers(1, 150), cached_blocks=st.integers(0, 3))
@settings(deadline=None, max_examples=20)
def test_a_transfer_between_two_instances_end_to_end(tokens: int, cached_blocks: int) -> None:
    """From a finished prompt, through the router's JSON, to blocks in place that are counted and freed at their
    source."""
    source, target = Cache(2, 64, seed=11), Cache(2, 64)
    prompt, options = list(range(tokens)), ConnectorSettings(token="secret", instance="prefill0")
    cached = min(cached_blocks * 16, tokens // 16 * 16)
    held, mine = list(range(3, 3 + -(-tokens // 16))), list(range(10, 10 + -(-tokens // 16)))
    prefill = ConnectorWorker(source.regions, source.layout, options, consumer=False, environ={})
    decode = ConnectorWorker(target.regions, target.layout, options, producer=False, environ={})
    try:
        assert prefill.address is not None
        there = ConnectorScheduler(options, engine_id="p", block_tokens=16)
        there.listening({0: prefill.address})
        params = there.finished(
            "p", {"do_remote_decode": True}, prompt, completed=True, computed_tokens=tokens, blocks=held
        ).kv_transfer_params
        prefill.begin(there.take())
        here = ConnectorScheduler(options, engine_id="d", block_tokens=16)
        here.arrived("d", msgspec.json.decode(msgspec.json.encode(params)), prompt)
        matched = here.matched("d", tokens, cached)
        here.allocated("d", tokens, mine, matched)
        decode.begin(here.take())
        received: set[str] = set()
        while matched and not received:
            received |= decode.ended()[1]
        sent: set[str] = set()
        while not sent:
            sent |= prefill.ended()[0]
    finally:
        decode.close()
        prefill.close()
    assert (received, sent) == ({"d"} if matched else set(), {"p"})
    assert decode.failed_blocks() == set()
    pulled = held[cached // 16 :]
    counts = decode.counts()
    assert counts["nbytes"].get("prefill0", 0) == len(pulled) * 128
    assert counts["transfers"] == ({"prefill0": 1} if pulled else {})
    for layer in range(2):
        for there_block, here_block in zip(pulled, mine[cached // 16 :], strict=True):
            assert target.block(layer, here_block) == source.block(layer, there_block)


def test_blocks_are_written_after_the_device_s_work_with_their_earlier_content() -> None:
    """The fence is made when the pull begins, and passed before the first block is written."""
    source, target = Cache(2, 64, seed=18), Cache(2, 64)
    passed: list[str] = []
    regions = [FencedRegion(region, passed) for region in target.regions]
    options = ConnectorSettings(instance="prefill0")
    prefill = ConnectorWorker(source.regions, source.layout, options, consumer=False, environ={})
    fence = partial(passed.append, "passed")
    decode = ConnectorWorker(regions, target.layout, options, producer=False, fence=lambda: fence, environ={})
    try:
        assert prefill.address is not None
        host, port = prefill.address
        prefill.begin(ConnectorStep(holds=[HeldBlocks("p", "p", (0, 1, 2))]))
        params = KvTransferParams(
            remote_engine_id="p",
            remote_request_id="p",
            remote_host=host,
            remote_port=port,
            remote_num_tokens=48,
            remote_prompt="",
        )
        decode.begin(ConnectorStep(pulls=[Pull("d", params, 0, (4, 5, 6))]))
        while not (received := decode.ended()[1]):
            pass
    finally:
        decode.close()
        prefill.close()
    assert received == {"d"}
    assert decode.failed_blocks() == set()
    assert [target.block(1, block) for block in (4, 5, 6)] == [source.block(1, block) for block in (0, 1, 2)]


def test_a_finished_prompt_can_be_fetched_while_the_next_step_runs() -> None:
    """It is offered before the model of that step runs. The rest of the step, after the model, offers nothing again."""
    source, target = Cache(1, 64, seed=17), Cache(1, 64)
    prefill = ConnectorWorker(source.regions, source.layout, ConnectorSettings(), consumer=False, environ={})
    step = ConnectorStep(holds=[HeldBlocks("t", "p", (3,))])
    try:
        prefill.overwrites(step)
        prefill.offer(step)
        assert prefill.address is not None
        with pulling(target, ConnectorSettings()) as client:
            client.start(BlockTransfer("d", PeerServer(*prefill.address), "t", 0, (0,)))
            result = client.wait(WAIT_S)
            assert result is not None
            assert result.failure == ""
            assert target.block(0, 0) == source.block(0, 3)
            prefill.begin(step)
            sent: set[str] = set()
            while not sent:  # the client releases it after the result; if it is closed first, the hold expires
                sent |= prefill.ended()[0]
            assert sent == {"p"}, "it is held and freed once"
    finally:
        prefill.close()


def test_a_failed_pull_reports_its_blocks_once() -> None:
    """vLLM recomputes exactly these blocks."""
    options = ConnectorSettings()
    target = Cache(1, 64)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    params = KvTransferParams(
        remote_engine_id="p",
        remote_request_id="p",
        remote_host="127.0.0.1",
        remote_port=port,
        remote_num_tokens=40,
        remote_prompt="x",
    )
    worker = ConnectorWorker(target.regions, target.layout, options, producer=False, environ={})
    try:
        worker.begin(ConnectorStep(pulls=[Pull("d", params, 1, (8, 9))]))
        received: set[str] = set()
        while not received:
            received |= worker.ended()[1]
        assert received == {"d"}
        assert (worker.failed_blocks(), worker.failed_blocks()) == ({8, 9}, set())
        assert worker.counts()["failures"] == {f"127.0.0.1:{port}": {"refused": 1}}
    finally:
        worker.close()
