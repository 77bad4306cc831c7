"""Staged blocks and write-back as planned in the scheduler, without vLLM or sockets."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute_engine.block_keys import NO_PARENT, block_keys
from kvroute_engine.connector.storage.loads import KeptBlocks, StagedLoad
from kvroute_engine.connector.storage.plan import StoragePlan, StorePrompt
from kvroute_engine.connector.storage.write_back import BlockWrite

BLOCK = 16
REMOTE_DECODE: dict[str, Any] = {"do_remote_decode": True}
REMOTE_PREFILL: dict[str, Any] = {"do_remote_prefill": True}


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [seed * 10_000 + number for number in range(count)]


def staged(tokens: list[int], first: int, *sizes: int, salt: str = "", **more: Any) -> dict[str, Any]:
    """Return transfer parameters with parts of these numbers of blocks, from position `first` on."""
    keys = block_keys(tokens, BLOCK, salt)
    parts = [
        {"id": f"part{at}", "blocks": size, "buffer": "http://x", "data": f"10.0.0.{at}:7201"}
        for at, size in enumerate(sizes)
    ]
    return {"storage": {"first_block": first, "key": keys[first + sum(sizes) - 1].hex(), "parts": parts}, **more}


def begun(tokens: list[int], params: dict[str, Any] | None, **prompt: Any) -> StoragePlan:
    """Return a plan with one new request, "r"."""
    plan = StoragePlan(BLOCK)
    plan.arrived("r", params, StorePrompt(tokens, prompt.pop("live_tokens", tokens), **prompt))
    return plan


@given(
    blocks=st.integers(1, 12),
    rest=st.integers(0, BLOCK - 1),
    first=st.integers(0, 11),
    cut=st.integers(0, 12),
    computed=st.integers(0, 12),
)
def test_a_load_covers_the_staged_blocks_after_what_is_cached(
    blocks: int, rest: int, first: int, cut: int, computed: int
) -> None:
    """Each local block gets the staged block at its position; at least one token is left to compute."""
    tokens = tokens_of(blocks * BLOCK + rest)
    first, computed = min(first, blocks - 1), min(computed, blocks)
    count = blocks - first
    sizes = [size for size in (min(cut, count), count - min(cut, count)) if size]
    plan = begun(tokens, staged(tokens, first, *sizes, **REMOTE_DECODE))
    loaded = plan.matched("r", len(tokens), computed * BLOCK)
    if computed < first:
        assert loaded == 0  # the blocks between are neither cached nor staged
    else:
        assert loaded == max(min(blocks * BLOCK, len(tokens) - 1) - computed * BLOCK, 0)
    plan.allocated("r", range(100, 100 + blocks + 1), loaded)
    step = plan.take()
    parts = [part for load in step.loads for part in load.parts]
    covered: dict[int, int] = {}
    position = first
    for at, size in enumerate(sizes):
        mine = [part for part in parts if part.read_id == f"part{at}"]
        for part in mine:
            assert part.key == block_keys(tokens, BLOCK)[position + size - 1].hex()
            covered |= {position + part.first + index: block for index, block in enumerate(part.blocks)}
        assert (not mine) == (f"part{at}" in {part.read_id for part in step.unused})
        position += size
    assert covered == ({at: 100 + at for at in range(computed, blocks)} if loaded else {})


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (staged(tokens_of(64, seed=1), 0, 4), "its staged blocks belong to other tokens"),
        (staged(tokens_of(64), 0, 4, salt="s"), "its staged blocks belong to other tokens"),
        ({"storage": {"first_block": 0}}, "its staged blocks are not usable"),
        ({"storage": {"first_block": 0, "key": "", "parts": []}}, "its staged blocks are not usable"),
        ({"storage": "x"}, "its staged blocks are not usable"),
    ],
)
def test_staged_blocks_of_another_prompt_are_released_and_not_loaded(
    params: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plan = begun(tokens_of(64), params | REMOTE_DECODE)
    assert reason in caplog.text
    assert plan.matched("r", 64, 0) == 0
    readable = "other tokens" in reason
    assert [part.read_id for part in plan.take().unused] == (["part0"] if readable else [])


def test_staged_blocks_of_a_request_that_ends_early_are_released() -> None:
    tokens = tokens_of(70)
    plan = begun(tokens, staged(tokens, 1, 2, 1, **REMOTE_DECODE))
    assert not plan.finished("r", 0, [], kept=False)
    assert [part.read_id for part in plan.take().unused] == ["part0", "part1"]
    assert plan.matched("r", 70, 0) == 0


def test_a_prompt_with_an_adapter_or_media_is_neither_loaded_nor_written() -> None:
    tokens = tokens_of(64)
    plan = begun(tokens, staged(tokens, 0, 4, **REMOTE_DECODE), storable=False)
    assert plan.matched("r", 64, 0) == 0
    assert not plan.finished("r", 64, [0, 1, 2, 3], kept=False)
    assert not plan.take().writes


@given(
    prompt=st.integers(1, 60),
    generated=st.integers(0, 60),
    chunk=st.integers(1, 40),
    pulled=st.booleans(),
    late=st.integers(0, 3),
)
def test_every_full_block_is_written_once_with_its_key(
    prompt: int, generated: int, chunk: int, pulled: bool, late: int
) -> None:
    """The prompt is computed in chunks, then tokens follow one by one; the scheduler knows a token `late` steps after
    its KV is computed. An instance that has pulled the prompt writes only the later blocks."""
    whole = tokens_of(prompt + generated)
    live = whole[:prompt]
    plan = begun(whole[:prompt], REMOTE_PREFILL if pulled else REMOTE_DECODE, live_tokens=live)
    blocks = list(range(200, 200 + len(whole) // BLOCK + 2))
    computed = prompt if pulled else 0
    written: list[BlockWrite] = []

    def step() -> None:
        if plan.is_due("r", computed):
            plan.computed("r", computed, blocks)
        written.extend(write for writes in plan.take().writes for write in writes.blocks)

    while computed < len(whole):
        step()
        computed = min(computed + chunk, prompt) if computed < prompt else computed + 1
        live.extend(whole[len(live) : max(prompt, computed - late)])
    live.extend(whole[len(live) :])
    kept = plan.finished("r", computed, blocks, kept=False)
    last = plan.take()
    assert kept == bool(last.writes)
    assert all(writes.ends for writes in last.writes)
    written.extend(write for writes in last.writes for write in writes.blocks)
    keys = block_keys(whole, BLOCK)
    start = prompt // BLOCK if pulled else 0
    assert written == [
        BlockWrite(keys[at], keys[at - 1] if at else NO_PARENT, 200 + at) for at in range(start, len(keys))
    ]


def test_loaded_blocks_are_not_written_again() -> None:
    """Nor before they have arrived: the first step that computes the prompt also loads them."""
    tokens = tokens_of(100)
    plan = begun(tokens, staged(tokens, 0, 4, **REMOTE_DECODE))
    assert plan.matched("r", 100, 0) == 64
    plan.allocated("r", range(7), 64)
    assert not plan.is_due("r", 64)
    assert plan.finished("r", 100, list(range(7)), kept=True)
    (writes,) = plan.take().writes
    assert [write.block for write in writes.blocks] == [4, 5]
    assert not writes.ends  # another component keeps and frees them


def test_stored_blocks_are_reported_once_with_their_ancestors() -> None:
    """The blocks of a chain come after all blocks before them; a salt belongs to the first block."""
    tokens = tokens_of(5 * BLOCK)
    keys = block_keys(tokens, BLOCK, "s")
    plan = begun(tokens[: 3 * BLOCK], REMOTE_PREFILL, live_tokens=tokens, salt="s")
    plan.finished("r", 5 * BLOCK, list(range(5)), kept=False)
    number = plan.take().number
    plan.stored(0, [keys[3]], None)
    (chain,) = plan.take_events()
    assert (len(chain.hashes), chain.parent, chain.tokens, chain.salt) == (4, None, tuple(tokens[: 4 * BLOCK]), "s")
    assert plan.pending
    plan.stored(0, [keys[4], keys[3]], number)
    (more,) = plan.take_events()
    assert (more.hashes[-1:], more.parent, more.tokens) == (more.hashes, chain.hashes[-1], tuple(tokens[4 * BLOCK :]))
    assert more.salt == ""
    assert not plan.pending
    assert not plan.take_events()


def test_a_block_is_reported_when_all_ranks_have_written_it() -> None:
    tokens = tokens_of(BLOCK)
    (key,) = block_keys(tokens, BLOCK)
    plan = StoragePlan(BLOCK, ranks=2)
    plan.arrived("r", REMOTE_DECODE, StorePrompt(tokens, tokens))
    plan.finished("r", BLOCK, [0], kept=False)
    plan.stored(0, [key], None)
    number = plan.take().number
    plan.stored(0, [], number)
    assert plan.pending
    assert not plan.take_events()
    plan.stored(1, [key], number)
    assert len(plan.take_events()) == 1
    assert not plan.pending


def test_the_scheduler_waits_until_every_planned_block_is_over() -> None:
    """A report on earlier steps does not settle later ones; blocks that are dropped are not waited for."""
    tokens = tokens_of(4 * BLOCK)
    plan = begun(tokens, REMOTE_DECODE)
    plan.computed("r", 2 * BLOCK, list(range(4)))
    first = plan.take().number
    plan.finished("r", 4 * BLOCK, list(range(4)), kept=False)
    plan.stored(0, [], first)
    second = plan.take()
    assert second.number == first + 1
    assert plan.pending
    plan.stored(0, [], second.number)
    assert not plan.pending
    assert not plan.take_events()


def test_a_load_names_its_end() -> None:
    assert StagedLoad("r", (), 3).end_tokens(BLOCK) == 3 * BLOCK


def test_kept_parts_are_not_released_and_the_decode_instance_learns_of_them() -> None:
    """Whether the prefill loads them or has them cached; only a request that computes nothing releases them."""
    tokens = tokens_of(5 * BLOCK)
    params = staged(tokens, 0, 2, 3, **REMOTE_DECODE)
    params["storage"]["parts"][1]["keep"] = True
    for computed in (0, 5):
        plan = begun(tokens, params)
        loaded = plan.matched("r", len(tokens), computed * BLOCK)
        plan.allocated("r", range(5), loaded)
        step = plan.take()
        loads = [part for load in step.loads for part in load.parts]
        assert [(part.read_id, part.keep) for part in loads] == ([("part0", False), ("part1", True)] if loaded else [])
        assert [part.read_id for part in step.unused] == ([] if loaded else ["part0"])
        kept = plan.take_kept("r")
        assert kept == KeptBlocks(2, 3, "part1", "10.0.0.1:7201", block_keys(tokens, BLOCK)[4].hex())
        assert plan.take_kept("r") is None
    plan = begun(tokens, params)
    plan.finished("r", 0, [], kept=False)
    assert [part.read_id for part in plan.take().unused] == ["part0", "part1"]
    assert plan.take_kept("r") is None
    plan = begun(tokens_of(5 * BLOCK, seed=1), params)
    assert [part.read_id for part in plan.take().unused] == ["part0", "part1"]
    assert plan.take_kept("r") is None
