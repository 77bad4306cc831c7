"""Sessions of agents: both file formats give the same, turns wait for responses, prefixes are the recorded ones."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.control import ControlSpec
from kvroute.planner.comparison.requests import Workload
from kvroute.sim.metrics import FINISHED, NOT_ARRIVED, REJECTED
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Agents, Trace, User, filter_lengths, read, read_any, rescale, take, window, write
from kvroute.topology import load
from kvroute.types import InputError, InputErrors

ROOT = Path(__file__).resolve().parents[2]
SMALL = load(ROOT / "examples" / "small.yaml")
RECORDED = ROOT.parent / "shared" / "data" / "claude_code_agent_traces" / "traces_rle.jsonl.zst"
BLOCK = 64
few = settings(max_examples=40, deadline=None)


class Ids:
    """Block IDs of one session in order of first use."""

    def __init__(self) -> None:
        self._next = 1

    def after(self, kept: list[int], more: int) -> list[int]:
        """Return a chain that continues the first part of another one."""
        self._next += 1  # a gap, so that new blocks never look like a continuation
        fresh = list(range(self._next, self._next + more))
        self._next += more
        return kept + fresh


def runs(chain: list[int]) -> list[int]:
    """Return run lengths: first ID, count, first ID, count, ..."""
    lengths: list[int] = []
    for block in chain:
        if lengths and lengths[-2] + lengths[-1] == block:
            lengths[-1] += 1
        else:
            lengths += [block, 1]
    return lengths


def turn(at: float, chain: list[int], *, out: int = 5, api: float | None = 1.0, think: float | None = 0.0) -> Any:
    """Return one call of the model; its last block is partial and unshared."""
    return {"t": at, "in": len(chain) * BLOCK + 7, "out": out, "h": runs(chain), "api": api, "think": think}


@st.composite
def streams(draw: st.DrawFn, ids: Ids, nested: bool) -> list[Any]:
    """Draw turns that follow each other and, in a session, sub-agents between them."""
    at, chain, entries = 0.0, list[int](), list[Any]()
    for _ in range(draw(st.integers(1, 4))):
        chain = ids.after(chain[: draw(st.integers(0, len(chain)))], draw(st.integers(0, 5)))
        api, think = draw(st.sampled_from([None, 0.5, 4.0])), draw(st.sampled_from([None, 0.0, 1.5, 90.0]))
        at += (think or 0.0) * bool(entries)
        entries.append(turn(at, chain, out=draw(st.sampled_from([0, 1, 30])), api=api, think=think))
        at += api or 2.0
        for _ in range(draw(st.integers(0, 2)) if nested else 0):
            inner, back = draw(streams(ids, False)), draw(st.booleans())
            lasts_s = inner[-1]["t"] + (inner[-1]["api"] or 2.0)
            at += lasts_s * back
            entries.append({"sub": inner, "t": at, "dur_ms": 1e3 * lasts_s if back else None})
    return entries


@st.composite
def lines(draw: st.DrawFn) -> list[Any]:
    """Draw a file of sessions."""
    count = draw(st.integers(1, 5))
    return [{"id": f"s{k}", "bs": BLOCK, "req": draw(streams(Ids(), True))} for k in range(count)]


def captured(line: Any) -> Any:
    """Return the same session in the format of kv-cache-tester."""

    def entry(one: Any) -> Any:
        if "sub" in one:
            inner = [entry(inner_turn) for inner_turn in one["sub"]]
            return {"t": one["t"], "type": "subagent", "agent_id": "a", "duration_ms": one["dur_ms"], "requests": inner}
        pairs = zip(one["h"][::2], one["h"][1::2], strict=True)
        ids = [number for first, length in pairs for number in range(first, first + length)]
        kept = {"t": one["t"], "in": one["in"], "out": one["out"], "type": "n", "model": "m", "hash_ids": ids}
        return kept | {"api_time": one["api"], "think_time": one["think"], "input_types": ["text"], "stop": ""}

    entries = [entry(recorded_turn) for recorded_turn in line["req"]]
    head = {"id": line["id"], "models": ["m"], "block_size": line["bs"], "tool_tokens": 9, "system_tokens": 9}
    return head | {"hash_id_scope": "local", "requests": entries}


def written(path: Path, *sessions: Any) -> Path:
    """Write a file of these sessions."""
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return path


def agents(path: Path) -> Agents:
    """Return the content of a file."""
    source = read_any(path)
    assert isinstance(source, Agents)
    return source


def calls(line: Any) -> int:
    """Return the number of turns of a line, including sub-agents."""
    return sum(len(recorded_turn["sub"]) if "sub" in recorded_turn else 1 for recorded_turn in line["req"])


@given(lines())
@few
def test_both_files_and_a_folder_give_the_same_sessions(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("agents")
    ours = agents(written(folder / "ours.jsonl", *sessions))
    for number, line in enumerate(sessions):
        written(folder / f"trace_{number}.json", captured(line))
    packed = folder / "packed"
    packed.write_bytes(zstandard.ZstdCompressor().compress((folder / "ours.jsonl").read_bytes()))
    assert agents(folder).sessions == ours.sessions == agents(packed).sessions
    assert ours.turns == sum(map(calls, sessions))


@given(lines(), st.integers(0, 9), st.sampled_from([0.0, 2.0, math.inf]))
@few
def test_prefixes_are_as_recorded_and_never_shared_between_sessions(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[Any], seed: int, think_max_s: float
) -> None:
    """In both modes, two prompts of a session share as many first blocks as their recorded IDs; prompts of different
    sessions share no block."""
    source = agents(written(tmp_path_factory.getbasetemp() / "prefixes.jsonl", *sessions))
    for trace in (source.open_loop(seed=seed, think_max_s=think_max_s), source.closed_loop(2, seed=seed)):
        chains = {request.blocks for request in trace.requests}
        recorded = [{tuple(_ids(turn.runs)) for turn in session.turns} for session in source.sessions]
        assert len({chain for chain in chains if chain}) == sum(
            len(chains_of_session - {()}) for chains_of_session in recorded
        )
        pairs = itertools.combinations(sorted(chains), 2)
        known = Counter(
            _common(first, other)
            for chains_of_session in recorded
            for first, other in itertools.combinations(sorted(chains_of_session), 2)
        )
        shared = Counter(_common(first, other) for first, other in pairs)
        assert {n: shared[n] for n in shared if n} == {n: known[n] for n in known if n}


def _ids(pairs: tuple[tuple[int, int], ...]) -> list[int]:
    return [number for first, length in pairs for number in range(first, first + length)]


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    depth = len(list(alike))
    assert not set(one[depth:]) & set(other[depth:]), "chains share no block after their first difference"
    return depth


def test_sessions_with_global_ids_share_them(tmp_path: Path) -> None:
    one, other = ({"id": name, "bs": BLOCK, "req": [turn(0.0, [1, 2, last])]} for name, last in (("a", 3), ("b", 9)))
    near = captured(one) | {"hash_id_scope": "global"}
    mixed = agents(written(tmp_path / "x", near, captured(other) | {"hash_id_scope": "global"}, one))
    chains = {request.blocks for request in mixed.closed_loop(3, seed=0).requests}
    assert {(1, 2, 3), (1, 2, 9)} < chains
    assert len({block for chain in chains for block in chain}) == 4 + 3


@given(lines(), st.integers(1, 4), st.integers(0, 5), st.sampled_from([0.0, 2.0, math.inf]))
@few
def test_a_turn_starts_after_all_responses_that_it_needs(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[Any], users: int, seed: int, think_max_s: float
) -> None:
    """Each turn comes once, at its pause after the last response that it waits for; there are never more sessions than
    users."""
    source = agents(written(tmp_path_factory.getbasetemp() / "waits.jsonl", *sessions))
    trace = source.closed_loop(users, seed=seed, think_max_s=think_max_s, ramp_s=3.0)
    rows = simulate(SMALL, trace, ControlSpec(), SimSpec(), seed=seed).outcomes
    assert set(rows.state.tolist()) <= {FINISHED, REJECTED}
    assert len(trace.requests) == source.turns
    assert Counter(request.input_tokens for request in trace.requests) == Counter(
        turn.input_tokens for session in source.sessions for turn in session.turns
    )
    loop, ended_s = trace.loop, np.where(rows.state == REJECTED, rows.arrived_s, rows.finished_s)
    assert loop is not None
    for request, after in enumerate(loop.after):
        ready_s = max((float(ended_s[awaited]) for awaited in after), default=0.0)
        assert rows.arrived_s[request] == pytest.approx(ready_s + loop.think_s[request], abs=1e-9)
        assert rows.arrived_s[request] >= ready_s
    assert sum(not after for after in loop.after) == min(users, len(sessions))


@given(lines(), st.integers(0, 5))
@few
def test_an_open_loop_keeps_the_recorded_intervals(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[Any], seed: int
) -> None:
    """All turns are there, at the times of their own session; the first session starts at once."""
    source = agents(written(tmp_path_factory.getbasetemp() / "schedule.jsonl", *sessions))
    trace = source.open_loop(seed=seed, think_max_s=math.inf)
    expected = {session.name: session.starts_s(math.inf, answered=True) for session in source.sessions}
    for session in source.sessions:
        for number, turn in enumerate(session.turns):
            ends = [expected[session.name][awaited] + session.turns[awaited].answer_s for awaited in turn.after]
            assert all(awaited < number for awaited in turn.after)
            assert expected[session.name][number] >= max(ends, default=0.0)
    assert trace.requests[0].at_s == 0.0
    assert len(trace.requests) == source.turns
    spans = sorted(max(times) - min(times) for times in expected.values())
    assert trace.duration_s >= spans[-1] - 1e-6


def test_a_main_turn_waits_for_sub_agents_that_returned(tmp_path: Path) -> None:
    """Recorded: a response until 4 s; two sub-agents from then until 10 and 16 s, one recorded at each end; another one
    that starts at 5 s and continues; the next turn at 20 s. Each sub-agent pauses 2 s before its second call."""
    ids = Ids()
    main_chain = ids.after([], 3)
    inner = [ids.after([], 2) for _ in range(3)]
    sub = [[turn(0.0, blocks, api=2.0), turn(4.0, blocks, api=2.0, think=2.0)] for blocks in inner]
    sub[1][1]["t"], sub[1][1]["api"] = 4.0, 8.0
    line = {
        "id": "s",
        "bs": BLOCK,
        "req": [
            turn(0.0, main_chain, api=4.0),
            {"sub": sub[2], "t": 5.0, "dur_ms": None},
            {"sub": sub[0], "t": 10.0, "dur_ms": 6_000},
            {"sub": sub[1], "t": 16.0, "dur_ms": 12_000},
            turn(20.0, ids.after(main_chain, 2), think=16.0),
        ],
    }
    (session,) = agents(written(tmp_path / "x.jsonl", line)).sessions
    assert [made_turn.after for made_turn in session.turns] == [(), (0,), (1,), (0,), (3,), (0,), (5,), (0, 4, 6)]
    assert [made_turn.think_s for made_turn in session.turns] == [0.0, 1.0, 2.0, 0.0, 2.0, 0.0, 2.0, 4.0]
    assert session.starts_s(math.inf, answered=True) == [0.0, 5.0, 9.0, 4.0, 8.0, 4.0, 8.0, 20.0]
    assert session.starts_s(0.0, answered=False) == [0.0] * 8
    absolute = captured(line)
    for entry in absolute["requests"]:
        for request in entry.get("requests", ()):
            request["t"] += entry["t"] - (entry["duration_ms"] or 0) / 1e3
    assert agents(written(tmp_path / "raw.json", absolute)).sessions == (session,)


def test_users_start_and_stop_at_their_times(tmp_path: Path) -> None:
    """One user stops at 3 s, one starts at 10 s: later turns do not happen and are not counted."""
    ids = Ids()
    chains = list(itertools.accumulate([2, 1, 1, 1], ids.after, initial=list[int]()))
    turns = [turn(2.0 * k, chain, think=1.0) for k, chain in enumerate(chains[1:])]
    source = agents(written(tmp_path / "x", *({"id": n, "bs": BLOCK, "req": turns} for n in "ab")))
    trace = source.varying_users([User(0.0, (0,), until_s=3.0), User(10.0, (1,))], think_max_s=1.0)
    rows = simulate(SMALL, trace, ControlSpec(), SimSpec()).outcomes
    arrived = rows.state != NOT_ARRIVED
    assert rows.arrived_s[arrived & (rows.arrived_s < 10.0)].max() <= 3.0
    assert 0 < (arrived & (rows.arrived_s < 10.0)).sum() < 4
    assert (arrived & (rows.arrived_s >= 10.0)).sum() == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"in": 0}, "field req[1].in: expected `int` >= 1"),
        ({"t": "now"}, "field req[1].t: expected `float`, got `str`"),
        ({"out": 1.5}, "field req[1].out: expected `int`"),
        ({"h": [5]}, "turn 1, field h: the ids are not pairs"),
        ({"h": [5, 0]}, "turn 1, field h: the ids are not pairs"),
        ({"h": [5, 9]}, "9 ids instead of 4 for 199 tokens in blocks of 64"),
        ({"h": [1, 2, 1, 1]}, "block 1 follows 2 in one prompt and comes first in another"),
        ({"h": [9, 1, 3, 2]}, "block 3 follows 9 in one prompt and follows 2 in another"),
        ({"h": [4, 3]}, "field hash_ids: block 4 comes first in one prompt and follows 3 in another"),
    ],
)
def test_a_broken_session_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """Line 2 of three is wrong: the error has file, line and field; with broken lines skipped the others are read."""
    lines = [{"id": name, "bs": BLOCK, "req": [turn(0.0, [1, 2, 3, 4]), turn(1.0, [1, 2, 3])]} for name in "abc"]
    lines[1]["req"][1] |= change  # type: ignore[index]
    path = written(tmp_path / "x.jsonl", *lines)
    with pytest.raises(InputErrors) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert named in str(caught.value)
    source = read_any(path, skip_bad=True)
    assert isinstance(source, Agents)
    assert [session.name for session in source.sessions] == ["a", "c"]
    assert source.remarks == ("1 invalid line skipped",)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"id": "s", "bs": 64, "req": []}, "field req: expected `array` of length >= 1"),
        ({"id": "s", "bs": 64, "req": [{"sub": [], "t": 0.0}]}, "the session has no turns"),
        ({"id": "s", "req": [turn(0.0, [1])]}, "field bs: it is missing"),
        ({"id": "s", "bs": 64, "req": [{"t": 0.0, "out": 1}]}, "turn 0, field in: the prompt has no tokens"),
        ({"id": "s", "block_size": 64, "hash_id_scope": "mine", "requests": [{"t": 0, "in": 1}]}, "hash_id_scope"),
    ],
)
def test_a_broken_file_of_sessions_is_named(tmp_path: Path, line: Any, named: str) -> None:
    with pytest.raises(InputErrors, match=named.replace("[", r"\[")):
        read_any(written(tmp_path / "x", line))


def test_a_folder_without_sessions_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder has no \.json files"):
        read_any(tmp_path)


def closed(tmp_path: Path) -> tuple[Path, Trace]:
    """Return three sessions of two turns."""
    lines = [{"id": name, "bs": BLOCK, "req": [turn(0.0, [1, 2]), turn(3.0, [1, 2, 3], think=2.0)]} for name in "abc"]
    path = written(tmp_path / "x.jsonl", *lines)
    return path, agents(path).closed_loop(2, seed=0)


def test_a_closed_loop_drops_no_turn(tmp_path: Path) -> None:
    _, trace = closed(tmp_path)
    with pytest.raises(InputError, match="closed loop"):
        take(trace, 1)
    with pytest.raises(InputError, match="closed loop"):
        window(trace, 0, 1)
    with pytest.raises(InputError, match="closed loop"):
        rescale(trace, 1.0)
    with pytest.raises(InputError, match="closed loop"):
        filter_lengths(trace, 1)
    with pytest.raises(InputError, match="closed loop"):
        write(trace, tmp_path / "copy.jsonl")


def test_sessions_are_a_workload(tmp_path: Path) -> None:
    """Seeds give different traces; incompatible settings are reported."""
    path, _ = closed(tmp_path)
    workload = Workload(trace=str(path), requests=3)
    assert len(workload.of_seed(0).requests) == 3
    looped = Workload(trace=str(path), agents=1, requests=3, p_share=1.0, input_tokens=300)
    assert len(looped.of_seed(0).requests) == 4  # whole sessions
    assert {request.input_tokens for request in looped.of_seed(0).requests} == {300}
    assert len({Workload(trace=str(path), rate_per_s=1.0).of_seed(seed).duration_s for seed in range(4)}) == 4
    for wrong in (Workload(trace=str(path), agents=1, rate_per_s=1.0), Workload(trace=str(path), profile="rag")):
        with pytest.raises(InputError):
            wrong.of_seed(0)
    with pytest.raises(InputError, match="the trace has no sessions of agents"):
        Workload(agents=3).of_seed(0)


def test_the_rate_is_the_long_run_rate_of_all_sessions(tmp_path: Path) -> None:
    """400 sessions of two turns: at 4 turns a second about 2 sessions start per second."""
    lines = [{"id": str(k), "bs": BLOCK, "req": [turn(0.0, [1]), turn(3.0, [1, 2], think=2.0)]} for k in range(400)]
    source = agents(written(tmp_path / "x", *lines))
    assert source.open_loop(seed=1, rate_per_s=4.0).rate_per_s == pytest.approx(4.0, rel=0.15)
    assert source.open_loop(seed=1).rate_per_s == pytest.approx(2.0 / 30.0, rel=0.15)


def test_simulate_runs_sessions_in_open_and_closed_loop(tmp_path: Path) -> None:
    path, _ = closed(tmp_path)
    cluster = str(ROOT / "examples" / "small.yaml")
    for options in (["--agents", "2", "--think-max", "0"], ["--rate", "2"]):
        arguments = ["simulate", cluster, "--trace", str(path), "--policy", "netkv", "--seeds", "1", "--json", *options]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        (run,) = json.loads(result.stdout)["runs"]
        assert run["requests"]["finished"] == 6


@pytest.mark.skipif(
    not RECORDED.exists() and not os.environ.get("KVROUTE_REQUIRE_LIVE"), reason="the agents' sessions are not here"
)
def test_recorded_sessions_of_coding_agents_have_the_published_statistics() -> None:
    """There are 710 sessions with 49,334 calls and 63 sub-agents. 4 of these continue beside their session, and the
    session ends with the results of 2. A cache without limit has the given share of the tokens of 3,000 calls."""
    source = agents(RECORDED)
    assert (len(source.sessions), source.turns) == (710, 49_334)
    joins = [len(turn.after) - 1 for session in source.sessions for turn in session.turns if turn.after]
    assert sum(joins) == 63 - 4 - 2
    assert source.remarks == ()
    statistics = source.closed_loop(20, seed=0, turns=3_000).statistics()
    assert 3_000 <= statistics.requests < 3_600
    assert statistics.block_tokens == BLOCK
    assert statistics.reused_token_share == pytest.approx(0.96, abs=0.02)
