"""Assigns a transfer's bytes to its connections: a connection with room takes the next chunk. No I/O; the caller locks.

A lane is one connection of a transfer, together with its replacements when it breaks. Chunks are numbered per lane, so
the last number that has arrived determines which of them must be assigned again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

CHUNK_BYTES_MIN = 64 << 10
"""Towards the end chunks are smaller, so that no slow connection is left with a large one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` blocks of one region from position `first` of the prompt; `number` counts within the lane."""

    region: int
    first: int
    count: int
    number: int = 0

    @property
    def end(self) -> int:
        """Position after the last block."""
        return self.first + self.count


@dataclass(slots=True)
class _Lane:
    turn: int = 0
    next_number: int = 0
    in_flight: list[Chunk] = field(default_factory=list)


class ChunkScheduler:
    """Chunks of one transfer, region by region. Every chunk belongs to one lane at a time."""

    def __init__(
        self,
        region_bytes: Sequence[int],
        first: int,
        count: int,
        *,
        most: int,
        least: int = CHUNK_BYTES_MIN,
    ) -> None:
        """Args:
        region_bytes: bytes of a block, by region.
        first: position in the prompt.
        count: number of blocks.
        most, least: bytes of a chunk; large ones save headers and copies.
        """
        self._region_bytes, self._end, self._least, self._most = region_bytes, first + count, least, most
        self._next = [first] * len(region_bytes)
        """Position of the first block that has not been assigned, by region."""
        self._rest_bytes = count * sum(region_bytes)
        self._lost: deque[Chunk] = deque()
        self._lanes: dict[int, _Lane] = {}

    def begin(self, lane: int, after: int = -1) -> int:
        """Start a connection of `lane`, whose chunks have arrived up to number `after`. Later chunks are assigned
        again.

        Returns:
            The lane's turn. A connection with an older turn must stop, because its peer has given it up.
        """
        state = self._lanes.setdefault(lane, _Lane())
        self._lost.extend(piece for piece in state.in_flight if piece.number > after)
        state.in_flight.clear()
        state.turn += 1
        return state.turn

    def turn(self, lane: int) -> int:
        """Return the turn of the connection that carries the lane now."""
        return self._lanes[lane].turn

    def take(self, lane: int, ready: Sequence[int] | None = None) -> Chunk | None:
        """Return the next chunk for `lane`; None if none is left, or none is ready.

        Args:
            ready: number of computed blocks of the prompt, by region; None: all.
        """
        found = self._lost.popleft() if self._lost else self._cut(ready)
        if found is None:
            return None
        state = self._lanes[lane]
        piece = Chunk(found.region, found.first, found.count, state.next_number)
        state.next_number += 1
        state.in_flight.append(piece)
        return piece

    @property
    def dealt(self) -> bool:
        """True if every chunk is assigned to a lane, or has arrived."""
        return not self._lost and not self._rest_bytes

    def _cut(self, ready: Sequence[int] | None) -> Chunk | None:
        """Cut a chunk from the first region with blocks to send. Its size is a lane's share of half of what is left."""
        wanted = min(max(self._rest_bytes // (2 * len(self._lanes)), self._least), self._most)
        for region, first in enumerate(self._next):
            end = self._end if ready is None else min(ready[region], self._end)
            if first < end:
                block_bytes = self._region_bytes[region]
                count = min(max(wanted // block_bytes, 1), end - first)
                self._next[region] += count
                self._rest_bytes -= count * block_bytes
                return Chunk(region, first, count)
        return None
