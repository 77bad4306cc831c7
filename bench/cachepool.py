"""Time per block of CachePool at 10,000 and 1,000,000 blocks, compared with a plain version on the same prompts.

`python -m bench.cachepool [--json]`. The pool is full, so every prompt evicts as many blocks as it needs. A prompt is
held, filled and ended as in a prefill; a quarter of its blocks is already cached. The plain pool keeps one ordered
dictionary and one counter per block. It has no states, leases or block numbers, so it does less work than CachePool.
All times are CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from bench.measurement import Row, show

from kvroute.cachepool import CachePool, Layout
from kvroute.llm import Layers, Model

Chain = tuple[int, ...]
BLOCK_TOKENS = 16
PROMPT_BLOCKS, SHARED_BLOCKS, GROUPS = 512, 128, 8
MATCH_BLOCKS = 2048
PROMPTS, ROUNDS = 40, 7
SIZES = (10_000, 1_000_000)
DENSE = Model("dense", (Layers("attention", 1, 1, 64, 64),))
HYBRID = Model("hybrid", (*DENSE.layers, Layers("linear", 1, state_bytes=8 * 256.0 * BLOCK_TOKENS)))
"""A state takes as much memory as 8 blocks."""


class PlainPool:
    """Blocks by hash with a count of holders; blocks without holders in the order of release. It walks every chain."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Chain) -> int:
        """Return the number of cached blocks from the front."""
        for depth, block in enumerate(blocks):
            if block not in self._holders:
                return depth
        return len(blocks)

    def prefill(self, blocks: Chain) -> None:
        """Hold all blocks, evict others for the missing ones, and release all."""
        holders, idle = self._holders, self._idle
        for block in blocks:
            if block in holders:
                if holders[block] == 0:
                    del idle[block]
                holders[block] += 1
            else:
                if len(holders) >= self._capacity_blocks:
                    oldest, _ = idle.popitem(last=False)
                    del holders[oldest]
                holders[block] = 1
        for block in reversed(blocks):
            holders[block] -= 1
            if holders[block] == 0:
                idle[block] = None


class Prompts:
    """Chains of random hashes; each begins like one of a few groups."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._groups = [self.blocks(SHARED_BLOCKS) for _ in range(GROUPS)]

    def blocks(self, count: int) -> Chain:
        """Return `count` new hashes."""
        return tuple(self._draw.getrandbits(64) for _ in range(count))

    def chains(self, count: int) -> list[Chain]:
        """Return prompts, with the groups in turn."""
        return [self._groups[k % GROUPS] + self.blocks(PROMPT_BLOCKS - SHARED_BLOCKS) for k in range(count)]


def prefill(pool: CachePool, blocks: Chain) -> None:
    """Perform the pool operations of a prefill."""
    lease = pool.begin(blocks)
    assert lease is not None
    pool.fill(lease, len(blocks) * BLOCK_TOKENS)
    pool.end(lease)


def copied(chain: Chain) -> Chain:
    """Return the same hashes as other objects, as a decoded prompt has them: equal, but not identical."""
    return tuple(block + 0 for block in chain)


def cpu_s(call: Callable[[Chain], object], chains: Iterable[Chain]) -> float:
    """Return the total CPU seconds of one call for each chain."""
    start_s = time.process_time()
    for chain in chains:
        call(chain)
    return time.process_time() - start_s


def in_turn(
    ours: Callable[[Chain], object], plain: Callable[[Chain], object], make: Callable[[], list[Chain]]
) -> tuple[float, float]:
    """Return the median seconds per call over rounds, of ours and of the plain version, on the same chains."""
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        chains = make()
        rounds.append((cpu_s(ours, chains) / len(chains), cpu_s(plain, chains) / len(chains)))
    return statistics.median(ours_s for ours_s, _ in rounds), statistics.median(plain_s for _, plain_s in rounds)


def measure(model: Model, capacity_blocks: int) -> list[Row]:
    """Return the rows of one model and capacity."""
    pool, plain, prompts = (
        CachePool(Layout.of(model, BLOCK_TOKENS), capacity_blocks),
        PlainPool(capacity_blocks),
        Prompts(capacity_blocks),
    )
    own_blocks = PROMPT_BLOCKS - SHARED_BLOCKS
    for chain in prompts.chains(capacity_blocks // own_blocks + 2 * GROUPS):
        prefill(pool, chain)
        plain.prefill(chain)
    ours_s, plain_s = in_turn(lambda chain: prefill(pool, chain), plain.prefill, lambda: prompts.chains(PROMPTS))
    where = f"{model.name}, {capacity_blocks:,} blocks"
    rows = [
        _row(f"prefill, time per block: {where}", "ns", ours_s / PROMPT_BLOCKS * 1e9, plain_s / PROMPT_BLOCKS * 1e9)
    ]
    long_chains = [prompts.blocks(MATCH_BLOCKS) for _ in range(3)]
    for chain in long_chains:
        prefill(pool, chain)
        plain.prefill(chain)
    ours_s, plain_s = in_turn(
        lambda chain: pool.match_tokens(chain, BLOCK_TOKENS, MATCH_BLOCKS * BLOCK_TOKENS - 1),
        plain.match,
        lambda: [copied(chain) for chain in long_chains] * 20,
    )
    return [*rows, _row(f"match of {MATCH_BLOCKS} blocks: {where}", "us", ours_s * 1e6, plain_s * 1e6)]


def _row(measured: str, unit: str, ours: float, plain: float) -> Row:
    return Row(measure=measured, unit=unit, better="lower", ours=ours, peer=plain, peer_name="plain")


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    as_json = parser.parse_args().json
    prefill(CachePool(Layout.of(HYBRID, BLOCK_TOKENS), 100), tuple(range(20)))  # triggers compilation
    show([row for model in (DENSE, HYBRID) for size in SIZES for row in measure(model, size)], as_json)


if __name__ == "__main__":
    main()
