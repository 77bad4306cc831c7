"""TCP_INFO of connections: fields are read at the right offsets, and counters lose no bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute_engine.connector.transfer.congestion import (
    Gauges,
    Sample,
    SentCounters,
    TcpInfo,
    TcpMonitor,
    gauges,
    parse,
    sample,
)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect a sending and a receiving socket over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()[:2]) as sender,
        listener.accept()[0] as receiver,
    ):
        yield sender, receiver


def move(sender: socket.socket, receiver: socket.socket, nbytes: int) -> None:
    """Send bytes until the receiver has read all and the sender has the acknowledgement."""
    sender.sendall(b"x" * nbytes)
    left = nbytes
    while left:
        left -= len(receiver.recv(left))
    while (now := sample(sender)) and now.queue_bytes:
        assert now.info.bytes_sent >= nbytes


@settings(deadline=None, max_examples=20)
@given(nbytes=st.lists(st.integers(1, 60_000), min_size=1, max_size=4))
def test_tcp_info_fields_are_read_at_their_offsets(nbytes: list[int]) -> None:
    """The number of bytes equals the bytes sent; segments, round trip and window are within plausible bounds."""
    with pair() as (sender, receiver):
        for some in nbytes:
            move(sender, receiver, some)
        seen = sample(sender)
        assert seen is not None
        info = seen.info
        assert info.bytes_sent - info.bytes_retrans == sum(nbytes)
        assert 1 <= info.data_segs_out <= info.bytes_sent
        assert info.total_retrans <= info.data_segs_out
        assert 500 < info.snd_mss < 1 << 16
        assert 0 < info.min_rtt_us <= 1e6
        assert 0 < info.rtt_us <= 1e6
        assert 1 <= info.snd_cwnd < 1000
        assert info.delivery_rate > 0
        assert 0 <= info.busy_time_us <= 60e6
        assert info.notsent_bytes == 0


def test_bytes_in_the_send_queue_are_counted() -> None:
    """The receiver reads nothing."""
    with pair() as (sender, receiver):
        sender.setblocking(False)
        sender.send(b"x" * 1000)
        written = 1000
        try:
            while True:
                written += sender.send(b"x" * 65536)
        except BlockingIOError:
            seen = sample(sender)
        assert seen is not None
        assert 0 < seen.queue_bytes <= written
        now = gauges([seen])
        assert (now.connections, now.queue_bytes) == (1, float(seen.queue_bytes))
        assert 0 < now.unsent_bytes <= now.queue_bytes
        while (later := sample(sender)) and later.info.busy_time_us == seen.info.busy_time_us:
            pass  # the kernel counts in ticks of its own
        receiver.close()


@given(length=st.integers(0, 240))
def test_fields_missing_in_an_older_kernel_read_as_0(length: int) -> None:
    """Fields never move: those that exist are read, all others are 0."""
    data = bytearray(240)
    struct.pack_into("=I", data, 68, 20_000)
    struct.pack_into("=Q", data, 200, 1 << 40)
    info = parse(bytes(data[:length]))
    assert info.rtt_us == (20_000 if length >= 72 else 0)
    assert info.bytes_sent == (1 << 40 if length >= 208 else 0)
    assert info == TcpInfo(rtt_us=info.rtt_us, bytes_sent=info.bytes_sent)


def test_gauges_aggregate_several_connections() -> None:
    """Two connections have data in flight, one is idle."""
    window = TcpInfo(snd_mss=1000, rtt_us=30_000, snd_cwnd=10, min_rtt_us=20_000, delivery_rate=5, notsent_bytes=9)
    busy = Sample(window, 700)
    other = Sample(TcpInfo(snd_mss=1000, rtt_us=50_000, snd_cwnd=2, min_rtt_us=0, delivery_rate=6), 1)
    resting = Sample(TcpInfo(snd_mss=9, rtt_us=9, snd_cwnd=9, min_rtt_us=9, delivery_rate=9), 0)
    fresh = Sample(TcpInfo(snd_mss=1000, rtt_us=0, snd_cwnd=10, min_rtt_us=2**32 - 1), 1)
    assert gauges([fresh]).min_rtt_s == 0.0
    assert gauges([busy, fresh]).min_rtt_s == 0.02
    aggregate = gauges([busy, resting, other])
    assert astuple(aggregate) == pytest.approx((2, 0.04, 0.02, 12_000.0, 701.0, 11.0, 9.0, 0.0))
    assert gauges([resting]) == gauges([]) == Gauges()


@settings(deadline=None, max_examples=30)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["move", "read", "reopen"]), st.integers(0, 1), st.integers(1, 9_000)), max_size=12
    )
)
def test_counters_are_complete_whenever_they_are_read(actions: list[tuple[str, int, int]]) -> None:
    """Connections are opened and closed between two reads; the sums per target equal the bytes sent. Idle connections
    report nothing."""
    links, moved, reported = TcpMonitor(), {"d0": 0, "d1": 0}, {"d0": SentCounters(), "d1": SentCounters()}
    targets = sorted(moved)

    def read() -> None:
        for target, (sent, _) in links.read().items():
            reported[target] += sent

    with pair() as first, pair() as second:
        pairs = [first, second]
        for number, target in enumerate(targets):
            links.opened(pairs[number][0], target)
        for action, number, nbytes in actions:
            match action:
                case "move":
                    move(*pairs[number], nbytes)
                    moved[targets[number]] += nbytes
                case "read":
                    read()
                case "reopen":
                    links.closing(pairs[number][0])
                    links.opened(pairs[number][0], targets[number])
                    moved[targets[number]] += sent_so_far(pairs[number][0])
        read()
        read()
        assert links.read() == {}
    assert {target: sent.nbytes - sent.again_bytes for target, sent in reported.items()} == moved


def sent_so_far(sock: socket.socket) -> int:
    """Return the bytes sent so far: a socket reopened as a new connection starts with them."""
    seen = sample(sock)
    assert seen is not None
    return seen.info.bytes_sent - seen.info.bytes_retrans


def test_a_closed_socket_is_ignored() -> None:
    with pair() as (sender, _):
        sender.close()
        assert sample(sender) is None
        links = TcpMonitor()
        links.opened(sender, "d0")
        assert links.read() == {}
        links.closing(sender)
        links.closing(sender)
        assert links.read() == {}
