"""Prompts for both sides of bench/decision.py, as hashes of blocks of 16 tokens; uses only the standard library.

Dynamo's environment also imports this module, so its index is filled with the same chains in the same places.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

Chain = tuple[int, ...]
BLOCK_TOKENS = 16
SYSTEM_BLOCKS, GROUP_BLOCKS, SHORT_BLOCKS, LONG_BLOCKS = 32, 375, 750, 2048
"""Blocks of the system prompt, a group prefix, a usual prompt (12,000 tokens), and the measured one (32,768)."""
GROUPS, LONG_PROMPTS = 64, 64


class Prompts:
    """Chains with shared beginnings: a system prompt for all, one of 64 group prefixes, and a part of their own."""

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._draw = random.Random(instances)
        system = self._blocks(SYSTEM_BLOCKS)
        self._groups = [system + self._blocks(GROUP_BLOCKS - SYSTEM_BLOCKS) for _ in range(GROUPS)]
        self.long = [self.chain(number, LONG_BLOCKS) for number in range(LONG_PROMPTS)]

    def chain(self, number: int, blocks: int) -> Chain:
        """Return a new prompt of group `number` modulo the number of groups."""
        return self._groups[number % GROUPS] + self._blocks(blocks - GROUP_BLOCKS)

    def placed(self) -> Iterator[tuple[int, Chain]]:
        """Yield (instance, chain) pairs that fill an index as routing would: a group on at most an eighth of the
        instances.

        Every long prompt is stored four times, to different depths, so that instances have matches of different
        lengths.
        """
        spread = max(1, self._instances // 8)
        for number in range(max(2_000, 2 * self._instances)):
            group = number % GROUPS
            yield (7 * group + number // GROUPS % spread) % self._instances, self.chain(group, SHORT_BLOCKS)
        for number, chain in enumerate(self.long):
            for turn in range(4):
                yield (31 * number + turn) % self._instances, chain[: LONG_BLOCKS - 300 * turn]

    def _blocks(self, count: int) -> Chain:
        return tuple(self._draw.getrandbits(63) for _ in range(count))


def copied(chain: Chain) -> Chain:
    """Return the same numbers as separate objects, as in a request that has just been decoded."""
    return tuple(int(str(block)) for block in chain)


def quantiles_us(taken_ns: list[int]) -> dict[str, float]:
    """Return median and 99th percentile in microseconds."""
    ordered = sorted(taken_ns)
    return {"p50_us": ordered[len(ordered) // 2] / 1e3, "p99_us": ordered[len(ordered) * 99 // 100] / 1e3}
