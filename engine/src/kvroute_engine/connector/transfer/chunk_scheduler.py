"""Assigns a transfer's bytes to its connections: a connection with room takes the next chunk. No I/O; the caller locks.

A lane is one connection of a transfer, together with its replacements when it breaks. Chunks are numbered per lane, so
the last number that has arrived determines which of them must be assigned again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

TOGETHER_MAX = 1024
"""Maximum number of chunks that a lane takes together, so that their headers fit into a message."""
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
        self._region_bytes, self._end, self._most, self._least = region_bytes, first + count, most, least
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
        found = self._next_chunk(ready, self._share_bytes(self._most, self._least), 1)
        return self._assigned(lane, found) if found else None

    def take_together(self, lane: int, ready: Sequence[int] | None, *, most: int, least: int) -> list[Chunk]:
        """Return the next chunks for `lane`, of one or more regions; empty if none is left, or none is ready.

        Args:
            ready: number of computed blocks of the prompt, by region; None: all.
            most, least: bytes of the chunks together; a single block may have more.
        """
        taken: list[Chunk] = []
        room = self._share_bytes(most, least)
        while len(taken) < TOGETHER_MAX and (found := self._next_chunk(ready, room, 0 if taken else 1)):
            taken.append(self._assigned(lane, found))
            room -= found.count * self._region_bytes[found.region]
        return taken

    @property
    def dealt(self) -> bool:
        """True if every chunk is assigned to a lane, or has arrived."""
        return not self._lost and not self._rest_bytes

    def _share_bytes(self, most: int, least: int) -> int:
        """Return the size of the next chunk: a lane's share of half of what is left."""
        return min(max(self._rest_bytes // (2 * len(self._lanes)), least), most)

    def _assigned(self, lane: int, found: Chunk) -> Chunk:
        state = self._lanes[lane]
        piece = Chunk(found.region, found.first, found.count, state.next_number)
        state.next_number += 1
        state.in_flight.append(piece)
        return piece

    def _next_chunk(self, ready: Sequence[int] | None, nbytes: int, blocks: int) -> Chunk | None:
        """Cut a chunk of at most `nbytes`, and at least `blocks` blocks, from a lost one, or from the first region with
        blocks to send. Return None if there is none."""
        if self._lost:
            lost = self._lost.popleft()
            count = min(max(nbytes // self._region_bytes[lost.region], blocks), lost.count)
            if count < lost.count:
                self._lost.appendleft(Chunk(lost.region, lost.first + count, lost.count - count))
            return Chunk(lost.region, lost.first, count) if count else None
        for region, first in enumerate(self._next):
            end = self._end if ready is None else min(ready[region], self._end)
            if first < end:
                block_bytes = self._region_bytes[region]
                count = min(max(nbytes // block_bytes, blocks), end - first)
                if not count:
                    return None
                self._next[region] += count
                self._rest_bytes -= count * block_bytes
                return Chunk(region, first, count)
        return None
