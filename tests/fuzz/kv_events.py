"""Fuzzing target: batches of KV events, through `gateway.kv_batch`, `gateway.kv_stream` and the prefix index."""

from __future__ import annotations

from typing import Any

from tests.fuzz.cuts import bounded
from tests.serve.telemetry.kv_rig import BLOCK_TOKENS, Engine, batch, feed, stored

from kvroute.prefix import PrefixIndex
from kvroute.serve.telemetry.engine_blocks import SLICE_UNITS
from kvroute.serve.telemetry.kv_batch import BATCH_BLOCKS_MAX, BatchError, BlockEvent, read_batch
from kvroute.serve.telemetry.kv_stream import KvStream
from kvroute.types import Event, KvCleared, KvEvicted, KvStored

INSTRUMENTED = (
    "kvroute.serve.telemetry.kv_batch",
    "kvroute.serve.telemetry.kv_stream",
    "kvroute.serve.telemetry.engine_blocks",
)
RUNS = 4_000


def check(data: bytes) -> str:
    """As a payload: it is read or raises BatchError; slices report the same as a single step, and a clear undoes every
    report. As a script: the index holds the same as a simple model of the engine."""
    _run_script(data[:24])
    try:
        events = bounded(lambda: read_batch(data), 500 + 60 * len(data)).events
    except BatchError:
        stream = KvStream("p0", BLOCK_TOKENS, replays=False)
        assert stream.received(0.0, 0, data) == []
        assert (stream.counts.broken, bool(stream.why_broken)) == (1, True)
        return "refused"
    assert sum(len(event.block_hashes) for event in events) <= BATCH_BLOCKS_MAX
    whole = _events_of([data], SLICE_UNITS)
    assert _events_of([data], 1) == whole
    index = PrefixIndex(1)
    for event in whole:
        match event:
            case KvStored() | KvCleared():
                pass
            case KvEvicted(blocks=blocks, keep=keep):
                assert 0 <= keep < len(blocks)
            case _:
                raise AssertionError(event)
    feed(index, whole)
    prefixes = {
        event.blocks[: end + 1] for event in whole if isinstance(event, KvStored) for end in range(len(event.blocks))
    }
    assert index.used_blocks(0) <= len(prefixes)
    return "accepted"


def _events_of(payloads: list[bytes], slice_units: int) -> list[Event]:
    stream = KvStream("p0", BLOCK_TOKENS, replays=False, slice_units=slice_units)
    events: list[Event] = []
    for sequence, payload in enumerate(payloads):
        events += stream.received(1.0, sequence, payload)
        while stream.pending:
            events += stream.more(1.0)
    return events


def _run_script(script: bytes) -> None:
    """Interpret each byte as an action of an engine; a 0 ends a batch. Unreadable events and those of a group of layers
    that keep a state change nothing."""
    engine, index, batches = Engine(2 * BLOCK_TOKENS), PrefixIndex(1), list[bytes]()
    events: list[Any] = []
    for byte in script:
        match byte & 3:
            case 0:
                batches.append(batch(*events))
                events = []
            case 1 | 2:
                events.append(engine.store(byte >> 3, [byte >> 6, byte >> 7][: byte & 3], bool(byte & 4)))
            case _ if byte == 255:
                events.append(engine.clear())
            case _ if byte == 251:
                events.append(["BlockStored", [7], None, "unreadable", 2])
            case _ if byte == 247 and engine.held:
                events.append(stored([7], None, [1, 2], 2, group_idx=1, kv_cache_spec_kind="mamba"))
            case _:
                events.append(engine.remove(byte >> 3, 1 + (byte >> 2 & 1)))
    batches.append(batch(*events))
    for events_of, rows in (
        (read_batch(encoded).events, read_batch(_as_arrays(encoded)).events) for encoded in batches
    ):
        assert rows == events_of
    indexed = _events_of(batches, 1)
    assert indexed == _events_of(batches, SLICE_UNITS)
    feed(index, indexed)
    assert engine.indexed(index) == engine.within_reach()


def _as_arrays(payload: bytes) -> bytes:
    """Return the same batch in the form of older engines."""
    names: dict[str, tuple[str, ...]] = {
        "BlockStored": BlockEvent.__struct_fields__,
        "BlockRemoved": ("type", "block_hashes", "medium", "group_idx"),
        "AllBlocksCleared": ("type",),
    }
    events = read_batch(payload).events
    return batch(*[[getattr(event, name) for name in names[event.type]] for event in events])
