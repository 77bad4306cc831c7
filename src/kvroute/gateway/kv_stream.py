"""One engine's numbered batches of KV events in order: gaps, replays and restarts; it does no I/O.

A batch that stays lost makes the gateway forget what it knew of that engine's cache, since it may have held a removal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvroute.gateway.engine_blocks import SLICE_UNITS, EngineBlocks
from kvroute.gateway.kv_batch import BatchError, read_batch
from kvroute.gateway.slices import Meter, Slices
from kvroute.types import Event

_BYTES_PER_UNIT = 64
"""Decoding a batch takes about a microsecond for so many."""
_BATCH_BYTES = 256
"""What a held batch takes beside its own bytes."""
_HELD_BYTES_MAX = 64 << 20
"""Live batches kept while missed ones are repeated; beyond that the missed ones count as lost."""


@dataclass(slots=True)
class StreamCounts:
    """What happened to one engine's stream, for metrics."""

    batches: int = 0
    broken: int = 0
    """Batches that are none, or beyond their bounds; each has cleared the engine's view."""
    gaps: int = 0
    lost: int = 0
    """Gaps that no replay has closed; each has cleared the engine's view."""
    restarts: int = 0


class KvStream:
    """One engine's numbered batches in order. Does no I/O: its driver asks for a replay while `wanted` is a number.

    Batches are applied in slices. Every method gives the events of the first one, and while `pending` the driver calls
    `more` in later turns of its loop, before it passes on what the engine sends next.
    """

    def __init__(self, instance: str, block_tokens: int, *, replays: bool, slice_units: int = SLICE_UNITS) -> None:
        """Args: instance name; tokens of our blocks; whether missed batches can be asked for; work of a slice."""
        self.blocks = EngineBlocks(instance, block_tokens)
        self.counts = StreamCounts()
        self.wanted: int | None = None
        """First batch that a replay under way must bring; None: none is under way."""
        self.rounds = 0
        """Replays wanted so far: one more means that an older one must be given up."""
        self._replays = replays
        self._slice_units = slice_units
        self._expected = 0
        self._last_live = -1
        self._held: dict[int, bytes] = {}
        """Live batches since a replay was wanted, ascending; never empty during one."""
        self._held_bytes = 0
        self._progress = False
        self._broken_off = False
        self._newest_ts = -math.inf
        self._queue: deque[bytes] = deque()
        """Batches in order that are not applied yet."""
        self._work: Iterator[Event | None] | None = None
        """Applies them; None where all is done and told."""
        self._now = -math.inf
        self.why_broken = ""
        """What was wrong with the first broken batch."""

    @property
    def pending(self) -> bool:
        """Whether what was received is not all applied and told yet."""
        return self._work is not None

    def more(self, at: float) -> list[Event]:
        """Another slice of the work: the events to emit now."""
        self._now = at
        if self._work is None:
            self._work = self._applying()
        events: list[Event] = []
        for event in self._work:
            if event is None:
                return events
            events.append(event)
        self._work = None
        return events

    def _applying(self) -> Iterator[Event | None]:
        meter = Meter(self._slice_units)
        while True:
            while self._queue:
                yield from self._apply_batch(self._queue.popleft(), meter)
            yield from self.blocks.told(lambda: self._now, meter)
            if not self._queue:
                return

    def _apply_batch(self, payload: bytes, meter: Meter) -> Slices[None]:
        try:
            batch = read_batch(payload)
        except BatchError as error:
            self.counts.broken += 1
            self.why_broken = self.why_broken or str(error)
            self.blocks.clear()
            return
        self._newest_ts = batch.ts
        if meter.spend(len(payload) // _BYTES_PER_UNIT):
            yield
        for event in batch.events:
            yield from self.blocks.applied(event, meter)

    def received(self, at: float, sequence: int, payload: bytes) -> list[Event]:
        """A live batch. The numbers of one engine process only rise, so a lower one is another process's."""
        if sequence <= self._last_live:
            self.restart()
        self._last_live = sequence
        if self.wanted is not None:
            self._hold(sequence, payload)
        elif sequence == self._expected:
            self._apply(sequence, payload)
        elif sequence > self._expected:
            self._gap(sequence, payload)
        return self.more(at)

    def replayed(self, at: float, sequence: int, payload: bytes) -> list[Event]:
        """A batch of the replay under way; one that comes without a replay is passed by."""
        if self.wanted is None or self._broken_off or sequence < self._expected:
            return []
        if sequence > self._expected:
            if self._progress:  # messages were dropped on the way: the next replay goes on from here
                self._broken_off = True
                return []
            self._lose()
        self._progress = True
        self._apply(sequence, payload)
        return self.more(at)

    def replay_ended(self, at: float) -> list[Event]:
        """No more will come: all was sent, or the engine does not answer."""
        if self.wanted is None:
            return []
        missing = min(self._held) > self._expected
        if missing and self._progress:  # it was cut short, but another one goes further
            self._want_replay()
            return []
        self.wanted = None
        held, self._held, self._held_bytes = self._held, {}, 0
        if missing:
            self._lose()
            self._expected = min(held)
        for sequence, payload in held.items():
            if self.wanted is not None:
                self._hold(sequence, payload)
            elif sequence == self._expected:
                self._apply(sequence, payload)
            elif sequence > self._expected:
                self._gap(sequence, payload)
        return self.more(at)

    def follows(self, started_s: float) -> bool:
        """Whether the last batch is of a process that started then (or of a later one)."""
        return self._newest_ts >= started_s

    def restart(self) -> None:
        """The engine has a new process: nothing of the old one is left, and numbers start at 0 again."""
        self.counts.restarts += 1
        self._clear()
        self._expected, self._last_live, self.wanted = 0, -1, None
        self._held, self._held_bytes = {}, 0

    def close(self) -> None:
        """Drop what is not applied: the work holds this stream."""
        self._queue.clear()
        self._work = None

    def _want_replay(self) -> None:
        self.wanted = self._expected
        self.rounds += 1
        self._progress = self._broken_off = False

    def _gap(self, sequence: int, payload: bytes) -> None:
        self.counts.gaps += 1
        if self._replays:
            self._want_replay()
            self._hold(sequence, payload)
        else:
            self._lose()
            self._apply(sequence, payload)

    def _hold(self, sequence: int, payload: bytes) -> None:
        held_bytes = self._held_bytes + len(payload) + _BATCH_BYTES
        if held_bytes > _HELD_BYTES_MAX:
            # Too long a wait: go on from the newest batch.
            self.wanted, self._held, self._held_bytes = None, {}, 0
            self._lose()
            self._apply(sequence, payload)
        else:
            self._held[sequence] = payload
            self._held_bytes = held_bytes

    def _lose(self) -> None:
        self.counts.lost += 1
        self._clear()

    def _clear(self) -> None:
        """Forget the engine's blocks, and what was to be applied to them."""
        self._queue.clear()
        self._work = None
        self.blocks.clear()

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._expected = sequence + 1
        self.counts.batches += 1
        self._queue.append(payload)
