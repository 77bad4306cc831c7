"""One rank whose all-reduces are timed: `rank.py RANK RANKS ADDRESS ROUNDS BYTES...` in an environment with PyTorch.

Prints JSON: for each size the time of every round, from a barrier to the end on this rank, in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]

import kvroute_engine.all_reduce.backend

PORT = "29500"


def main() -> None:
    """Time the rounds after one that is not counted."""
    rank, ranks, rounds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    os.environ |= {"MASTER_ADDR": sys.argv[3], "MASTER_PORT": PORT}
    torch.set_num_threads(1)
    dist.init_process_group(kvroute_engine.all_reduce.backend.NAME, rank=rank, world_size=ranks)
    found = {}
    for nbytes in map(int, sys.argv[5:]):
        tensor = torch.ones(nbytes // 4)
        dist.all_reduce(tensor)
        seconds = []
        for _ in range(rounds):
            tensor.fill_(1.0)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - began)
            assert float(tensor[0]) == ranks
        found[nbytes] = seconds
    print(json.dumps({"seconds": found, "calls": dist.group.WORLD.counters.calls}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
