"""One rank of PyTorch's backend `kvroute`: reduces tensors of several sizes and types, and prints a hash of all sums.

Runs in vLLM's environment: `reduce_tensors.py RANK RANKS HOST PORT ROUNDS [STOP]`. Prints `running` after the first
round. With STOP it ends after the round in which rank 0 finds a file of this name. KVROUTE_TEST_DEVICE is the tensors'
device (default: cpu).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]

import kvroute_engine.all_reduce.backend

SIZES = (1, 7, 256, 3_000, 70_000)
DEVICE = os.environ.get("KVROUTE_TEST_DEVICE", "cpu")
TYPES = (torch.float32, torch.bfloat16, torch.float64)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-7}


def tensor(number: int, size: int, rank: int, kind: torch.dtype) -> torch.Tensor:
    """Return a rank's tensor."""
    drawn = torch.Generator().manual_seed(1_000_000 * rank + 1_000 * number + size % 997)
    return torch.randn(size, generator=drawn, dtype=torch.float64).to(kind)


def main() -> None:
    """Reduce, compare with the sum in double precision, and print."""
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"MASTER_ADDR": sys.argv[3], "MASTER_PORT": sys.argv[4]}
    torch.set_num_threads(1)
    dist.init_process_group(kvroute_engine.all_reduce.backend.NAME, rank=rank, world_size=ranks)
    digest, largest = hashlib.sha256(), 0.0
    for number in range(int(sys.argv[5])):
        kind = TYPES[number % len(TYPES)]
        for size in SIZES:
            sums = tensor(number, size, rank, kind).to(DEVICE)
            dist.all_reduce(sums)
            total = sums.cpu()
            given = [tensor(number, size, of_rank, kind).double() for of_rank in range(ranks)]
            magnitude = sum(of_rank.abs() for of_rank in given).max()  # a sum near zero loses digits in any order
            error = float((total.double() - sum(given)).abs().max() / magnitude)
            largest = max(largest, error / TOLERANCE[kind])
            digest.update(total.view(torch.uint8).numpy().tobytes())
        if number == 0:
            print("running", flush=True)
        if len(sys.argv) > 6:
            stop = torch.tensor([rank == 0 and Path(sys.argv[6]).exists()], dtype=torch.int32)
            dist.all_reduce(stop)
            if stop:
                break
    count = torch.tensor([rank + 1])
    dist.all_reduce(count)  # integers: gloo's
    dist.barrier()
    assert int(count) == ranks * (ranks + 1) // 2
    group = dist.group.WORLD
    done = {"hash": digest.hexdigest(), "error": largest, "calls": group.counters.calls}
    print(json.dumps(done | {"fallbacks": group.counters.fallbacks}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
