"""Median times of PrefixIndex and of a naive index in the same run: `python bench/prefix.py [mooncake.jsonl.zst]`.

The naive index keeps a set of hashes for each instance, walks the prompt once per instance, and has no eviction order.
The real one evicts, with room for `CAPACITY_BLOCKS`. A prompt consists of a system prompt for all, one of 64 group
prefixes, and a part of its own. The tree is filled by placing each group on a few instances, as routing would.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import zstandard

from kvroute.prefix import PrefixIndex, block_hashes
from kvroute.types import IntArray

Chain = tuple[int, ...]
SYSTEM_BLOCKS, GROUP_BLOCKS, SHORT_BLOCKS, LONG_BLOCKS = 32, 375, 750, 2048
GROUPS = 64
CAPACITY_BLOCKS = 20_000


class NaiveIndex:
    """A set of prefix hashes per instance, as in a simple first version."""

    def __init__(self, instances: int) -> None:
        self._held: list[set[int]] = [set() for _ in range(instances)]

    def match(self, blocks: Chain) -> IntArray:
        """Match like PrefixIndex.match."""
        return np.array([self._depth(held, blocks) for held in self._held], np.int64)

    def store(self, instance: int, blocks: Chain) -> None:
        """Store like PrefixIndex.store, without recency, limit or eviction."""
        self._held[instance].update(blocks)

    @staticmethod
    def _depth(held: set[int], blocks: Chain) -> int:
        for depth, block in enumerate(blocks):
            if block not in held:
                return depth
        return len(blocks)


class Prompts:
    """Chains of hashes with shared beginnings; every chain has separate integer objects, like decoded ones."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        system = self._blocks(SYSTEM_BLOCKS)
        self._groups = [system + self._blocks(GROUP_BLOCKS - SYSTEM_BLOCKS) for _ in range(GROUPS)]

    def _blocks(self, count: int) -> Chain:
        return tuple(self._draw.getrandbits(64) for _ in range(count))

    def chain(self, group: int, blocks: int) -> Chain:
        """Return a chain of `blocks` blocks; the first GROUP_BLOCKS are those of the group."""
        return copied(self._groups[group] + self._blocks(blocks - GROUP_BLOCKS))


def copied(chain: Chain) -> Chain:
    """Return the same numbers as other objects: equal, but not identical."""
    return tuple(np.array(chain, np.uint64).tolist())


def median_us(call: Callable[..., object], arguments: Iterable[tuple[object, ...]]) -> float:
    """Return the median time of one call in microseconds; `arguments` has one entry per call."""
    taken = []
    for given in arguments:
        start = time.perf_counter_ns()
        call(*given)
        taken.append(time.perf_counter_ns() - start)
    return sorted(taken)[len(taken) // 2] / 1e3


def bench(instances: int, naive_calls: int) -> None:
    """Print one line of the table; the naive index gets at most 4,000 chains to limit memory."""
    prompts, index, naive = Prompts(instances), PrefixIndex(instances, CAPACITY_BLOCKS), NaiveIndex(instances)
    spread = max(1, instances // 8)
    place = [(k % GROUPS, (k % GROUPS * 7 + k // GROUPS % spread) % instances) for k in range(max(2000, instances * 2))]
    chains = [(instance, prompts.chain(group, SHORT_BLOCKS)) for group, instance in place]
    store_us = median_us(index.store, chains)
    for instance, chain in chains[:4000]:
        naive.store(instance, chain)
    more = [(instance, prompts.chain(k % GROUPS, SHORT_BLOCKS)) for k, (instance, _) in enumerate(chains[:300])]
    naive_store_us = median_us(naive.store, more)
    long_chains = [prompts.chain(k % GROUPS, LONG_BLOCKS) for k in range(200)]
    for number, chain in enumerate(long_chains):
        for turn in range(4):
            kept = chain[: LONG_BLOCKS - 300 * turn]
            index.store((number * 31 + turn) % instances, kept)
            naive.store((number * 31 + turn) % instances, kept)
    queries = [(copied(chain),) for chain in long_chains]
    match_us = median_us(index.match, queries * 10)
    naive_match_us = median_us(naive.match, queries[:naive_calls])
    print(f"{instances:>9}  {match_us:>9.1f}  {naive_match_us:>9.1f}  {store_us:>9.1f}  {naive_store_us:>9.1f}")


def bench_trace(path: Path) -> None:
    """Store and match every request of a Mooncake trace on 16 instances, with and without a limit."""
    with path.open("rb") as packed:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed))
        chains = [tuple(json.loads(line)["hash_ids"]) for line in lines]
    for capacity in (None, 2000):
        index = PrefixIndex(16, capacity)
        store_us = median_us(index.store, [(k % 16, chain) for k, chain in enumerate(chains)])
        match_us = median_us(index.match, [(chain,) for chain in chains])
        print(f"trace, {capacity or 'no'} blocks at most: match {match_us:.1f} us, store {store_us:.1f} us")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="a Mooncake trace, JSON lines packed with zstd")
    trace = parser.parse_args().trace
    draw = random.Random(1)
    tokens = [draw.randrange(150_000) for _ in range(32_768)]
    list_us, array_us = (median_us(block_hashes, [(given,)] * 50) for given in (tokens, np.array(tokens)))
    print(f"block_hashes of {len(tokens)} tokens: list {list_us:.0f} us, array {array_us:.0f} us")
    print(f"match: {LONG_BLOCKS} blocks; store: {SHORT_BLOCKS} blocks, half of them shared; medians in us")
    print(f"{'instances':>9}  {'match':>9}  {'naive':>9}  {'store':>9}  {'naive':>9}")
    for instances, naive_calls in ((16, 200), (128, 200), (1024, 60), (10_000, 10)):
        bench(instances, naive_calls)
    if trace is not None:
        bench_trace(trace)


if __name__ == "__main__":
    main()
