"""The connector's two ends on the two sides of a wide-area link, with a KV cache each and without vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from bench.wan.network import LEFT, Network

from kvroute_engine.connector.blocks import BlockLayout, ByteArray, HostRegion
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer

LAYERS = 32
BLOCK_BYTES = 32 << 10
"""Block size of one layer: 16 tokens of 2 KiB, as in a model with 4 KV heads of 128 numbers in bfloat16."""
WAIT_S = 300.0


@dataclass
class Ends:
    """A prefill instance's server on the left, and a decode instance's client on the right."""

    network: Network
    server: TransferServer
    client: TransferClient
    peer: PeerServer
    source: ByteArray
    target: ByteArray

    @property
    def blocks(self) -> int:
        """Number of blocks of the prompt."""
        return int(self.source.shape[1]) // BLOCK_BYTES

    @property
    def nbytes(self) -> int:
        """Size of the prompt's whole KV cache."""
        return int(self.source.nbytes)

    def start(self, name: str, wait_s: float = 0.0) -> float:
        """Start to pull request `name`; return the time of the start."""
        with self.network.right():
            began = time.monotonic()
            blocks = tuple(range(self.blocks))
            self.client.start(BlockTransfer("d", self.peer, name, 0, blocks, wait_s=wait_s))
        return began

    def wait(self) -> Result:
        """Wait for the end of the pull, and check that the bytes equal those of the source."""
        result = self.client.wait(WAIT_S)
        assert result is not None, "the transfer hangs"
        assert not result.failure, result.failure
        assert np.array_equal(self.source, self.target), "the received bytes differ from the sent ones"
        return result


@contextmanager
def ends(network: Network, nbytes: int, connections: int, control: str = "") -> Iterator[Ends]:
    """Create fresh ends without connections, with about `nbytes` of KV."""
    blocks = max(nbytes // (LAYERS * BLOCK_BYTES), 1)
    source = np.random.default_rng(1).integers(0, 256, (LAYERS, blocks * BLOCK_BYTES), np.uint8)
    target: ByteArray = np.zeros_like(source)
    layout = BlockLayout(model="wan", dtype="bfloat16", block_tokens=16, region_bytes=(BLOCK_BYTES,) * LAYERS)
    options = ConnectorSettings(host=LEFT, token="bench", connections=connections, congestion_control=control)
    with network.left():
        server = TransferServer([HostRegion.of(layer, BLOCK_BYTES, BLOCK_BYTES) for layer in source], layout, options)
    client = TransferClient([HostRegion.of(layer, BLOCK_BYTES, BLOCK_BYTES) for layer in target], layout, options)
    try:
        yield Ends(network, server, client, PeerServer(*server.address, "prefill0"), source, target)
    finally:
        client.close()
        server.close()
