"""Blocks of a KV cache between a GPU and host memory, as the connector copies them: GB/s, beside one plain copy.

`python -m bench.gpu_copies`, on a machine with a GPU and PyTorch for CUDA. The bound is one copy of a whole pinned
buffer. `pageable` is how PyTorch copies by default, through `tensor.cpu()` and `tensor.to()`. With NIXL installed,
transfers between two processes on the GPU are also read by NIXL; their bound is one copy inside the GPU's memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch  # type: ignore[import-not-found]

from kvroute_engine.connector.blocks import BlockLayout, HostRegion, Region
from kvroute_engine.connector.device import StagedRegion
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.client import TransferClient
from kvroute_engine.connector.transfer.nixl_agent import nixl_agent
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.remote_memory import SharedMemory
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer

BLOCKS, BLOCK_BYTES = 4096, 65_536
"""Keys and values of 16 tokens in one layer of Llama-3.1-8B."""
SIZES = (2, 16, 64, 256)
"""Blocks of a chunk."""
REGIONS, TRANSFER_BLOCKS = 32, 256
"""A transfer: the layers of Llama-3.1-8B and 4,096 tokens, 512 MiB."""
LAYOUT = BlockLayout(model="m", dtype="bfloat16", block_tokens=16, region_bytes=(BLOCK_BYTES,) * REGIONS)
ALL = tuple(range(TRANSFER_BLOCKS))
NBYTES = TRANSFER_BLOCKS * BLOCK_BYTES * REGIONS
REPEATS, WARM = 15, 3
TRANSFERS = REPEATS + WARM


def gb_per_s(run: Callable[[], object], nbytes: int) -> float:
    """Return the median rate of a run that is complete when it returns."""
    for _ in range(WARM):
        run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times) / 1e9


def measure(number: int, scattered: bool) -> dict[str, float]:
    """Return the rates of one size of chunk, by kind of copy."""
    cache = torch.randint(256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    region, nbytes = StagedRegion(cache), number * BLOCK_BYTES
    blocks: Sequence[int] = (
        np.random.default_rng(0).choice(BLOCKS, number, replace=False).tolist() if scattered else range(number)
    )
    index = torch.tensor(blocks, device="cuda")
    pinned = torch.empty((number, BLOCK_BYTES), dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty((number, BLOCK_BYTES), dtype=torch.uint8)
    whole = cache[:number]
    (arrived,) = region.incoming(blocks)

    def synchronized(copy: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            copy()
            torch.cuda.synchronize()

        return run

    return {
        "send": gb_per_s(lambda: region.outgoing(blocks), nbytes),
        "send_pageable": gb_per_s(lambda: cache.index_select(0, index).cpu(), nbytes),
        "send_bound": gb_per_s(synchronized(lambda: pinned.copy_(whole, non_blocking=True)), nbytes),
        "receive": gb_per_s(lambda: region.landed(blocks, [arrived]), nbytes),
        "receive_pageable": gb_per_s(synchronized(lambda: cache.index_copy_(0, index, pageable.to("cuda"))), nbytes),
        "receive_bound": gb_per_s(synchronized(lambda: whole.copy_(pinned, non_blocking=True)), nbytes),
    }


def cache(on_gpu: bool) -> Sequence[Region]:
    """Return a cache of `REGIONS` regions, on the GPU or in host memory."""
    if on_gpu:
        shape = (TRANSFER_BLOCKS, BLOCK_BYTES)
        return [StagedRegion(torch.randint(256, shape, dtype=torch.uint8, device="cuda")) for _ in range(REGIONS)]
    caches = (np.ones(TRANSFER_BLOCKS * BLOCK_BYTES, np.uint8) for _ in range(REGIONS))
    return [HostRegion.of(of_rank, BLOCK_BYTES, BLOCK_BYTES) for of_rank in caches]


def memory(regions: Sequence[Region], nixl: bool) -> SharedMemory | None:
    """Return the regions for reads by NIXL; None: TCP."""
    return SharedMemory(regions, nixl_agent()) if nixl else None


def serve(on_gpu: bool, nixl: bool, pipe: Connection) -> None:
    """Hold the cache's blocks for `TRANSFERS` transfers, until the pipe's other end says that they are over."""
    regions = cache(on_gpu)
    server = TransferServer(regions, LAYOUT, ConnectorSettings(), environ={}, memory=memory(regions, nixl))
    for number in range(TRANSFERS):
        server.hold(f"r{number}", ALL)
    pipe.send(server.address)
    pipe.recv()
    server.close()
    os._exit(0)  # the destructors of NIXL 1.5.1 crash at the end of a process


def transfer_gb_per_s(on_gpu: bool, nixl: bool = False, scattered: bool = False) -> float:
    """Return the median rate of transfers between two processes: over the loopback interface, or read by NIXL."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(on_gpu, nixl, there))
    process.start()
    regions = cache(on_gpu)
    client = TransferClient(regions, LAYOUT, ConnectorSettings(), environ={}, memory=memory(regions, nixl))
    peer, names = PeerServer(*here.recv()), (f"r{number}" for number in range(TRANSFERS))
    into = tuple(np.random.default_rng(0).permutation(TRANSFER_BLOCKS).tolist()) if scattered else ALL

    def run() -> None:
        client.start(BlockTransfer(name := next(names), peer, name, 0, into))
        result = client.wait(60.0)
        assert result is not None
        assert result.failure == "", result.failure
        assert result.nixl_bytes == nixl * NBYTES, "another data plane was used"

    rate = gb_per_s(run, NBYTES)
    client.close()
    here.send(None)
    process.join()
    return rate


def device_copy_gb_per_s() -> float:
    """Return the median rate of one copy inside the GPU's memory, in bytes copied."""
    source = torch.ones(NBYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return gb_per_s(run, NBYTES)


def main() -> None:
    """Print one JSON line for each size of chunk, and one for whole transfers."""
    for scattered in (False, True):
        for number in SIZES:
            rates = {name: round(rate, 2) for name, rate in measure(number, scattered).items()}
            mib = number * BLOCK_BYTES / 2**20
            print(json.dumps({"mib": mib, "blocks": "scattered" if scattered else "adjacent"} | rates))
    for scattered in (False, True):
        rates = {name: transfer_gb_per_s(name == "gpu", scattered=scattered) for name in ("gpu", "memory")}
        if importlib.util.find_spec("nixl"):
            rates["gpu, NIXL"] = transfer_gb_per_s(True, nixl=True, scattered=scattered)
        rates["copy in the gpu"] = device_copy_gb_per_s()
        blocks = "scattered" if scattered else "adjacent"
        print(
            json.dumps({"transfer between": {name: round(rate, 2) for name, rate in rates.items()}, "blocks": blocks})
        )
    sys.stdout.flush()
    os._exit(0)  # the destructors of NIXL 1.5.1 crash at the end of a process


if __name__ == "__main__":
    main()
