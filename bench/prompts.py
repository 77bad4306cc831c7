"""The prompts that both sides of bench/decision.py see, as hashes of blocks of 16 tokens; standard library only.

Dynamo's environment imports this module too, so that its index is filled with the same chains in the same places.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

Chain = tuple[int, ...]
BLOCK_TOKENS = 16
SYSTEM_BLOCKS, GROUP_BLOCKS, SHORT_BLOCKS, LONG_BLOCKS = 32, 375, 750, 2048
"""Beginning of every prompt; of every prompt of a group; a usual prompt (12,000 tokens); the asked one (32,768)."""
GROUPS, LONG_PROMPTS = 64, 64


class Prompts:
    """Chains that share their beginnings: a system prompt for all, one of 64 group prefixes, a part of their own."""

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._draw = random.Random(instances)
        system = self._blocks(SYSTEM_BLOCKS)
        self._groups = [system + self._blocks(GROUP_BLOCKS - SYSTEM_BLOCKS) for _ in range(GROUPS)]
        self.long = [self.chain(number, LONG_BLOCKS) for number in range(LONG_PROMPTS)]

    def chain(self, number: int, blocks: int) -> Chain:
        """A new prompt of group `number` modulo the groups."""
        return self._groups[number % GROUPS] + self._blocks(blocks - GROUP_BLOCKS)

    def placed(self) -> Iterator[tuple[int, Chain]]:
        """(instance, chain) that fill an index as routing would: a group on an eighth of the instances at most.

        Every long prompt is held four times, to different depths, so that a match has something to tell apart.
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
    """The same numbers as objects of their own, as in a request that has just been decoded."""
    return tuple(int(str(block)) for block in chain)


def quantiles_us(taken_ns: list[int]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(taken_ns)
    return {"p50_us": ordered[len(ordered) // 2] / 1e3, "p99_us": ordered[len(ordered) * 99 // 100] / 1e3}
