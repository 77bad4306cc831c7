"""One engine's numbered batches of KV events in order: gaps, replays and restarts; it does no I/O.

A lost batch clears the gateway's view of that engine's cache, since the batch may have held a removal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvroute.http.slices import Meter, Slices
from kvroute.serve.telemetry.engine_blocks import SLICE_UNITS, EngineBlocks
from kvroute.serve.telemetry.kv_batch import BatchError, read_batch
from kvroute.types import Event

_BYTES_PER_UNIT = 64
"""Bytes of a batch that are decoded in about a microsecond: one unit of work."""
_BATCH_BYTES = 256
"""Memory that a held batch takes in addition to its own bytes."""
_HELD_BYTES_MAX = 64 << 20
"""Maximum memory for live batches held during a replay; beyond it the missed batches count as lost."""


@dataclass(slots=True)
class StreamCounts:
    """Counts of one engine's stream, for metrics."""

    batches: int = 0
    broken: int = 0
    """Batches that are malformed or exceed their bounds; each has cleared the engine's view."""
    unreadable: int = 0
    """Events of another form in other batches; only their own blocks are not known."""
    gaps: int = 0
    lost: int = 0
    """Gaps that no replay has closed; each has cleared the engine's view."""
    restarts: int = 0


class KvStream:
    """One engine's numbered batches in order. Does no I/O: its driver requests a replay while `wanted` is a number.

    Batches are applied in slices. Every method returns the events of the first slice; while `pending` is true, the
    driver calls `more` in later turns of its loop, before it passes on the next message of the engine.
    """

    def __init__(self, instance: str, block_tokens: int, *, replays: bool, slice_units: int = SLICE_UNITS) -> None:
        """Args: instance name; tokens per block in the gateway; whether missed batches can be replayed; work per
        slice."""
        self.blocks = EngineBlocks(instance, block_tokens)
        self.counts = StreamCounts()
        self.wanted: int | None = None
        """First batch that the current replay must deliver; None: no replay is in progress."""
        self.rounds = 0
        """Replays requested so far; a higher number means that the older replay must be cancelled."""
        self._replays = replays
        self._slice_units = slice_units
        self._expected = 0
        self._last_live = -1
        self._held: dict[int, bytes] = {}
        """Live batches received since a replay was requested, ascending; never empty during one."""
        self._held_bytes = 0
        self._progress = False
        self._broken_off = False
        self._newest_ts = -math.inf
        self._queue: deque[bytes] = deque()
        """Batches in order that are not applied yet."""
        self._work: Iterator[Event | None] | None = None
        """Iterator that applies them; None when all batches are applied and their events emitted."""
        self._now = -math.inf
        self.rank: int | None = None
        """Data-parallel rank of the publisher in the whole engine, by its last batch; None: not known."""
        self.why_broken = ""
        """Error message of the first malformed batch."""
        self.why_unreadable = ""
        """Error message of the first event of another form."""

    @property
    def pending(self) -> bool:
        """Whether some received batches are not yet applied, or their events not yet emitted."""
        return self._work is not None

    def more(self, at: float) -> list[Event]:
        """Run another slice of the work and return the events to emit now."""
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
            yield from self.blocks.event_slices(lambda: self._now, meter)
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
        self.rank = batch.rank
        self.counts.unreadable += batch.unreadable
        self.why_unreadable = self.why_unreadable or batch.why_unreadable
        if meter.spend(len(payload) // _BYTES_PER_UNIT):
            yield
        for event in batch.events:
            yield from self.blocks.applied(event, meter)

    def received(self, at: float, sequence: int, payload: bytes) -> list[Event]:
        """Accept a live batch. Sequence numbers of one engine process only rise, so a lower one means a new process."""
        if sequence <= self._last_live:
            self.restart()
        self._last_live = sequence
        self._take(sequence, payload)
        return self.more(at)

    def replayed(self, at: float, sequence: int, payload: bytes) -> list[Event]:
        """Accept a batch of the current replay; it is ignored if no replay is in progress."""
        if self.wanted is None or self._broken_off or sequence < self._expected:
            return []
        if sequence > self._expected:
            if self._progress:  # messages were dropped on the way: the next replay continues from here
                self._broken_off = True
                return []
            self._lose()
        self._progress = True
        self._apply(sequence, payload)
        return self.more(at)

    def replay_ended(self, at: float) -> list[Event]:
        """End the replay: all batches were sent, or the engine does not respond."""
        if self.wanted is None:
            return []
        missing = min(self._held) > self._expected
        if missing and self._progress:  # the replay was cut short, but another one can continue it
            self._want_replay()
            return []
        self.wanted = None
        held, self._held, self._held_bytes = self._held, {}, 0
        if missing:
            self._lose()
            self._expected = min(held)
        for sequence, payload in held.items():
            self._take(sequence, payload)
        return self.more(at)

    def follows(self, started_s: float) -> bool:
        """Whether the last batch is from a process that started at this time or later."""
        return self._newest_ts >= started_s

    def restart(self) -> None:
        """Start over for a new engine process: its cache is empty, and its sequence numbers start at 0."""
        self.counts.restarts += 1
        self._clear()
        self._expected, self._last_live, self.wanted = 0, -1, None
        self._held, self._held_bytes = {}, 0

    def close(self) -> None:
        """Drop what is not applied: the work holds a reference to this stream."""
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

    def _take(self, sequence: int, payload: bytes) -> None:
        """Apply a live batch, hold it for the end of a replay, or ask for one."""
        if self.wanted is not None:
            self._hold(sequence, payload)
        elif sequence == self._expected:
            self._apply(sequence, payload)
        elif sequence > self._expected:
            self._gap(sequence, payload)

    def _hold(self, sequence: int, payload: bytes) -> None:
        held_bytes = self._held_bytes + len(payload) + _BATCH_BYTES
        if held_bytes > _HELD_BYTES_MAX:
            # The replay takes too long: continue from the newest batch.
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
        """Clear the view of the engine's blocks, and drop the updates that are not applied yet."""
        self._queue.clear()
        self._work = None
        self.blocks.clear()

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._expected = sequence + 1
        self.counts.batches += 1
        self._queue.append(payload)
