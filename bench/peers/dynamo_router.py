"""Latency of NVIDIA Dynamo's prefix index and worker selection in one process; prints one JSON line.

It runs in Dynamo's environment and uses the prompts of bench/prompts.py. Its selection service receives cached blocks
only over one socket per worker, so the two are timed separately: `RadixTree.find_matches` over the filled index, and
`SelectionService.select` by hashes with nothing cached. Neither uses network information.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from bench.prompts import BLOCK_TOKENS, LONG_BLOCKS, Chain, Prompts, copied, quantiles_us
from dynamo._core import RadixTree, SelectionService  # type: ignore[import-not-found]

KV_BLOCKS = 34_332
"""180 GB of KV memory for Llama-3-70B in 16 bits, in blocks of 16 tokens."""


def match_us(prompts: Prompts, calls: int) -> dict[str, float]:
    """Measure the prefix match of a long prompt against every worker."""
    tree, known = RadixTree(), 0
    for known, (worker, chain) in enumerate(prompts.placed(), start=1):
        blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
        event = {"event_id": known, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        tree.apply_event(worker, json.dumps(event).encode())
    queries = [list(copied(chain)) for chain in prompts.long]
    depths = tree.find_matches(queries[0], False).scores
    assert max(depths.values()) == LONG_BLOCKS, "the index lacks blocks of an event"
    taken = []
    for call in range(calls):
        start = time.perf_counter_ns()
        tree.find_matches(queries[call % len(queries)], False)
        taken.append(time.perf_counter_ns() - start)
    return quantiles_us(taken)


async def select_us(workers: int, long: list[Chain], calls: int) -> dict[str, float]:
    """Measure the choice of a worker for a long prompt, without booking."""
    service = SelectionService(indexer_threads=2)
    for worker in range(workers):
        await service.upsert_worker(
            {
                "worker_id": worker + 1,
                "model_name": "llama",
                "endpoint": f"http://127.0.0.1:{10_000 + worker}",
                "block_size": BLOCK_TOKENS,
                "data_parallel_size": 1,
                "max_num_batched_tokens": 8_192,
                "total_kv_blocks": KV_BLOCKS,
            }
        )
    hashes = [list(chain) for chain in long]
    taken = []
    for call in range(calls):
        blocks = hashes[call % len(hashes)]
        request = {
            "model_name": "llama",
            "block_hashes": blocks,
            "sequence_hashes": blocks,
            "isl_tokens": LONG_BLOCKS * BLOCK_TOKENS,
        }
        start = time.perf_counter_ns()
        await service.select(request)
        taken.append(time.perf_counter_ns() - start)
    service.shutdown()
    return quantiles_us(taken)


def main() -> None:
    """Print both latencies for the given number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", type=int)
    parser.add_argument("--calls", type=int, default=2_000)
    given = parser.parse_args()
    prompts = Prompts(given.workers)
    match = match_us(prompts, given.calls)
    select = asyncio.run(select_us(given.workers, prompts.long, given.calls))
    print(json.dumps({"match": match, "select": select}))


if __name__ == "__main__":
    main()
