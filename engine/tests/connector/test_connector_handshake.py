"""The handshake: a peer without a proof of the token uses few resources and gets nothing; later no third party can send
for it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest
from engine.tests.connector.loopback import TOKEN, WAIT_S, Cache, ends, pull
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.authentication import session
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.client import TransferClient
from kvroute_engine.connector.transfer.handshake import accept_handshake, difference, greet
from kvroute_engine.connector.transfer.handshake_limits import Handshakes, network_of
from kvroute_engine.connector.transfer.listener import LIMITS, Admit, ListenerLimits, PeerListener
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.wire import (
    HANDSHAKE_BYTES_MAX,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    VERSION,
    BlockPart,
    Challenge,
    Fetch,
    Hello,
    KeepAlive,
    Message,
    Release,
    WireError,
    decode,
    decode_length,
    encode,
    encode_length,
)

LAYOUT = Cache(1, 64).layout
NETWORKS = ["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.1"]


@given(most=st.integers(1, 6), arrivals=st.lists(st.tuples(st.sampled_from(NETWORKS), st.integers(0, 3)), max_size=40))
def test_the_network_with_the_most_connections_loses_its_oldest_one(most: int, arrivals: list[tuple[str, int]]) -> None:
    """There are never more than `most`; removed is the oldest connection of the network with the most connections."""
    handshakes: Handshakes[int] = Handshakes(most)
    in_progress: list[tuple[int, str]] = []
    for number, (address, ended) in enumerate(arrivals):
        for connection, _ in in_progress[:ended]:
            assert handshakes.end(connection)
            assert not handshakes.end(connection)
        in_progress = [*in_progress[ended:], (number, network_of(address))]
        counts = Counter(network for _, network in in_progress)
        evicted = handshakes.begin(number, address)
        assert (evicted is not None) == (len(in_progress) > most)
        if evicted is not None:
            network = dict(in_progress)[evicted]
            assert counts[network] == max(counts.values())
            assert evicted == min(connection for connection, own in in_progress if own == network)
            in_progress.remove((evicted, network))
        assert len(handshakes) == len(in_progress) <= most


def test_addresses_are_grouped_by_network() -> None:
    """A network is a single IPv4 address or 64 bits of an IPv6 address."""
    networks = [network_of(address) for address in NETWORKS]
    assert networks[2] == networks[3] != networks[4]
    assert networks[0] == networks[5] != networks[1]
    assert network_of("fe80::1%eth0") == network_of("fe80::2")


@given(data=st.binary(max_size=300) | st.binary(max_size=40).map(lambda tail: b"\x89\xa4type\xa5fetch" + tail))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    with suppress(WireError):
        assert decode(encode(decode(data))) == decode(data)


@given(size=st.integers(0, 2**32 - 1), limit=st.sampled_from([HANDSHAKE_BYTES_MAX, HEADER_BYTES_MAX]))
def test_a_long_header_is_rejected_by_its_length_alone(size: int, limit: int) -> None:
    if size <= limit:
        assert decode_length(struct.pack("!I", size), limit) == size
    else:
        with pytest.raises(WireError, match="at most"):
            decode_length(struct.pack("!I", size), limit)


@given(name=st.text(max_size=100), first=st.integers(0, 2**31))
def test_messages_round_trip_through_their_frame(name: str, first: int) -> None:
    fetch = Fetch(request_id=name, first=first, count=1, transfer="t")
    header = encode(fetch)
    assert decode_length(encode_length(header)) == len(header)
    assert decode(header) == fetch


@contextmanager
def listening(options: ConnectorSettings, limits: ListenerLimits = LIMITS) -> Iterator[PeerListener]:
    """Run a server that does the handshake and then keeps the connection until the peer closes it."""

    def serve(channel: FramedSocket, peer: str, admit: Admit) -> None:
        accept_handshake(channel, options.token, options, admit, lambda theirs: difference(LAYOUT, theirs))
        channel.receive()

    listener = PeerListener("127.0.0.1", 0, WAIT_S, serve, limits)
    try:
        yield listener
    finally:
        listener.close()


def left(sock: socket.socket) -> bool:
    """Return whether the peer closes the connection, after any data."""
    sock.settimeout(WAIT_S)
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def test_an_unauthenticated_peer_cannot_announce_a_large_header(caplog: pytest.LogCaptureFixture) -> None:
    """The server closes the connection before the header arrives and logs the reason."""
    with listening(TOKEN) as listener, socket.create_connection(("127.0.0.1", listener.port)) as sock:
        sock.sendall(struct.pack("!I", HANDSHAKE_BYTES_MAX + 1))
        assert left(sock)
    assert f"a header of {HANDSHAKE_BYTES_MAX + 1} bytes; at most {HANDSHAKE_BYTES_MAX}" in caplog.text


def test_one_deadline_covers_the_whole_handshake() -> None:
    """A peer that sends a byte from time to time is disconnected, although each byte comes in time."""
    limits = ListenerLimits(handshake_s=0.2)
    with listening(TOKEN, limits) as listener, socket.create_connection(("127.0.0.1", listener.port)) as sock:
        sock.sendall(struct.pack("!I", HANDSHAKE_BYTES_MAX))
        sent, begun = 0, time.monotonic()
        with suppress(ConnectionError):
            while sent < HANDSHAKE_BYTES_MAX and time.monotonic() < begun + WAIT_S:
                sock.sendall(b"\0")
                sent += 1
                time.sleep(0.02)
        assert sent < HANDSHAKE_BYTES_MAX
        assert time.monotonic() < begun + WAIT_S, "never left"


def test_a_client_disconnects_from_a_server_that_sends_too_slowly() -> None:
    """The client has the same deadline."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(struct.pack("!I", HANDSHAKE_BYTES_MAX))
        stop = threading.Event()

        def send_slowly() -> None:
            with suppress(OSError):
                while not stop.wait(0.02):
                    far.sendall(b"\0")

        thread = threading.Thread(target=send_slowly)
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                FramedSocket(near, WAIT_S, handshake_s=0.2).receive()
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("sent", [b"\0", struct.pack("!I", 100), struct.pack("!I", 100) + b"\0" * 50])
def test_a_header_that_stops_in_the_middle_ends_its_connection(sent: bytes) -> None:
    """A peer with the token may be idle for longer than the limit, and not stop while it sends a header."""
    near, far = socket.socketpair()
    with near, far:
        one = FramedSocket(near, 0.2)
        one.secure(send_key=b"a" * 32, receive_key=b"b" * 32)
        idle = threading.Timer(0.5, far.sendall, (sent,))
        idle.start()
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            one.receive_request()
        assert time.monotonic() > begun + 0.5
        idle.join()


def test_unauthenticated_connections_evict_each_other_and_no_authenticated_peer() -> None:
    """Five silent connections with a limit of two: three are closed; peers with the token are served."""
    limits = ListenerLimits(handshakes=2)
    with listening(TOKEN, limits) as listener, ExitStack() as stack:
        address = ("127.0.0.1", listener.port)

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(address))

        early = FramedSocket(connect(), WAIT_S)
        greet(early, TOKEN.token, LAYOUT, "kv", "early")
        silent = [connect() for _ in range(5)]
        assert all(left(sock) for sock in silent[:3])
        late = FramedSocket(connect(), WAIT_S)
        greet(late, TOKEN.token, LAYOUT, "kv", "late")
        for channel in (early, late):  # answered by the end of the connection, and not broken before
            channel.send(Release("p"))
            assert channel.receive() is None


def test_a_server_with_too_many_peers_reports_it() -> None:
    with listening(TOKEN, ListenerLimits(connections=1)) as listener, ExitStack() as stack:
        first, second = (
            FramedSocket(stack.enter_context(socket.create_connection(("127.0.0.1", listener.port))), WAIT_S)
            for _ in range(2)
        )
        greet(first, TOKEN.token, LAYOUT, "kv", "first")
        with pytest.raises(WireError, match="too many"):
            greet(second, TOKEN.token, LAYOUT, "kv", "second")


def test_silent_connections_do_not_block_other_fetches() -> None:
    """There are more silent connections than the limit; only the latest ones use a thread each."""
    source, target = Cache(1, 64, seed=1), Cache(1, 64)
    with ends(source, target) as (server, client, peer), ExitStack() as stack:
        server.hold("p", [3])
        for _ in range(LIMITS.handshakes + 40):
            sock = stack.enter_context(socket.create_connection((peer.host, peer.port)))
            sock.sendall(struct.pack("!I", HANDSHAKE_BYTES_MAX))
        assert pull(client, peer, [0]).failure == ""  # accepted in order, so after all of them
        # At most the connections of this fetch and one that is closing are added.
        assert sum(thread.name == "kv-serve" for thread in threading.enumerate()) <= LIMITS.handshakes + 3
    assert target.block(0, 0) == source.block(0, 3)


class TcpProxy:
    """A relay that forwards everything to a server in both directions and records the bytes from the server."""

    def __init__(self, address: tuple[str, int], server: tuple[str, int]) -> None:
        self._listener = socket.create_server(address)
        self._server = server
        self.address: tuple[str, int] = self._listener.getsockname()
        self.overheard = bytearray()
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def close(self) -> None:
        """Close all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                self._sockets += [near, far]
                for source, target, keep in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._pass_on, args=(source, target, keep))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if keep:
                    self.overheard += data
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(address: tuple[str, int], server: PeerServer) -> Iterator[TcpProxy]:
    proxy = TcpProxy(address, (server.host, server.port))
    try:
        yield proxy
    finally:
        proxy.close()


def fetch_over(proxy: TcpProxy, client: TransferClient) -> str:
    """Return how a fetch ends if the decode instance has the relay's address."""
    return pull(client, PeerServer(*proxy.address, "prefill0"), [0]).failure


def test_a_man_in_the_middle_cannot_complete_a_handshake() -> None:
    """The relay forwards every byte of a valid handshake, and the server rejects the client, which has proved another
    address."""
    source, target = Cache(1, 4096, seed=2), Cache(1, 4096)
    with ends(source, target) as (server, client, peer), proxied(("127.0.0.1", 0), peer) as proxy:
        server.hold("p", [3])
        assert fetch_over(proxy, client) == "address"
        assert source.block(0, 3)[:16] not in proxy.overheard
        assert server.held == 1
    assert not target.memory.any()


@pytest.mark.parametrize(("advertised", "failure"), [("", "address"), ("127.0.0.2", "")])
def test_a_translated_address_must_be_advertised(advertised: str, failure: str) -> None:
    """The port is the same and the address differs, as behind network address translation."""
    source, target = Cache(1, 64, seed=3), Cache(1, 64)
    options = ConnectorSettings(token="secret", advertised_host=advertised)
    with ends(source, target, options) as (server, client, peer):
        here = PeerServer("127.0.0.1", peer.port)
        with proxied(("127.0.0.2", peer.port), here) as proxy:
            server.hold("p", [3])
            assert fetch_over(proxy, client) == failure


def test_servers_without_a_token_do_not_check_the_address() -> None:
    """There is no secret to protect: every peer that reaches the loopback address may read."""
    source, target = Cache(1, 64, seed=4), Cache(1, 64)
    with (
        ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer),
        proxied(("127.0.0.1", 0), peer) as proxy,
    ):
        server.hold("p", [3])
        assert fetch_over(proxy, client) == ""


@given(
    token=st.text(max_size=8),
    change=st.sampled_from(["token", "nonce", "challenge", "host", "port", "traffic_class", "instance"]),
)
def test_a_session_depends_on_every_field_of_the_handshake(token: str, change: str) -> None:
    """Two handshakes with any difference have no proof and no key in common; only the proof field itself has no
    effect."""
    challenge = Challenge(VERSION, b"s")
    hello = Hello(version=VERSION, nonce=b"c", host="10.0.0.1", port=1, layout=LAYOUT, traffic_class="kv", instance="d")

    def values(token: str, challenge: Challenge, hello: Hello) -> set[bytes]:
        keys = session(token, challenge, hello)
        return {keys.client_proof, keys.server_proof, keys.client_key, keys.server_key}

    plain = values(token, challenge, hello)
    assert len(plain) == 4
    assert values(token, challenge, replace(hello, proof=b"anything")) == plain
    match change:
        case "token":
            other = values(token + "x", challenge, hello)
        case "challenge":
            other = values(token, Challenge(VERSION, b"t"), hello)
        case "nonce":
            other = values(token, challenge, replace(hello, nonce=b"d"))
        case "port":
            other = values(token, challenge, replace(hello, port=2))
        case _:
            other = values(token, challenge, replace(hello, **{change: "other"}))
    assert not plain & other


KEYS = (b"k" * 32, b"l" * 32)
MESSAGES: list[Message] = [
    Fetch(request_id="p", first=0, count=1, transfer="t"),
    Release("p"),
    BlockPart(region=0, first=0, count=1, number=0, nbytes=0),
    KeepAlive(),
]


def recorded(messages: Sequence[Message], key: bytes) -> list[bytes]:
    """Return the frames of the messages in order, as sent over the network."""
    near, far = socket.socketpair()
    frames = []
    with near, far:
        channel = FramedSocket(near, WAIT_S)
        channel.secure(send_key=key, receive_key=b"unused")
        for message in messages:
            channel.send(message)
            frames.append(far.recv(1 << 16))
    return frames


def received_messages(frames: Sequence[bytes], key: bytes) -> Iterator[Message | None]:
    """Yield the messages that the receiver accepts."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"".join(frames))
        near.shutdown(socket.SHUT_WR)
        channel = FramedSocket(far, WAIT_S)
        channel.secure(send_key=b"unused", receive_key=key)
        while (message := channel.receive()) is not None:
            yield message


def flipped(frames: list[bytes], at: int) -> list[bytes]:
    """Flip one bit in the header or the tag of the first frame."""
    frame = bytearray(frames[0])
    frame[LENGTH_BYTES + at % (len(frame) - LENGTH_BYTES)] ^= 1
    return [bytes(frame), *frames[1:]]


TAMPERING: dict[str, Callable[[list[bytes], int], list[bytes]]] = {
    "flipped": flipped,
    "repeated": lambda frames, _: [frames[0], frames[0], *frames[1:]],
    "left out": lambda frames, _: frames[1:],
    "swapped": lambda frames, _: [frames[1], frames[0], *frames[2:]],
    "of another key": lambda frames, _: [*recorded(MESSAGES[1:2], KEYS[1]), *frames[1:]],
}


@pytest.mark.parametrize("what", TAMPERING)
@given(messages=st.permutations(MESSAGES), at=st.integers(0, 200))
@settings(deadline=None, max_examples=20)
def test_a_modified_frame_is_detected(what: str, messages: list[Message], at: int) -> None:
    """Frames are flipped, repeated, dropped, swapped or forged: the receiver never accepts one as a message of its
    peer."""
    frames = recorded(messages, KEYS[0])
    assert list(received_messages(frames, KEYS[0])) == messages
    taken: list[Message | None] = []
    with pytest.raises(WireError, match="tag of this connection"):
        taken.extend(received_messages(TAMPERING[what](frames, at), KEYS[0]))
    assert taken == messages[: len(taken)]


@pytest.mark.parametrize("wait_s", [float("nan"), -1.0])
def test_a_waiting_message_without_a_finite_time_is_rejected(wait_s: float) -> None:
    """A server that waits for NaN seconds would send `KeepAlive` for ever."""
    fetch = Fetch(request_id="r", first=0, count=1, transfer="t", wait_s=wait_s)
    with pytest.raises(WireError, match="malformed"):
        decode(encode(fetch))
