"""KV events: an index fed by them equals a simple model of the cache; wrong events are counted or rejected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.serve.telemetry.kv_rig import (
    BLOCK_TOKENS,
    BLOCKS,
    INDEXES,
    Engine,
    batch,
    changes,
    feed,
    removed,
    stored,
)

from kvroute.prefix import PrefixIndex, block_hashes, prompt_seed
from kvroute.serve.telemetry.engine_blocks import EngineBlocks
from kvroute.serve.telemetry.kv_batch import BatchError, BlockEvent, read_batch
from kvroute.serve.telemetry.kv_stream import KvStream
from kvroute.types import KvCleared, KvEvicted, KvStored


class BlocksMachine(RuleBasedStateMachine):
    """No network in between: after every report, the index holds what the engine holds."""

    @initialize(per_block=st.sampled_from([1, 2]))
    def start(self, per_block: int) -> None:
        self.engine = Engine(per_block * BLOCK_TOKENS)
        self.index = PrefixIndex(1)
        self.blocks = EngineBlocks("p0", BLOCK_TOKENS)

    def apply(self, event: dict[str, Any]) -> None:
        self.blocks.apply(read_batch(batch(event)).events[0])

    @rule(which=INDEXES, blocks=BLOCKS, root=st.booleans())
    def store(self, which: int, blocks: list[int], root: bool) -> None:
        self.apply(self.engine.store(which, blocks, root))

    @rule(which=INDEXES, count=st.integers(1, 3))
    def remove(self, which: int, count: int) -> None:
        self.apply(self.engine.remove(which, count))

    @precondition(lambda self: len(self.engine.held) > 4)
    @rule()
    def clear(self) -> None:
        self.apply(self.engine.clear())

    @rule()
    def report(self) -> None:
        events = self.blocks.changes(0.0)
        feed(self.index, events)
        assert self.engine.indexed(self.index) == self.engine.within_reach()
        assert self.blocks.changes(0.0) == []

    def teardown(self) -> None:
        """Check that nothing remains after everything is removed."""
        if hasattr(self, "engine"):
            self.report()
            while self.engine.held:
                self.remove(0, 1)
            self.report()
            assert len(self.blocks) == 0
            assert self.blocks.counts.orphans == 0


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_engine_block_becomes_several_gateway_blocks() -> None:
    """Two engine blocks of four tokens become one chain of four blocks of two tokens, with the hashes of the prompt
    itself."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    tokens = [5, 6, 7, 8, 9, 10, 11, 12]
    assert changes(blocks, stored([71, 72], None, tokens, 4)) == [
        KvStored(7.0, "p0", block_hashes(tokens, BLOCK_TOKENS), BLOCK_TOKENS)
    ]


def test_events_of_one_chain_are_merged() -> None:
    """Three events of one chain give one KvStored; removing it block by block gives one KvEvicted, from the first
    removed block on."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    chain = block_hashes([1, 2, 3, 4, 5, 6], BLOCK_TOKENS)
    events = [stored([1], None, [1, 2], 2), stored([2], 1, [3, 4], 2), stored([3], 2, [5, 6], 2)]
    assert changes(blocks, *events) == [KvStored(7.0, "p0", chain, BLOCK_TOKENS)]
    assert changes(blocks, removed([3, 2])) == [KvEvicted(7.0, "p0", chain[:2], 1)]
    assert changes(blocks, stored([2], 1, [3, 4], 2), removed([2])) == []


def test_a_block_stays_until_its_last_copy_is_removed() -> None:
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    changes(blocks, stored([1], None, [1, 2], 2), stored([1], None, [1, 2], 2))
    assert changes(blocks, removed([1])) == []
    assert len(changes(blocks, removed([1]))) == 1
    assert len(blocks) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"lora_id": 3},
        {"lora_name": "poet", "extra_keys": [["poet", "salt", ["a picture", 0]]]},
        {"extra_keys": [["salt", ["a picture", 0]]]},
        {"medium": "TAPE"},
    ],
    ids=["lora-id", "lora-name", "image", "medium"],
)
def test_blocks_that_no_plain_prompt_can_hit_are_left_out(more: dict[str, Any]) -> None:
    """The blocks below are left out too; their removal is not counted as an error."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    assert changes(blocks, stored([1], None, [1, 2], 2, **more)) == []
    assert changes(blocks, stored([2], 1, [3, 4], 2, **({} if "salt" in str(more) else more))) == []
    assert blocks.counts.foreign == 2
    assert blocks.counts.orphans == 0
    assert changes(blocks, removed([2, 1], **{k: v for k, v in more.items() if k == "medium"})) == []
    assert len(blocks) == 0


SALTED = st.sampled_from(["", "salt"])


@given(
    adapter=st.sampled_from(["poet", "sql"]),
    salt=SALTED,
    other_salt=SALTED,
    arrays=st.booleans(),
    length=st.integers(1, 6),
)
def test_blocks_of_an_adapter_have_hashes_of_its_own(
    adapter: str, salt: str, other_salt: str, arrays: bool, length: int
) -> None:
    """They are those of a prompt with this adapter and salt, and neither those of the base model nor of another one."""
    names, tokens = list(range(1, length + 1)), [7] * (2 * length)
    keys = [[adapter, salt] if salt else [adapter], *([adapter] for _ in names[1:])]
    event: Any = stored(names, None, tokens, 2, lora_id=3, lora_name=adapter, extra_keys=keys)
    if arrays:
        event = list(event.values())
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    chain = block_hashes(tokens, BLOCK_TOKENS, prompt_seed(salt, adapter))
    assert changes(blocks, event) == [KvStored(7.0, "p0", chain, BLOCK_TOKENS)]
    others = {prompt_seed(other_salt), prompt_seed(other_salt, "x"), prompt_seed(adapter), prompt_seed("", salt)}
    for seed in others:
        assert not set(chain) & set(block_hashes(tokens, BLOCK_TOKENS, seed))
    below = stored([99], names[-1], [7, 7], 2, lora_id=3, lora_name=adapter, extra_keys=[[adapter]])
    assert changes(blocks, below) == [
        KvStored(7.0, "p0", block_hashes([*tokens, 7, 7], BLOCK_TOKENS, prompt_seed(salt, adapter)), BLOCK_TOKENS)
    ]


@pytest.mark.parametrize("above", ["", "sql"])
def test_a_block_below_one_of_another_adapter_is_left_out(above: str) -> None:
    """No engine sends such an event; the index must not mix the two."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    assert len(changes(blocks, stored([1], None, [1, 2], 2, lora_name=above or None))) == 1
    assert changes(blocks, stored([2], 1, [3, 4], 2, lora_name="poet")) == []
    assert blocks.counts.foreign == 1


@pytest.mark.parametrize("keys", [None, [], [["poet"], ["poet"]], [None, None], [["poet"]]], ids=str)
def test_the_name_of_an_adapter_may_be_missing_in_the_keys(keys: Any) -> None:
    """Older engines send no keys."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    (event,) = changes(blocks, stored([1, 2], None, [1, 2, 3, 4], 2, lora_name="poet", extra_keys=keys))
    assert isinstance(event, KvStored)
    assert event.blocks == block_hashes([1, 2, 3, 4], BLOCK_TOKENS, prompt_seed("", "poet"))


@pytest.mark.parametrize("keys", [["poet"], 7, {"poet": 1}, [7]], ids=str)
def test_keys_of_an_adapter_that_cannot_be_read_are_left_out(keys: Any) -> None:
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    assert changes(blocks, stored([1], None, [1, 2], 2, lora_name="poet", extra_keys=keys)) == []
    assert blocks.counts.foreign == 1


def test_each_tier_of_memory_has_its_own_blocks() -> None:
    """A block that leaves the GPU stays in CPU memory. Clearing the engine's caches drops all but the store."""
    blocks, chain = EngineBlocks("p0", BLOCK_TOKENS), block_hashes([1, 2], BLOCK_TOKENS)
    everywhere = [stored([1], None, [1, 2], 2, medium=medium) for medium in ("GPU", "CPU", "STORAGE", "STORE")]
    assert changes(blocks, *everywhere) == [
        KvStored(7.0, "p0", chain, BLOCK_TOKENS),
        KvStored(7.0, "p0", chain, BLOCK_TOKENS, "cpu"),
        KvStored(7.0, "p0", chain, BLOCK_TOKENS, "disk"),
        KvStored(7.0, "p0", chain, BLOCK_TOKENS, "store"),
    ]
    assert changes(blocks, removed([1], medium="GPU")) == [KvEvicted(7.0, "p0", chain)]
    assert changes(blocks, stored([2], 1, [3, 4], 2)) == []
    assert blocks.counts.orphans == 1
    assert changes(blocks, {"type": "AllBlocksCleared"}) == [KvCleared(7.0, "p0")]
    assert changes(blocks, removed([1], medium="CPU"), removed([1], medium="STORAGE")) == []
    assert changes(blocks, removed([1], medium="STORE")) == [KvEvicted(7.0, "p0", chain, 0, "store")]
    assert len(blocks) == 0


KEYS: st.SearchStrategy[Any] = st.none() | st.lists(st.text(min_size=1, max_size=3), max_size=2)


@given(st.none() | st.lists(KEYS, max_size=20), st.booleans())
def test_blocks_before_the_first_extra_key_are_indexed(keys: list[Any] | None, arrays: bool) -> None:
    """An empty key counts as none, and a single text at the first block of a prompt is its cache salt."""
    names = list(range(1, len(keys or ()) + 3))
    event: Any = stored(names, None, [7] * (len(names) * 2), 2, extra_keys=keys)
    if arrays:
        event = list(event.values())
    others = [None if number == 0 and key and len(key) == 1 else key for number, key in enumerate(keys or ())]
    plain = next((number for number, key in enumerate(others) if key), len(names))
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    events = changes(blocks, event)
    assert [len(kv_event.blocks) for kv_event in events if isinstance(kv_event, KvStored)] == [plain] * bool(plain)
    assert blocks.counts.foreign == len(names) - plain


def test_an_unknown_parent_and_a_wrong_size_are_counted() -> None:
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    assert changes(blocks, stored([2], 1, [3, 4], 2)) == []
    assert blocks.counts.orphans == 1
    assert changes(blocks, stored([1], None, [1, 2, 3], 3), stored([1], None, [1, 2, 3], 2)) == []
    assert changes(blocks, stored([1], None, [2**63, 2], 2)) == []
    assert blocks.counts.unusable == 2
    assert blocks.counts.foreign == 1


def test_arrays_maps_and_bytes_are_parsed_alike() -> None:
    """Older engines send events as arrays, newer ones batches as maps; hashes may be bytes."""
    name, below = b"\x01" * 32, b"\x02" * 32
    plain = [stored([name], None, [1, 2], 2), stored([below], name, [3, 4], 2), removed([below])]
    arrays: list[Any] = [
        ["BlockStored", [name], None, [1, 2], 2, None, "GPU"],
        ["BlockStored", [below], name, [3, 4], 2, None],
        ["BlockRemoved", [below], "GPU"],
        ["BlockPinned", 1],
    ]
    expected = changes(EngineBlocks("p0", BLOCK_TOKENS), *plain)
    assert expected == changes(EngineBlocks("p0", BLOCK_TOKENS), *arrays)
    assert expected == [KvStored(7.0, "p0", block_hashes([1, 2], BLOCK_TOKENS), BLOCK_TOKENS)]
    as_map = msgspec.msgpack.encode({"ts": 1.0, "events": plain, "data_parallel_rank": 0})
    assert read_batch(as_map).events == read_batch(batch(*plain)).events
    assert read_batch(batch(["AllBlocksCleared"], [])).events == [BlockEvent("AllBlocksCleared"), BlockEvent("")]


VALUES = st.recursive(st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.floats() | st.none(), st.lists)


@given(st.binary(max_size=60) | VALUES.map(msgspec.msgpack.encode) | st.lists(VALUES).map(batch))
def test_any_bytes_are_a_batch_or_an_error(payload: bytes) -> None:
    try:
        events = read_batch(payload).events
    except BatchError:
        return
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    for event in events:
        blocks.apply(event)
    assert blocks.changes(0.0) == []


def test_an_invalid_batch_clears_the_engine() -> None:
    stream = KvStream("p0", BLOCK_TOKENS, replays=False)
    assert len(stream.received(0.0, 0, batch(stored([1], None, [1, 2], 2)))) == 1
    assert stream.received(1.0, 1, b"\xc1") == [KvCleared(1.0, "p0")]
    assert stream.counts.broken == 1
