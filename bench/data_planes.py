"""KV between two processes of this machine by the connector's data planes: GB/s over TCP and by NIXL; `python -m
bench.data_planes`. Needs `make vllm`.

The bound is one copy of as many bytes inside a process. NIXL runs over UCX's TCP here: this shows what NIXL costs
without RDMA, and nothing about networks with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
from bench.measurement import ROOT, Failed, Row, fresh, show

from kvroute_engine.connector.blocks import BlockLayout, HostRegion
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.client import TransferClient
from kvroute_engine.connector.transfer.nixl_agent import nixl_agent
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.remote_memory import SharedMemory
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PLANES = ("tcp", "nixl")
REGIONS, BLOCKS, BLOCK_BYTES = 32, 64, 65_536
"""The layers of Llama-3.1-8B and 1,024 tokens: 128 MiB."""
LAYOUT = BlockLayout(model="m", dtype="bfloat16", block_tokens=16, region_bytes=(BLOCK_BYTES,) * REGIONS)
NBYTES = REGIONS * BLOCKS * BLOCK_BYTES
TRANSFERS, WARM = 12, 3


def cache() -> list[HostRegion]:
    """Return a cache in host memory."""
    layers = (np.ones(BLOCKS * BLOCK_BYTES, np.uint8) for _ in range(REGIONS))
    return [HostRegion.of(layer, BLOCK_BYTES, BLOCK_BYTES) for layer in layers]


def memory(regions: list[HostRegion], nixl: bool) -> SharedMemory | None:
    """Return the regions for reads by NIXL; None: TCP."""
    return SharedMemory(regions, nixl_agent()) if nixl else None


def serve(nixl: bool, pipe: Connection) -> None:
    """Hold the cache's blocks for all transfers, until the pipe's other end says that they are over."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    regions = cache()
    server = TransferServer(regions, LAYOUT, ConnectorSettings(), environ={}, memory=memory(regions, nixl))
    for number in range(TRANSFERS):
        server.hold(f"r{number}", range(BLOCKS))
    pipe.send(server.address)
    pipe.recv()
    server.close()


def transfers(nixl: bool) -> dict[str, float]:
    """Return the median rate of transfers in bytes/s and the share of NIXL's bytes; and the rate of a plain copy."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(nixl, there))
    process.start()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    regions = cache()
    client = TransferClient(regions, LAYOUT, ConnectorSettings(), environ={}, memory=memory(regions, nixl))
    peer, seconds, read = PeerServer(*here.recv()), [], 0
    for number in range(TRANSFERS):
        began = time.perf_counter()
        client.start(BlockTransfer("d", peer, f"r{number}", 0, tuple(range(BLOCKS))))
        result = client.wait(60.0)
        seconds.append(time.perf_counter() - began)
        assert result is not None, "the transfer hangs"
        assert not result.failure, result.failure
        read += result.nixl_bytes
    here.send(None)
    client.close()
    process.join()
    source, target, copies = np.ones(NBYTES, np.uint8), np.ones(NBYTES, np.uint8), []
    for _ in range(TRANSFERS):
        began = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - began)
    rates = {
        name: NBYTES / statistics.median(measured[WARM:]) for name, measured in (("rate", seconds), ("copy", copies))
    }
    return rates | {"nixl_share": read / NBYTES / TRANSFERS}


def main() -> None:
    """Measure every plane in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plane", choices=PLANES, help="for the processes of the bench: measure this one")
    arguments = parser.parse_args()
    if arguments.plane:
        print(json.dumps(transfers(arguments.plane == "nixl")), flush=True)
        os._exit(0)  # the destructors of NIXL 1.5.1 crash at the end of a process
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is missing: run `make vllm`")
    figures: dict[str, list[dict[str, float]]] = {plane: [] for plane in PLANES}
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'engine/src'}", "UCX_TLS": "tcp,self"}
    for number in range(arguments.rounds):
        for plane in PLANES if number % 2 else reversed(PLANES):
            figures[plane].append(fresh("bench.data_planes", "--plane", plane, python=str(PYTHON), env=variables))
    rows = []
    for plane, trials in figures.items():
        if any(trial["nixl_share"] != (plane == "nixl") for trial in trials):
            raise Failed(f"{plane}: another plane was used")
        rate, copy = (statistics.median(trial[name] for trial in trials) / 1e9 for name in ("rate", "copy"))
        each = sorted(trial["rate"] / 1e9 for trial in trials)
        rows.append(
            Row(
                measure=f"KV of 128 MiB, {plane}",
                unit="GB/s",
                better="higher",
                ours=rate,
                peer=copy,
                peer_name="one copy in memory",
                note=f"{plane}: {each[0]:.2f} to {each[-1]:.2f} GB/s in {len(each)} rounds",
            )
        )
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
