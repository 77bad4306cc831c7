"""The connector's pure parts: who holds what, which blocks are pulled, which options are taken, what is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.connector.holds import Holds
from kvroute.connector.options import Options, fault_of, read_options
from kvroute.connector.scheduler import Scheduler, Step
from kvroute.connector.stats import add, count_failure, count_transfer, is_empty, no_counts, summary
from kvroute.types import InputError

BLOCK_TOKENS = 16
REQUESTS = st.sampled_from(["a", "b", "c"])
ASK = {"do_remote_decode": True}


def scheduler(**arguments: Any) -> Scheduler:
    """One that listens on port 7001."""
    made = Scheduler(Options(instance="prefill0"), engine_id="engine", block_tokens=BLOCK_TOKENS, **arguments)
    made.listening({0: ("10.0.0.1", 7001), 1: ("10.0.0.1", 7002)})
    return made


def handover(tokens: list[int], **arguments: Any) -> dict[str, Any]:
    """What a prefill instance says of a prompt that it has computed, as it crosses the router."""
    blocks = range(100, 100 - (-len(tokens) // BLOCK_TOKENS))
    told = scheduler(**arguments).finished(
        "p", ASK, tokens, completed=True, computed_tokens=len(tokens), blocks=list(blocks)
    )
    crossed: dict[str, Any] = json.loads(json.dumps(told))
    return crossed


@given(tokens=st.integers(1, 200), cached_blocks=st.integers(0, 12))
def test_what_is_pulled_and_what_is_cached_make_the_prompt(tokens: int, cached_blocks: int) -> None:
    """Without gap or overlap, whole blocks only, each into the block of its own position."""
    prompt = list(range(tokens))
    cached = min(cached_blocks * BLOCK_TOKENS, tokens // BLOCK_TOKENS * BLOCK_TOKENS)
    decode = scheduler()
    decode.arrived("d", handover(prompt), prompt)
    matched = decode.matched("d", tokens, cached)
    assert matched == tokens - cached
    mine = list(range(500, 500 - (-tokens // BLOCK_TOKENS) + 2))  # vLLM may allot more than the prompt needs
    decode.allocated("d", tokens, mine, matched)
    step = decode.take()
    if matched:
        (pull,) = step.pulls
        assert pull.first == cached // BLOCK_TOKENS
        assert pull.blocks == tuple(mine[pull.first : -(-tokens // BLOCK_TOKENS)])
    else:
        assert not step.pulls
        assert [one.remote_request_id for one in step.releases] == ["p"]


@given(data=st.data())
def test_every_handover_ends_in_one_pull_or_one_release(data: st.DataObject) -> None:
    """In any order of vLLM's calls, repeated ones included: a prefill instance never waits for its time to run out."""
    decode = scheduler()
    arrived: set[str] = set()
    steps: list[Step] = []
    for action in data.draw(st.lists(st.tuples(st.sampled_from(["arrive", "match", "allocate", "take"]), REQUESTS))):
        match action:
            case ("arrive", request) if request not in arrived:
                prompt = list(range(data.draw(st.integers(1, 40))))
                params = handover(prompt) | {"remote_request_id": request}
                decode.arrived(request, params, prompt if data.draw(st.booleans()) else [*prompt, 7])
                arrived.add(request)
            case ("match", request):
                decode.matched(request, 40, 0)
            case ("allocate", request):
                decode.allocated(request, 40, range(3), data.draw(st.sampled_from([0, 16, 32])))
            case ("take", _):
                steps.append(decode.take())
    for request in arrived:
        assert decode.finished(request, {}, [], completed=True, computed_tokens=40, blocks=[1]) is None
    steps.append(decode.take())
    ended = [pull.request_id for step in steps for pull in step.pulls]
    ended += [handed.remote_request_id for step in steps for handed in step.releases]
    assert sorted(ended) == sorted(arrived)


def test_a_worked_example() -> None:
    """40 tokens are three blocks, the last one half full; the first is cached here."""
    prompt = list(range(40))
    prefill = scheduler()
    told = prefill.finished("p", ASK, prompt, completed=True, computed_tokens=40, blocks=[4, 9, 2])
    assert prefill.take().holds == [("p", (4, 9, 2))]
    assert told is not None
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    assert (told["remote_host"], told["remote_port"], told["remote_instance"]) == ("10.0.0.1", 7001, "prefill0")
    assert (told["remote_block_ids"], told["remote_num_tokens"]) == (((4, 9, 2),), 40)
    decode = scheduler()
    decode.arrived("d", told, prompt)
    assert decode.matched("d", 40, 16) == 24
    decode.allocated("d", 40, [30, 31, 32], 24)
    (pull,) = decode.take().pulls
    assert (pull.first, pull.blocks, pull.handover.remote_request_id) == (1, (31, 32), "p")


def test_a_shorter_prefill_gives_whole_blocks() -> None:
    """Of 37 tokens that were computed, 32 are in whole blocks; the rest is computed here."""
    prompt = list(range(40))
    decode = scheduler()
    decode.arrived("d", handover(prompt) | {"remote_num_tokens": 37}, prompt)
    assert decode.matched("d", 40, 0) == 32


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"remote_prompt": "0"}, id="other-tokens"),
        pytest.param({"remote_prompt": ""}, id="no-tokens"),
        pytest.param({"tp_size": 2}, id="other-tp"),
        pytest.param({"remote_port": "x"}, id="malformed"),
        pytest.param({"do_remote_prefill": False}, id="not-asked"),
    ],
)
def test_what_cannot_be_believed_is_not_pulled(change: dict[str, Any]) -> None:
    """The prompt is computed instead."""
    prompt = list(range(40))
    decode = scheduler()
    decode.arrived("d", handover(prompt) | change, prompt)
    assert decode.matched("d", 40, 0) == 0
    assert not decode.take().pulls


@pytest.mark.parametrize(
    ("params", "completed", "producer"),
    [
        pytest.param(None, True, True, id="not-asked"),
        pytest.param({"do_remote_decode": True}, False, True, id="aborted"),
        pytest.param({"do_remote_decode": True}, True, False, id="no-producer"),
    ],
)
def test_blocks_are_held_only_for_a_fetch(params: dict[str, Any] | None, completed: bool, producer: bool) -> None:
    one = scheduler(producer=producer)
    assert one.finished("p", params, [1], completed=completed, computed_tokens=1, blocks=[1]) is None
    assert not one.take().holds


def test_every_rank_has_its_own_port() -> None:
    """Under tensor parallelism a rank pulls from the same rank."""
    prompt = [1, 2, 3]
    told = handover(prompt, tp=2)
    assert (told["tp_size"], told["remote_ports"]) == (2, [7001, 7002])
    decode = scheduler(tp=2)
    decode.arrived("d", told, prompt)
    decode.allocated("d", 3, [8], decode.matched("d", 3, 0))
    (pull,) = decode.take().pulls
    assert [pull.handover.port(rank) for rank in (0, 1)] == [7001, 7002]
    one = scheduler(tp=2)
    one.arrived("d", told | {"remote_ports": [7001]}, prompt)
    assert one.matched("d", 3, 0) == 0


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["hold", "read", "leave", "release", "pass"]), REQUESTS, st.integers(1, 9))
    )
)
def test_held_blocks_are_freed_once_and_never_under_a_reader(actions: list[tuple[str, str, int]]) -> None:
    """Whatever the order; at the end, when readers have left and time is over, nothing is held."""
    holds, now = Holds(), 0
    readers: dict[str, int] = {}
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
                assert holds.read(request, 1, 2) == (1, 2)
                readers[request] = readers.get(request, 0) + 1
            case "leave" if readers.get(request):
                holds.leave(request)
                readers[request] -= 1
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


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        pytest.param({"conections": 4}, "did you mean 'connections'?", id="misspelt"),
        pytest.param({"connections": 0}, ">= 1", id="no-connection"),
        pytest.param({"dscp": {"kv": 64}}, "<= 63", id="dscp"),
        pytest.param({"host": "0.0.0.0"}, "give token_env", id="open-without-token"),
        pytest.param({"token": "a", "token_env": "B"}, "keep one", id="two-tokens"),
        pytest.param({"hold_s": "long"}, "hold_s", id="wrong-type"),
    ],
)
def test_wrong_options_are_refused_with_the_mend(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as told:
        read_options(extra)
    assert message in str(told.value)
    assert "kv_connector_extra_config" in str(told.value)


def test_options() -> None:
    """The token comes from its variable; a wildcard is not told to others."""
    options = read_options({"host": "0.0.0.0", "token_env": "T", "advertised_host": "10.0.0.9", "dscp": {"kv": 10}})
    assert options.secret({"T": "secret"}) == "secret"
    assert options.advertised() == "10.0.0.9"
    assert read_options({"host": "127.0.0.2"}).advertised() == "127.0.0.2"
    with pytest.raises(InputError, match="T is not set"):
        options.secret({})
    texts = ("corrupt-layer-2\n", "corrupt-layer-2-block-10", "stall-layer-0", "corrupt-layer", "")
    told = [fault_of(text) for text in texts]
    assert told == [("corrupt", 2, None), ("corrupt", 2, 10), ("stall", 0, None), None, None]


COUNTS = st.lists(
    st.tuples(st.sampled_from(["p0", "p1"]), st.sampled_from(["", "reset", "checksum"]), st.integers(1, 1000)),
    max_size=8,
)


@given(parts=st.lists(COUNTS, max_size=4))
def test_counts_add_up_in_whatever_parts_they_come(parts: list[list[tuple[str, str, int]]]) -> None:
    """Workers and steps are summed by vLLM; the sum is what one worker would have counted."""
    total, single = no_counts(), no_counts()
    for part in parts:
        counts = no_counts()
        for source, failure, nbytes in part:
            for target in (counts, single):
                if failure:
                    count_failure(target, source, failure)
                else:
                    count_transfer(target, source, nbytes, nbytes / 8)
        assert is_empty(counts) == (not part)
        add(total, counts)
    assert total == single
    good = [nbytes for part in parts for _, failure, nbytes in part if not failure]
    told = summary(total)
    assert (told["transfers"], told["bytes"], told["bytes_per_s"]) == (len(good), sum(good), 8 if good else 0)
    assert told["failures"] == sum(len(part) for part in parts) - len(good)
