"""KV events as other engines send them: SGLang's salts, pairs and media, groups of layers, unreadable events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from kvroute.serve.telemetry.kv_batch import read_batch
from kvroute.serve.telemetry.kv_stream import KvStream
from kvroute.types import KvCleared, KvEvicted, KvStored, MemoryTier

TOKENS = [1, 2, 3, 4]
PLAIN = block_hashes(TOKENS, BLOCK_TOKENS)


def row(*more: Any, hashes: Any = (1, 2), parent: Any = None, tokens: Any = TOKENS) -> list[Any]:
    """Return an event as SGLang up to 0.5.18 sends it."""
    return ["BlockStored", list(hashes), parent, tokens, BLOCK_TOKENS, None, "GPU", *more]


UNREADABLE = st.sampled_from(
    [
        row(tokens=[1, [2, 3], 4, 5], hashes=[91, 92]),
        row(tokens=[[1], [2], [3], [4]], hashes=[91, 92]),
        row(["a", "list"], hashes=[91, 92]),
        row(hashes=["text"], tokens=[1, 2]),
        stored([91], None, [1, 2], 2, token_ids="text"),
        stored([91], None, [1, 2], 2, lora_name=7),
        stored([91], None, [1, 2], 2, group_idx=-1),
        {"type": "BlockStored", "block_hashes": 7},
        ["BlockStored", None],
        {"type": "BlockRemoved", "block_hashes": [{"of": "another form"}]},
        ["BlockRemoved"],
        {"type": 7},
        [7],
        "text",
        None,
    ]
)


@given(st.lists(st.tuples(INDEXES, BLOCKS, st.booleans()) | INDEXES | UNREADABLE.map(lambda event: [event])))
def test_an_unreadable_event_costs_only_its_own_blocks(script: list[Any]) -> None:
    """All other events of the batch count, and the engine's other prefixes stay."""
    engine, events, unreadable = Engine(BLOCK_TOKENS), list[Any](), 0
    for step in script:
        match step:
            case int(which):
                events.append(engine.remove(which, 1))
            case [event]:
                events.append(event)
                unreadable += 1
            case (which, blocks, root):
                events.append(engine.store(which, blocks, root))
    stream, index = KvStream("p0", BLOCK_TOKENS, replays=False), PrefixIndex(1)
    feed(index, stream.received(0.0, 0, batch(*events[: len(events) // 2])))
    feed(index, stream.received(0.0, 1, batch(*events[len(events) // 2 :])))
    assert engine.indexed(index) == engine.within_reach()
    assert (stream.counts.broken, stream.counts.unreadable) == (0, unreadable)
    assert bool(stream.why_unreadable) == bool(unreadable)


def test_a_clear_of_another_form_is_a_clear() -> None:
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    assert len(changes(blocks, row())) == 1
    assert changes(blocks, {"type": "AllBlocksCleared", "medium": 7}) == [KvCleared(7.0, "p0")]
    assert len(changes(blocks, row())) == 1
    assert changes(blocks, ["AllBlocksCleared", 7], [7]) == [KvCleared(7.0, "p0")]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans(), st.sampled_from(["", "s"]))
def test_pairs_of_tokens_are_those_of_the_prompt(numbers: list[int], arrays: bool, salt: str) -> None:
    """With EAGLE's speculative decoding SGLang sends each token with the next one."""
    tokens = [token for number in numbers for token in (number, number + 1)]
    pairs = [list(pair) for pair in zip(tokens, [*tokens[1:], 7], strict=True)]
    names = list(range(1, len(numbers) + 1))
    event: Any = stored(names, None, [], 2, token_ids=pairs, cache_salt=salt or None)
    if arrays:
        event = row(*[{"cache_salt": salt}] * bool(salt), hashes=names, tokens=pairs)
    (found,) = changes(EngineBlocks("p0", BLOCK_TOKENS), event)
    assert isinstance(found, KvStored)
    assert found.blocks == block_hashes(tokens, BLOCK_TOKENS, prompt_seed(salt))


@pytest.mark.parametrize("adapter", ["", "poet"])
@pytest.mark.parametrize("form", ["row", "map", "map-with-keys"])
def test_the_salt_of_a_prompt_counts_in_each_form(form: str, adapter: str) -> None:
    """Each event of a salted prompt names the salt; the blocks below the first one continue its chain."""
    salt = {"cache_salt": "s", "session_id": "a session"} | ({"lora_name": adapter} if adapter else {})
    keys = {"extra_keys": [["s"]]} if form == "map-with-keys" and not adapter else {"extra_keys": None}
    first: Any = stored([1], None, [1, 2], 2, **salt, **keys)
    second: Any = stored([2], 1, [3, 4], 2, **salt, extra_keys=None)
    if form == "row":
        first, second = row(salt, hashes=[1], tokens=[1, 2]), row(salt, hashes=[2], parent=1, tokens=[3, 4])
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    chain = block_hashes(TOKENS, BLOCK_TOKENS, prompt_seed("s", adapter))
    assert changes(blocks, first) == [KvStored(7.0, "p0", chain[:1], BLOCK_TOKENS)]
    assert changes(blocks, second) == [KvStored(7.0, "p0", chain, BLOCK_TOKENS)]


def test_a_row_without_a_salt_may_have_empty_metadata() -> None:
    for metadata in ({}, {"cache_salt": None}, {"session_id": "a session"}, None):
        (found,) = changes(EngineBlocks("p0", BLOCK_TOKENS), row(metadata))
        assert isinstance(found, KvStored)
        assert found.blocks == PLAIN


@pytest.mark.parametrize(
    ("medium", "tier"), [("CPU_PINNED", "cpu"), ("cpu", "cpu"), ("DISK", "disk"), ("EXTERNAL", "disk")]
)
def test_media_of_other_engines_have_a_tier(medium: str, tier: MemoryTier) -> None:
    """SGLang's hierarchical cache has three levels beside the GPU; an engine reads each of them by itself."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    assert changes(blocks, stored([1, 2], None, TOKENS, 2, medium=medium)) == [
        KvStored(7.0, "p0", PLAIN, BLOCK_TOKENS, tier)
    ]
    assert changes(blocks, removed([2], medium=medium)) == [KvEvicted(7.0, "p0", PLAIN, 1, tier)]


WHOLE = st.sampled_from(["full_attention", "mla_attention", "sink_full_attention"])
PART = st.sampled_from(["sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "unknown"])


def of_group(event: dict[str, Any], group: int, kind: str) -> dict[str, Any]:
    more = {"kv_cache_spec_kind": kind} if event["type"] == "BlockStored" else {}
    return event | {"group_idx": group} | more


@given(
    kinds=st.permutations(range(4)).flatmap(
        lambda groups: st.tuples(WHOLE, PART, PART, PART).map(lambda kinds: dict(zip(groups, kinds, strict=True)))
    ),
    script=st.lists(st.tuples(INDEXES, BLOCKS, st.booleans(), st.integers(0, 3)), max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_the_group_that_keeps_whole_prefixes_is_indexed(kinds: dict[int, str], script: list[Any], order: Any) -> None:
    """Whatever its number and whichever group reports first; the other groups of a hybrid model lose blocks earlier."""
    whole = next(
        group for group, kind in kinds.items() if kind in ("full_attention", "mla_attention", "sink_full_attention")
    )
    engines = {group: Engine(BLOCK_TOKENS) for group in kinds}
    blocks, index = EngineBlocks("p0", BLOCK_TOKENS), PrefixIndex(1)
    for which, more, root, removals in script:
        groups = list(kinds)
        order.shuffle(groups)
        events = [of_group(engines[group].store(which, more, root), group, kinds[group]) for group in groups]
        lossy = [group for group in groups if group != whole][:removals]
        events += [of_group(engines[group].remove(which, 1), group, kinds[group]) for group in lossy]
        if which % 3 == 0:
            events.append(of_group(engines[whole].remove(which, 1), whole, kinds[whole]))
        for event in events:
            feed(index, changes(blocks, event))
    assert engines[whole].indexed(index) == engines[whole].within_reach()


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", None])
def test_a_model_without_full_attention_is_indexed_by_its_only_group(kind: str | None) -> None:
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    events = [stored([1, 2], None, TOKENS, 2, group_idx=group, kv_cache_spec_kind=kind) for group in (0, 1)]
    assert changes(blocks, *events) == [KvStored(7.0, "p0", PLAIN, BLOCK_TOKENS)]
    assert blocks.counts.foreign == 2
    assert changes(blocks, removed([2], group_idx=1)) == []
    assert changes(blocks, removed([2], group_idx=0)) == [KvEvicted(7.0, "p0", PLAIN, 1)]


def test_large_states_of_a_hybrid_model_are_no_unusable_blocks() -> None:
    """A state has a block size of its own, about which the operator need not be warned."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    state = stored([9], None, [1, 2, 3], 3, group_idx=0, kv_cache_spec_kind="mamba")
    assert changes(blocks, state, stored([1, 2], None, TOKENS, 2, group_idx=3)) == [
        KvStored(7.0, "p0", PLAIN, BLOCK_TOKENS)
    ]
    assert changes(blocks, state) == []
    assert (blocks.counts.unusable, blocks.counts.foreign) == (0, 2)


def test_events_after_a_clear_may_have_other_groups() -> None:
    """An engine may start again with another model."""
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    assert len(changes(blocks, stored([1, 2], None, TOKENS, 2, group_idx=0))) == 1
    blocks.clear()
    state = stored([9], None, [1, 2], 2, group_idx=0, kv_cache_spec_kind="mamba")
    events = changes(blocks, state, stored([1, 2], None, TOKENS, 2, group_idx=1))
    assert events[-1] == KvStored(7.0, "p0", PLAIN, BLOCK_TOKENS)


def test_the_batch_names_the_first_unreadable_event() -> None:
    found = read_batch(batch(row(tokens="text"), row(), row(hashes=[None])))
    assert (len(found.events), found.unreadable) == (1, 2)
    assert found.why_unreadable == "Expected `array`, got `str` - at `$[3]`"
