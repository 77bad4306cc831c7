"""The connector's pure parts: block leases, choice of the blocks to pull, options, and counters."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute_engine.connector.options import ConnectorSettings, read_options
from kvroute_engine.connector.scheduler import ConnectorScheduler, ConnectorStep, Ending, HeldBlocks
from kvroute_engine.connector.stats import (
    TransferCounts,
    add,
    count_early,
    count_failure,
    count_link,
    count_nixl,
    count_transfer,
    is_empty,
    link,
    no_counts,
    summary,
)
from kvroute_engine.connector.transfer.block_leases import BlockLease, BlockLeases, Computing, Freed
from kvroute_engine.connector.transfer.congestion import Gauges, SentCounters
from kvroute_engine.connector.transfer.faults import fault_of
from kvroute_engine.connector.transfer_params import prompt_digest
from kvroute_engine.errors import InputError

BLOCK_TOKENS = 16
REQUESTS = st.sampled_from(["a", "b", "c"])
REMOTE_DECODE = {"do_remote_decode": True}
NOTHING = Ending(False, None)
"""The ending of a request that no peer fetches."""


def scheduler(**arguments: Any) -> ConnectorScheduler:
    """Return a scheduler whose workers listen on ports 7001 and 7002."""
    made = ConnectorScheduler(
        ConnectorSettings(instance="prefill0"), engine_id="engine", block_tokens=BLOCK_TOKENS, **arguments
    )
    made.listening({0: ("10.0.0.1", 7001), 1: ("10.0.0.1", 7002)})
    return made


def params_for(tokens: list[int], **arguments: Any) -> dict[str, Any]:
    """Return the transfer parameters of a computed prompt, as they pass through the router."""
    blocks = range(100, 100 - (-len(tokens) // BLOCK_TOKENS))
    params = (
        scheduler(**arguments)
        .finished("p", REMOTE_DECODE, tokens, completed=True, computed_tokens=len(tokens), blocks=list(blocks))
        .kv_transfer_params
    )
    decoded: dict[str, Any] = json.loads(json.dumps(params))
    return decoded


@given(tokens=st.integers(1, 200), cached_blocks=st.integers(0, 12))
def test_pulled_and_cached_blocks_make_up_the_prompt(tokens: int, cached_blocks: int) -> None:
    """There is no gap and no overlap, only whole blocks, and each one goes to the block of its own position."""
    prompt = list(range(tokens))
    cached = min(cached_blocks * BLOCK_TOKENS, tokens // BLOCK_TOKENS * BLOCK_TOKENS)
    decode = scheduler()
    decode.arrived("d", params_for(prompt), prompt)
    matched = decode.matched("d", tokens, cached)
    assert matched == tokens - cached
    mine = list(range(500, 500 - (-tokens // BLOCK_TOKENS) + 2))  # vLLM may allocate more than the prompt needs
    decode.allocated("d", tokens, mine, matched)
    step = decode.take()
    if matched:
        (pull,) = step.pulls
        assert pull.first == cached // BLOCK_TOKENS
        assert pull.blocks == tuple(mine[pull.first : -(-tokens // BLOCK_TOKENS)])
    else:
        assert not step.pulls
        assert [release.remote_request_id for release in step.releases] == ["p"]


@given(data=st.data())
def test_every_transfer_request_ends_in_one_pull_or_one_release(data: st.DataObject) -> None:
    """For any order of vLLM's calls, repeated ones included, a prefill instance never waits for its timeout."""
    decode = scheduler()
    arrived: set[str] = set()
    steps: list[ConnectorStep] = []
    for action in data.draw(st.lists(st.tuples(st.sampled_from(["arrive", "match", "allocate", "take"]), REQUESTS))):
        match action:
            case ("arrive", request) if request not in arrived:
                prompt = list(range(data.draw(st.integers(1, 40))))
                params = params_for(prompt) | {"remote_request_id": request}
                decode.arrived(request, params, prompt if data.draw(st.booleans()) else [*prompt, 7])
                arrived.add(request)
            case ("match", request):
                decode.matched(request, 40, 0)
            case ("allocate", request):
                decode.allocated(request, 40, range(3), data.draw(st.sampled_from([0, 16, 32])))
            case ("take", _):
                steps.append(decode.take())
    for request in arrived:
        assert decode.finished(request, {}, [], completed=True, computed_tokens=40, blocks=[1]) == NOTHING
    steps.append(decode.take())
    ended = [pull.request_id for step in steps for pull in step.pulls]
    ended += [release.remote_request_id for step in steps for release in step.releases]
    assert sorted(ended) == sorted(arrived)


def test_a_partly_cached_prompt_by_hand() -> None:
    """40 tokens are three blocks, the last one half full; the decode instance has the first one cached."""
    prompt = list(range(40))
    prefill = scheduler()
    keep, params = prefill.finished("p", REMOTE_DECODE, prompt, completed=True, computed_tokens=40, blocks=[4, 9, 2])
    assert prefill.take().holds == [HeldBlocks("p", "p", (4, 9, 2), prompt_digest(prompt))]
    assert keep
    assert params is not None
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_host"], params["remote_port"], params["remote_instance"]) == ("10.0.0.1", 7001, "prefill0")
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == (((4, 9, 2),), 40)
    decode = scheduler()
    decode.arrived("d", params, prompt)
    assert decode.matched("d", 40, 16) == 24
    decode.allocated("d", 40, [30, 31, 32], 24)
    (pull,) = decode.take().pulls
    assert (pull.first, pull.blocks, pull.transfer_params.remote_request_id) == (1, (31, 32), "p")


def test_only_whole_blocks_of_a_shorter_prefill_are_pulled() -> None:
    """37 tokens are computed and 32 of them fill whole blocks; the decode instance computes the rest."""
    prompt = list(range(40))
    decode = scheduler()
    decode.arrived("d", params_for(prompt) | {"remote_num_tokens": 37}, prompt)
    assert decode.matched("d", 40, 0) == 32


@given(
    shared=st.integers(0, 80),
    held=st.integers(0, 60),
    more=st.integers(0, 60),
    cached_blocks=st.integers(0, 8),
    name=st.none() | st.just("7f3a"),
)
def test_a_held_prefix_is_pulled_and_the_whole_prompt_is_held(
    shared: int, held: int, more: int, cached_blocks: int, name: str | None
) -> None:
    """If a peer holds a prefix of this prompt, its whole blocks are pulled unless they are cached locally. Nothing is
    pulled of any other prompt. In both cases the request is held for the next peer, under the router's transfer ID if
    it has one."""
    there, prompt = [*range(shared), *range(1_000, 1_000 + held)], [*range(shared), *range(2_000, 2_000 + more)]
    if not there or not prompt:
        return
    middle = scheduler(producer=True, consumer=True)
    both = (
        params_for(there)
        | {"do_remote_decode": True, "remote_request_id": "c"}
        | ({"transfer_id": name} if name else {})
    )
    middle.arrived("p", both, prompt)
    cached = min(cached_blocks, (len(prompt) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    usable = len(prompt) if prompt == there else len(there) // BLOCK_TOKENS * BLOCK_TOKENS if held == 0 else 0
    matched = middle.matched("p", len(prompt), cached)
    assert matched == max(usable - cached, 0)
    blocks = list(range(500, 500 - (-len(prompt) // BLOCK_TOKENS)))
    middle.allocated("p", len(prompt), blocks, matched)
    step = middle.take()
    assert len(step.pulls) + len(step.releases) == 1
    for pull in step.pulls:
        last = -(-usable // BLOCK_TOKENS)
        assert (pull.first, pull.blocks) == (cached // BLOCK_TOKENS, tuple(blocks[pull.first : last]))
        assert pull.transfer_params.remote_request_id == "c"
    ending = middle.finished("p", both, prompt, completed=True, computed_tokens=len(prompt), blocks=blocks)
    assert middle.take().holds == [HeldBlocks(name or "p", "p", tuple(blocks), prompt_digest(prompt))]
    assert ending.keep
    assert ending.kv_transfer_params is not None
    decode = scheduler()
    decode.arrived("d", json.loads(json.dumps(ending.kv_transfer_params)), prompt)
    assert decode.matched("d", len(prompt), 0) == len(prompt)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"remote_prompt": "0"}, id="other-tokens"),
        pytest.param({"remote_prompt": ""}, id="no-tokens"),
        pytest.param({"tp_size": 2}, id="other-tp"),
        pytest.param({"remote_port": "x"}, id="malformed"),
        pytest.param({"do_remote_prefill": False}, id="not-requested"),
    ],
)
def test_implausible_transfer_parameters_cause_no_pull(change: dict[str, Any]) -> None:
    """The prompt is computed instead."""
    prompt = list(range(40))
    decode = scheduler()
    decode.arrived("d", params_for(prompt) | change, prompt)
    assert decode.matched("d", 40, 0) == 0
    assert not decode.take().pulls


@pytest.mark.parametrize(
    ("params", "completed", "producer"),
    [
        pytest.param(None, True, True, id="not-requested"),
        pytest.param({"do_remote_decode": True}, False, True, id="aborted"),
        pytest.param({"do_remote_decode": True}, True, False, id="no-producer"),
    ],
)
def test_blocks_are_held_only_if_a_fetch_is_expected(
    params: dict[str, Any] | None, completed: bool, producer: bool
) -> None:
    one = scheduler(producer=producer)
    assert one.finished("p", params, [1], completed=completed, computed_tokens=1, blocks=[1]) == NOTHING
    assert not one.take().holds


def test_every_rank_has_its_own_port() -> None:
    """With tensor parallelism, a rank pulls from the same rank of the peer."""
    prompt = [1, 2, 3]
    params = params_for(prompt, tp=2)
    assert (params["tp_size"], params["remote_ports"]) == (2, [7001, 7002])
    decode = scheduler(tp=2)
    decode.arrived("d", params, prompt)
    decode.allocated("d", 3, [8], decode.matched("d", 3, 0))
    (pull,) = decode.take().pulls
    assert [pull.transfer_params.port(rank) for rank in (0, 1)] == [7001, 7002]
    one = scheduler(tp=2)
    one.arrived("d", params | {"remote_ports": [7001]}, prompt)
    assert one.matched("d", 3, 0) == 0


EARLY = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.1", "remote_port": 7001}


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["schedule", "preempt", "finish", "abort"]), REQUESTS, st.integers(1, 40)),
        max_size=20,
    )
)
def test_every_named_prompt_is_held_or_dropped_once(
    actions: list[tuple[str, str, int]],
) -> None:
    """For any order of its calls, vLLM keeps exactly the blocks of these prompts; a pull of another one is refused."""
    prefill = layerwise()
    for request in ("a", "b", "c"):
        prefill.arrived(request, REMOTE_DECODE | {"transfer_id": f"t-{request}"}, list(range(40)))
    kept, begun, over = set(), set(), set[str]()
    steps: list[ConnectorStep] = []
    everything = [*actions, *(("abort", request, 1) for request in ("a", "b", "c"))]
    for action, request, tokens in everything:
        if request in over:
            continue
        match action:
            case "schedule":
                (watched,) = prefill.watched({request: tokens, "other": 1})
                prefill.scheduled(watched[0], [5, 6, 7], watched[1])
                begun.add(request)
            case "preempt":
                prefill.preempted(request)
                begun.discard(request)
            case _:
                ending = prefill.finished(
                    request,
                    REMOTE_DECODE,
                    range(40),
                    completed=action == "finish",
                    computed_tokens=40,
                    blocks=[5, 6, 7],
                )
                over.add(request)
                if ending.keep:
                    kept.add(request)
                assert ending.keep == (action == "finish" or request in begun)
                assert (ending.kv_transfer_params is not None) == (action == "finish")
        steps.append(prefill.take())
    held = [hold.owner for step in steps for hold in step.holds]
    dropped = [owner for step in steps for _, owner in step.drops]
    refused = [name for step in steps for name in step.refusals]
    assert sorted(held + dropped) == sorted(kept)
    assert sorted([*(f"t-{request}" for request in kept), *refused]) == ["t-a", "t-b", "t-c"]
    open_now: set[str] = set()
    for step in steps:  # the worker's view: only announced IDs are withdrawn, and every announced ID ends
        assert set(step.withdrawn) <= open_now
        open_now.difference_update(step.withdrawn)
        open_now.update(sending.name for sending in step.computing)
        assert {name for name, _ in step.drops} <= open_now
        open_now.difference_update(name for name, _ in step.drops)
        open_now.difference_update(hold.name for hold in step.holds)
    assert not open_now


def layerwise(**options: Any) -> ConnectorScheduler:
    """Return a scheduler that reports computed blocks (layer-wise transfer)."""
    made = ConnectorScheduler(
        ConnectorSettings(layerwise=True, **options), engine_id="engine", block_tokens=BLOCK_TOKENS
    )
    made.listening({0: ("10.0.0.1", 7001)})
    return made


def test_a_prompt_can_be_requested_before_it_is_computed() -> None:
    """40 tokens are computed in two steps of 20: one whole block is ready after the first step, all three after the
    second."""
    prompt, prefill, decode = list(range(40)), layerwise(), scheduler()
    decode.arrived("d", EARLY | {"connections": 16}, prompt)
    assert decode.matched("d", 40, 16) == 24
    decode.allocated("d", 40, [30, 31, 32], 24)
    (pull,) = decode.take().pulls
    assert (pull.first, pull.blocks) == (1, (31, 32))
    assert (pull.transfer_params.early, pull.transfer_params.remote_request_id, pull.transfer_params.connections) == (
        True,
        "t",
        16,
    )
    assert pull.transfer_params.port(1) == 7002
    prefill.arrived("p", REMOTE_DECODE | {"transfer_id": "t"}, prompt)
    prefill.scheduled("p", [4, 9], 20)
    (first,) = prefill.take().computing
    prefill.scheduled("p", [4, 9, 2], 40)
    (second,) = prefill.take().computing
    assert [(taken.name, taken.owner, taken.ready) for taken in (first, second)] == [("t", "p", 1), ("t", "p", 3)]
    assert first.prompt == second.prompt == pull.prompt != ""
    params = prefill.finished(
        "p", REMOTE_DECODE, prompt, completed=True, computed_tokens=40, blocks=[4, 9, 2]
    ).kv_transfer_params
    assert params is not None
    assert params["remote_request_id"] == "t"
    assert prefill.take().holds == [HeldBlocks("t", "p", (4, 9, 2), prompt_digest(prompt))]
    decode.finished("d", EARLY, prompt, completed=True, computed_tokens=40, blocks=[30, 31, 32])
    assert decode.take().cancels == ["d"]


def test_a_transfer_name_is_used_once() -> None:
    """A second prompt with the same ID could be confused with the first; it is held under vLLM's request ID."""
    prefill = layerwise()
    prefill.arrived("p", REMOTE_DECODE | {"transfer_id": "t"}, [1])
    prefill.arrived("q", REMOTE_DECODE | {"transfer_id": "t"}, [2])
    assert prefill.watched({"p": 1, "q": 1}) == [("p", 1)]
    params = prefill.finished("q", REMOTE_DECODE, [2], completed=True, computed_tokens=1, blocks=[3]).kv_transfer_params
    assert params is not None
    assert params["remote_request_id"] == "q"


def test_without_the_option_a_named_prompt_is_held_after_its_prefill() -> None:
    """A waiting peer gets it then."""
    prefill = scheduler()
    prefill.arrived("p", REMOTE_DECODE | {"transfer_id": "t"}, [1])
    assert prefill.watched({"p": 1}) == []
    assert prefill.finished("p", REMOTE_DECODE, [1], completed=True, computed_tokens=1, blocks=[3]).keep
    assert prefill.take().holds == [HeldBlocks("t", "p", (3,), prompt_digest([1]))]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"remote_port": "x"}, id="malformed"),
        pytest.param({"connections": 65}, id="too-many-connections"),
        pytest.param({"tp_size": 2}, id="other-tp"),
    ],
)
def test_implausible_early_pull_parameters_are_ignored(change: dict[str, Any]) -> None:
    decode = scheduler()
    decode.arrived("d", EARLY | change, [1, 2])
    assert decode.matched("d", 2, 0) == 0
    assert decode.finished("d", EARLY, [1, 2], completed=True, computed_tokens=2, blocks=[1]) == NOTHING
    assert not decode.take().cancels


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["hold", "read", "leave", "release", "pass"]), REQUESTS, st.integers(1, 9))
    )
)
def test_held_blocks_are_freed_once_and_never_while_they_are_read(actions: list[tuple[str, str, int]]) -> None:
    """The actions come in any order; when all readers have left and the time is over, nothing is held."""
    holds, now = BlockLeases(), 0
    readers: dict[str, list[BlockLease]] = {}
    held: set[str] = set()
    until: dict[str, int] = {}
    released: set[str] = set()
    for action, request, amount in actions:
        match action:
            case "hold" if request not in until:
                holds.hold(request, range(3), now + amount)
                held.add(request)
                until[request] = now + amount
            case "read" if holds.state(request) == "held":
                assert holds.read(request, 0, 4) is None
                hold = holds.read(request, 1, 2)
                assert hold is not None
                assert hold.blocks == (0, 1, 2)
                readers.setdefault(request, []).append(hold)
            case "leave" if readers.get(request):
                holds.leave(readers[request].pop())
            case "release":
                holds.release(request)
                released.add(request)
            case "pass":
                now += amount
        for freed in holds.freed(now):
            held.remove(freed.request_id)
            assert not readers.get(freed.request_id)
            assert freed.expired == (freed.request_id not in released)
            assert not freed.expired or now >= until[freed.request_id]
            assert holds.state(freed.request_id) == "gone"
        due = {name for name in held if name in released or now >= until[name]}
        assert all(readers.get(name) for name in due)
    assert len(holds) == len(held)


NAMES = st.sampled_from(["x", "y"])
OWNERS = st.sampled_from(["a", "b", "c"])


@given(actions=st.lists(st.tuples(NAMES, OWNERS, st.sampled_from(["hold", "hold", "compute", "drop"]))))
def test_a_name_keeps_its_blocks_against_another_owner(actions: list[tuple[str, str, str]]) -> None:
    """Another owner is refused unless it holds the same prompt. Its blocks are freed at once, and the held ones stay
    until the first owner drops them.

    Owners "a" and "b" have the same prompt in different blocks, "c" has another one. Each one appears once.
    """
    holds = BlockLeases()
    blocks = {"a": (1, 2), "b": (3, 4), "c": (5, 6)}
    prompts = {"a": "same", "b": "same", "c": "other"}
    names: dict[str, str] = {}
    kept: set[str] = set()
    come: set[str] = set()
    dropped: set[str] = set()
    for name, owner, action in actions:
        if owner in come or name in dropped:
            continue
        come.add(owner)
        first = names.setdefault(name, owner)
        match action:
            case "compute":
                holds.computed(Computing(name, owner, blocks[owner], 2, prompts[owner]), 1, [0])
                if first == owner:
                    kept.add(owner)
            case "drop":
                holds.drop(name, owner)
                if first == owner:
                    dropped.add(name)
            case "hold":
                taken = prompts[first] != prompts[owner] and first in kept
                with pytest.raises(InputError, match=f"by request {first}") if taken else nullcontext():
                    holds.hold(name, blocks[owner], 10.0, owner, prompts[owner])
                if first == owner:
                    kept.add(owner)
        freed = holds.freed(0.0)
        assert freed == ([] if owner in kept or (action == "compute" and first != owner) else [Freed(owner, False)])
        for own_name, own in names.items():
            if own in kept:
                hold = holds.read(own_name, 0, 2)
                assert hold is not None
                assert (hold.owner, hold.blocks, hold.prompt) == (own, blocks[own], prompts[own])
                holds.leave(hold)


def test_holding_a_held_request_again_changes_nothing() -> None:
    """The request cannot be held with other blocks: the held ones stay."""
    holds = BlockLeases()
    holds.hold("p", [1, 2], 10.0, prompt="x")
    holds.hold("p", [1, 2], 20.0, prompt="x")
    with pytest.raises(InputError, match="another prompt is held under this name, by request p"):
        holds.hold("p", [3], 30.0, prompt="y")
    assert holds.freed(19.0) == []
    assert holds.freed(20.0) == [Freed("p", True)]


@given(steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=8))
def test_computed_blocks_stay_computed(steps: list[tuple[int, int]]) -> None:
    """Progress is counted per region. The fence is that of the last step that computed new blocks; later steps may
    repeat the report."""
    holds, passed = BlockLeases(), list[int]()
    best, fences = [0, 0], dict[int, int]()
    for number, (region, ready) in enumerate(steps):
        holds.computed(Computing("t", "p", tuple(range(ready)), ready), 2, [region], partial(passed.append, number))
        if ready > best[region]:
            best[region], fences[region] = ready, number
    hold = holds.read("t", 0, 9)
    assert hold is not None
    assert (hold.ready, hold.blocks, hold.owner) == (best, tuple(range(max(ready for _, ready in steps))), "p")
    for region in sorted(fences):
        hold.fences[region]()
    assert passed == [fences[region] for region in sorted(fences)]
    assert holds.freed(1e9) == []
    holds.hold("t", [7], 5.0, "p")
    assert (hold.ready, hold.blocks, hold.fences) == (None, (7,), {})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        pytest.param({"conections": 4}, "did you mean 'connections'?", id="misspelt"),
        pytest.param({"connections": 0}, ">= 1", id="no-connection"),
        pytest.param({"dscp": {"kv": 64}}, "<= 63", id="dscp"),
        pytest.param({"host": "0.0.0.0"}, "give token_env", id="open-without-token"),
        pytest.param({"token": "a", "token_env": "B"}, "remove one", id="two-tokens"),
        pytest.param({"hold_s": "long"}, "hold_s", id="wrong-type"),
        pytest.param({"congestion_control": "telepathy"}, "tcp_available_congestion_control", id="no-such-control"),
    ],
)
def test_invalid_options_are_rejected_with_a_hint(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_options(extra)
    assert message in str(caught.value)
    assert "kv_connector_extra_config" in str(caught.value)


def test_options_have_the_documented_meaning() -> None:
    """The token comes from its environment variable; a wildcard host is not advertised."""
    options = read_options({"host": "0.0.0.0", "token_env": "T", "advertised_host": "10.0.0.9", "dscp": {"kv": 10}})
    assert options.secret({"T": "secret"}) == "secret"
    assert options.advertised() == "10.0.0.9"
    assert read_options({"host": "127.0.0.2"}).advertised() == "127.0.0.2"
    with pytest.raises(InputError, match="T is not set"):
        options.secret({})
    texts = ("corrupt-layer-2\n", "corrupt-layer-2-block-10", "stall-layer-0", "corrupt-layer", "")
    faults = [fault_of(text) for text in texts]
    assert faults == [("corrupt", 2, None), ("corrupt", 2, 10), ("stall", 0, None), None, None]


COUNTS = st.lists(
    st.tuples(
        st.sampled_from(["p0", "p1"]),
        st.sampled_from(["", "early", "nixl", "link", "reset", "checksum"]),
        st.integers(1, 1000),
    ),
    max_size=8,
)


@given(parts=st.lists(COUNTS, max_size=4))
def test_counts_add_up_for_any_grouping(parts: list[list[tuple[str, str, int]]]) -> None:
    """vLLM adds up workers and steps; the sum equals the counts of a single worker."""
    total, single = no_counts(), no_counts()
    for part in parts:
        counts = no_counts()
        for source, kind, nbytes in part:
            for target in (counts, single):
                count(target, source, kind, nbytes)
        assert is_empty(counts) == (not part)
        add(total, counts)
    assert total == single
    reported = summary(total)
    each = {
        kind: [n for part in parts for _, part_kind, n in part if part_kind == kind]
        for kind in ("", "early", "nixl", "link")
    }
    assert (reported["transfers"], reported["bytes"], reported["bytes_per_s"]) == (
        len(each[""]),
        sum(each[""]),
        8 if each[""] else 0,
    )
    assert reported["early"] == len(each["early"])
    assert sum(total["nixl_bytes"].values()) == sum(each["nixl"])
    assert (reported["sent_bytes"], reported["sent_again_bytes"]) == (
        sum(each["link"]),
        sum(n // 2 for n in each["link"]),
    )
    assert reported["failures"] == sum(map(len, parts)) - sum(map(len, each.values()))


def count(counts: TransferCounts, source: str, kind: str, nbytes: int) -> None:
    """Count one event of a kind."""
    match kind:
        case "":
            count_transfer(counts, source, nbytes, nbytes / 8)
        case "early":
            count_early(counts, source, nbytes)
        case "nixl":
            count_nixl(counts, source, nbytes)
        case "link":
            sent = SentCounters(nbytes=nbytes, segments=2, again_bytes=nbytes // 2, again_segments=1)
            count_link(counts, source, nbytes % 2, sent, Gauges(connections=nbytes % 3, rtt_s=nbytes / 1e3))
        case reason:
            count_failure(counts, source, reason)


def test_the_shares_of_all_ranks_are_one_transfer() -> None:
    """Four ranks pull a quarter each at the same time: the rate is that of all bytes in the mean time of a rank."""
    counts = no_counts()
    for rank, seconds in enumerate((1.0, 3.0, 2.0, 2.0)):
        count_transfer(counts, "p0", 1e9, seconds, rank=rank, ranks=4)
    assert (counts["transfers"], counts["nbytes"], counts["seconds"]) == ({"p0": 1}, {"p0": 4e9}, {"p0": 2.0})


def test_the_connections_of_all_ranks_are_aggregated_into_one_link() -> None:
    """Windows, queues and rates are added; the round trip is the mean over connections, and the latest report of a rank
    counts."""
    counts = no_counts()
    for rank, gauges in enumerate(
        (Gauges(1, 0.02, 0.01, 10.0, 5.0, 3.0, 2.0, 7.0), Gauges(3, 0.04, 0.02, 1.0, 1.0, 1.0, 0.5, 8.0), Gauges())
    ):
        count_link(counts, "d0", rank, SentCounters(), Gauges(9, 9.0, 9.0, 9.0, 9.0, 9.0))
        count_link(counts, "d0", rank, SentCounters(), gauges)
    assert astuple(link(counts["links"]["d0"])) == pytest.approx((4, 0.035, 0.01, 11.0, 6.0, 4.0, 2.5, 8.0))
    assert link({}) == Gauges()
