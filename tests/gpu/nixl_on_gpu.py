"""A KV cache on a GPU that another process reads with NIXL: order of the model's work, scattered blocks, dead peers.

Without NVLink and RDMA, UCX reads GPU memory by copies through TCP. `UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on` makes it use
CUDA's interprocess memory on a machine with one GPU, as on one with NVLink.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch  # type: ignore[import-not-found]
from engine.tests.connector.loopback import BLOCKS
from tests.gpu.connector_on_gpu import ALL, GpuCache, busy_model

from kvroute_engine.connector.device import fence_of
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.block_leases import Computing
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.nixl_agent import nixl_agent
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.remote_memory import SharedMemory
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer

LAYERS, SEED = 3, 1
OPTIONS = ConnectorSettings(timeout_s=30.0)
WAIT_S = 120.0


def _ended(side: Callable[[Connection], object], pipe: Connection) -> None:
    try:
        pipe.send(("result", side(pipe)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)  # the destructors of NIXL 1.5.1 crash at the end of a process


def _received(pipe: Connection) -> Any:
    assert pipe.poll(WAIT_S), "the process hangs"
    kind, value = pipe.recv()
    assert kind != "error", value
    return value


class LargeCache(GpuCache):
    """A cache whose layers are separate allocations of the GPU's memory, at adjacent addresses."""

    def __init__(self, layers: int, seed: int | None = None) -> None:
        super().__init__(layers, seed, tokens=128)


class Ends:
    """A prefill process and a decode process; each goes on when both are ready."""

    def __init__(self, prefill: Callable[[Connection], object], decode: Callable[[Connection], object]) -> None:
        self._context = get_context("spawn")
        self.prefill, self.to_prefill = self._start(prefill)
        self.decode, self.to_decode = self._start(decode)
        address = _received(self.to_prefill)
        _received(self.to_decode)
        self.to_prefill.send(None)
        self.to_decode.send(address)

    def _start(self, side: Callable[[Connection], object]) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_ended, args=(side, there))
        process.start()
        return process, here

    def result(self) -> Any:
        """Return what the decode process returned, after the end of both."""
        try:
            return _received(self.to_decode)
        finally:
            if self.prefill.is_alive():
                self.to_prefill.send(None)
            for process in (self.prefill, self.decode):
                process.join(WAIT_S)
                process.kill()


def server_of(cache: GpuCache, pipe: Connection) -> TransferServer:
    """Offer a cache, tell its address, and return when the decode process is ready."""
    server = TransferServer(
        cache.regions, cache.layout, OPTIONS, environ={}, memory=SharedMemory(cache.regions, nixl_agent())
    )
    pipe.send(("address", server.address))
    pipe.recv()
    return server


def client_of(cache: GpuCache, pipe: Connection) -> tuple[TransferClient, PeerServer]:
    """Make a client that reads into a cache, and return it with the prefill process as its peer."""
    client = TransferClient(
        cache.regions, cache.layout, OPTIONS, environ={}, memory=SharedMemory(cache.regions, nixl_agent())
    )
    pipe.send(("ready", None))
    return client, PeerServer(*pipe.recv())


def pulled(client: TransferClient, transfer: BlockTransfer) -> Result:
    """Carry out one transfer."""
    client.start(transfer)
    result = client.wait(WAIT_S)
    assert result is not None, "the transfer hangs"
    return result


def nbytes_of(cache: GpuCache) -> int:
    """Return the size of all blocks of all layers."""
    return BLOCKS * sum(cache.layout.region_bytes)


def holds(pipe: Connection) -> None:
    """Hold all blocks of a random cache."""
    server = server_of(LargeCache(LAYERS, seed=SEED), pipe)
    server.hold("p", ALL)
    pipe.recv()
    server.close()


def computes_late(pipe: Connection) -> None:
    """Offer a layer that the model writes after its earlier work."""
    cache = LargeCache(1)
    server = server_of(cache, pipe)
    with busy_model():
        cache.tensors[0].fill_(7)
        server.computed(Computing("p", "p", ALL, BLOCKS), [0, 1], fence_of(cache.tensors[0]))
        pipe.recv()
    server.hold("p", ALL)
    server.close()


def reads_scattered(pipe: Connection, checksum: bool = False) -> tuple[str, bool, bool]:
    """Read all blocks into scattered ones. Return the failure, whether NIXL read all, and whether all are equal."""
    cache, source = LargeCache(LAYERS), LargeCache(LAYERS, seed=SEED)
    into = tuple(torch.randperm(BLOCKS).tolist())
    client, peer = client_of(cache, pipe)
    result = pulled(client, BlockTransfer("d", peer, "p", 0, into, checksum=checksum))
    pairs = zip(source.tensors, cache.tensors, strict=True)
    equal = all(torch.equal(there, here[:, list(into)]) for there, here in pairs)
    return result.failure, result.nixl_bytes == nbytes_of(cache), equal


def reads_with_checksums(pipe: Connection) -> tuple[str, bool, bool]:
    """Do the same with checksums."""
    return reads_scattered(pipe, checksum=True)


def reads_a_late_layer(pipe: Connection) -> tuple[str, bool, bool]:
    """Read a layer that the model writes at that time."""
    cache = LargeCache(1)
    client, peer = client_of(cache, pipe)
    result = pulled(client, BlockTransfer("d", peer, "p", 0, ALL, wait_s=60.0))
    return result.failure, result.nixl_bytes == nbytes_of(cache), bool((cache.tensors[0] == 7).all())


def reads_behind_a_late_write(pipe: Connection) -> tuple[str, bool, bool]:
    """Read into blocks that the model still uses for an earlier request."""
    cache, source = LargeCache(LAYERS), LargeCache(LAYERS, seed=SEED)
    client, peer = client_of(cache, pipe)
    with busy_model():
        for tensor in cache.tensors:
            tensor.fill_(7)
        result = pulled(client, BlockTransfer("d", peer, "p", 0, ALL, fence=fence_of(cache.tensors[0])))
    equal = all(torch.equal(*pair) for pair in zip(source.tensors, cache.tensors, strict=True))
    return result.failure, result.nixl_bytes == nbytes_of(cache), equal


def reads_before_and_after_a_death(pipe: Connection) -> tuple[str, str]:
    """Read from a process, which is then killed, and again. Return both failures."""
    cache = LargeCache(LAYERS)
    client, peer = client_of(cache, pipe)
    first = pulled(client, BlockTransfer("d", peer, "p", 0, ALL[:4])).failure
    pipe.send(("read", None))
    pipe.recv()
    return first, pulled(client, BlockTransfer("e", peer, "q", 0, ALL)).failure


def holds_two(pipe: Connection) -> None:
    """Hold two requests."""
    server = server_of(LargeCache(LAYERS, seed=SEED), pipe)
    server.hold("p", ALL[:4])
    server.hold("q", ALL)
    time.sleep(WAIT_S)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (holds, reads_scattered),
        (holds, reads_with_checksums),
        (computes_late, reads_a_late_layer),
        (holds, reads_behind_a_late_write),
    ],
)
def test_blocks_arrive_in_the_gpu_s_memory(prefill: Callable[..., object], decode: Callable[..., object]) -> None:
    """They are those that the model has written, in their places, and NIXL has read every byte."""
    assert Ends(prefill, decode).result() == ("", True, True)


def test_a_read_from_a_dead_process_fails() -> None:
    """The decode instance learns of it from the connection."""
    both = Ends(holds_two, reads_before_and_after_a_death)
    _received(both.to_decode)
    both.prefill.kill()
    both.prefill.join()
    both.to_decode.send(None)
    assert both.result() == ("", "refused")
