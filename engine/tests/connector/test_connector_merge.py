"""Pulls from two sources over loopback: the prefill instance, and the buffer server of the decode instance's node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from engine.tests.connector.loopback import TOKEN, WAIT_S, Cache
from hypothesis import given
from hypothesis import strategies as st

from kvroute_engine.connector.options import STORAGE_CLASS, ConnectorSettings
from kvroute_engine.connector.scheduler import ConnectorStep, Pull
from kvroute_engine.connector.storage.loads import KeptBlocks
from kvroute_engine.connector.storage.merged_pull import split
from kvroute_engine.connector.transfer.pool import PeerServer, buffer_peer
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer
from kvroute_engine.connector.transfer_params import KvTransferParams
from kvroute_engine.connector.worker import ConnectorWorker

LAYERS, BLOCK_BYTES, BLOCKS = 2, 64, 10
LOCAL = tuple(range(BLOCKS, 2 * BLOCKS))
"""Local blocks of the prompt at the decode instance."""


@given(
    first=st.integers(0, 9),
    kept_first=st.integers(0, 12),
    kept_blocks=st.integers(1, 12),
)
def test_every_block_is_fetched_once(first: int, kept_first: int, kept_blocks: int) -> None:
    """Blocks that the buffer server has come from there, at their position in the read; all others from the peer."""
    whole = BlockTransfer("r", PeerServer("p", 1), "held", first, LOCAL[first:], prompt="digest")
    kept = KeptBlocks(kept_first, kept_blocks, "read", "b:2", "key")
    buffer = buffer_peer("b:2")
    fetched = dict[int, tuple[str, int]]()
    for part in split(whole, kept, buffer):
        assert not part.release
        assert part.blocks
        assert (part.remote_request_id, part.prompt) == (("read", "key") if part.peer == buffer else ("held", "digest"))
        for at, block in enumerate(part.blocks):
            assert block not in fetched
            fetched[block] = (part.peer.host, part.first + at)
    expected = {
        LOCAL[at]: ("b", at - kept_first) if kept_first <= at < kept_first + kept_blocks else ("p", at)
        for at in range(first, BLOCKS)
    }
    assert fetched == expected


@dataclass
class Ends:
    """The two sources, which hold the same prompt, and the worker of a decode instance."""

    prefill: TransferServer
    buffer: TransferServer
    worker: ConnectorWorker
    source: Cache
    stored: Cache
    target: Cache

    def params(self, kept: KeptBlocks | None) -> KvTransferParams:
        host, port = self.prefill.address
        return KvTransferParams(
            remote_engine_id="e",
            remote_request_id="held",
            remote_host=host,
            remote_port=port,
            remote_num_tokens=BLOCKS * 32,
            remote_prompt="",
            kept=kept,
        )

    def kept(self, first: int, blocks: int, **more: Any) -> KeptBlocks:
        host, port = self.buffer.address
        return msgspec.structs.replace(KeptBlocks(first, blocks, "read", f"{host}:{port}", "key"), **more)

    def pull(self, kept: KeptBlocks | None, first: int = 0) -> set[int]:
        """Pull the prompt from position `first` on; return the blocks that have not arrived."""
        self.worker.begin(ConnectorStep(pulls=[Pull("r", self.params(kept), first, LOCAL[first:])]))
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            _, received = self.worker.ended()
            if received:
                assert received == {"r"}
                return self.worker.failed_blocks()
            time.sleep(0.005)
        raise TimeoutError("the pull hangs")

    def origins(self) -> str:
        """Return where each block of the prompt came from: p, b, or - if it has not arrived."""
        origin = ""
        for at, block in enumerate(LOCAL):
            content = self.target.block(0, block)
            origin += {self.source.block(0, at): "p", self.stored.block(0, at): "b", bytes(BLOCK_BYTES): "-"}[content]
        return origin

    def released(self, *servers: TransferServer) -> None:
        """Wait until the servers may free the blocks."""
        deadline_s = time.monotonic() + WAIT_S
        while any(server.held for server in servers):
            assert time.monotonic() < deadline_s, "blocks are still held"
            for server in servers:
                server.freed()
            time.sleep(0.005)


@contextmanager
def running() -> Iterator[Ends]:
    """Run both sources. The content of their blocks differs, so that a test can tell them apart."""
    source, stored, target = (
        Cache(LAYERS, BLOCK_BYTES, seed=1),
        Cache(LAYERS, BLOCK_BYTES, seed=2),
        Cache(LAYERS, BLOCK_BYTES),
    )
    prefill, buffer = (TransferServer(cache.regions, cache.layout, TOKEN, environ={}) for cache in (source, stored))
    host, port = buffer.address
    options: ConnectorSettings = msgspec.structs.replace(TOKEN, buffer=f"{host}:{port}")
    worker = ConnectorWorker(target.regions, target.layout, options, producer=False, environ={})
    try:
        yield Ends(prefill, buffer, worker, source, stored, target)
    finally:
        worker.close()
        for server in (prefill, buffer):
            server.close()


@pytest.mark.parametrize(
    ("first", "kept", "origins"),
    [(0, (3, 4), "pppbbbbppp"), (0, (0, 10), "bbbbbbbbbb"), (5, (3, 4), "-----bbppp"), (7, (3, 4), "-------ppp")],
)
def test_kept_blocks_come_from_the_own_node(first: int, kept: tuple[int, int], origins: str) -> None:
    """Both sources may free the blocks afterwards, also if the decode instance had all of a source's blocks cached."""
    with running() as ends:
        ends.prefill.hold("held", range(BLOCKS))
        ends.buffer.hold("read", range(kept[0], kept[0] + kept[1]), prompt="key")
        assert ends.pull(ends.kept(*kept), first) == set()
        assert ends.origins() == origins
        ends.released(ends.prefill, ends.buffer)


def test_what_the_buffer_server_does_not_deliver_comes_from_the_prefill_instance() -> None:
    """The read has expired, belongs to other tokens, or the server is down; the prefill instance holds on for it."""
    with running() as ends:
        ends.prefill.hold("held", range(BLOCKS))
        ends.buffer.hold("other", range(BLOCKS), prompt="key")
        ends.buffer.forget("read")
        assert ends.pull(ends.kept(3, 4)) == set()
        assert ends.origins() == "p" * BLOCKS
        ends.released(ends.prefill)
    with running() as ends:
        ends.prefill.hold("held", range(BLOCKS))
        ends.buffer.hold("read", range(3, 7), prompt="another key")
        assert ends.pull(ends.kept(3, 4)) == set()
        assert ends.origins() == "p" * BLOCKS
    with running() as ends:
        ends.prefill.hold("held", range(BLOCKS))
        kept = ends.kept(3, 4)
        ends.buffer.close()
        assert ends.pull(kept) == set()
        assert ends.origins() == "p" * BLOCKS
        ends.released(ends.prefill)


def test_blocks_that_no_source_delivers_are_computed_again() -> None:
    with running() as ends:
        ends.buffer.hold("read", range(3, 7), prompt="key")
        ends.prefill.forget("held")
        assert ends.pull(ends.kept(3, 4)) == {*LOCAL[:3], *LOCAL[7:]}
        assert ends.origins() == "---bbbb---"
        ends.released(ends.buffer)


def test_blocks_on_another_node_are_not_fetched() -> None:
    """The request was decoded elsewhere; the router releases the read."""
    with running() as ends:
        ends.prefill.hold("held", range(BLOCKS))
        ends.buffer.hold("read", range(3, 7), prompt="key")
        assert ends.pull(ends.kept(3, 4, data="10.9.9.9:7201")) == set()
        assert ends.origins() == "p" * BLOCKS
        ends.released(ends.prefill)
        assert ends.buffer.held == 1


def test_a_prompt_that_is_cached_releases_both_sources() -> None:
    with running() as ends:
        ends.prefill.hold("held", range(BLOCKS))
        ends.buffer.hold("read", range(3, 7), prompt="key")
        ends.worker.begin(ConnectorStep(releases=[ends.params(ends.kept(3, 4))]))
        ends.released(ends.prefill, ends.buffer)


def test_transfers_with_the_buffer_server_have_its_class() -> None:
    assert buffer_peer("[::1]:7201") == PeerServer("::1", 7201, "buffer [::1]:7201", STORAGE_CLASS)
