"""The numbers of a run: parts add up, only the measurement window counts, and all values fit into JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec
from kvroute.sim.metrics import FINISHED, IN_FLIGHT, NOT_ARRIVED, REJECTED, Outcomes, Spread, Summary, summarise, window
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec, Slo
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import parse
from kvroute.types import InputError

MARKS = (
    "arrived_s",
    "prefill_started_s",
    "prefill_finished_s",
    "landed_s",
    "admitted_s",
    "first_token_s",
    "finished_s",
)
"""The times of a request in order."""


@st.composite
def tables(draw: st.DrawFn) -> Outcomes:
    """Draw rows that ended anywhere: not arrived, rejected early or late, in flight at any point, or finished."""
    count = draw(st.integers(0, 12))
    rows = Outcomes.empty(count)
    rows.arrived_s[:] = sorted(draw(st.lists(st.floats(0, 100), min_size=count, max_size=count)))
    for row in range(count):
        reached = draw(st.integers(-1, len(MARKS) - 1))
        rows.input_tokens[row], rows.output_tokens[row] = draw(st.integers(1, 9_999)), draw(st.integers(1, 50))
        for before, after in list(pairwise(MARKS))[: max(reached, 0)]:
            getattr(rows, after)[row] = getattr(rows, before)[row] + draw(st.floats(0, 20))
        if reached >= 3:
            rows.tier[row], rows.kv_bytes[row] = draw(st.integers(0, 4)), draw(st.floats(0, 1e10))
            rows.hit_tokens[row] = draw(st.integers(0, int(rows.input_tokens[row])))
            rows.source[row], rows.target[row] = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        if reached >= 5:
            rows.entry_iteration_s[row] = draw(st.floats(1e-3, 1.0))
        rows.state[row] = NOT_ARRIVED if reached < 0 else FINISHED if reached == 6 else IN_FLIGHT
        if 0 <= reached < 3 and draw(st.booleans()):
            rows.state[row] = REJECTED
    return rows


assumptions = st.builds(
    SimSpec,
    warmup_s=st.floats(0, 60),
    measure_s=st.none() | st.floats(1, 80),
    slo=st.builds(Slo, ttft_s=st.floats(0.1, 60), tpot_s=st.none() | st.floats(0.1, 20)),
)

some = settings(max_examples=60, deadline=None)


def summary_of(rows: Outcomes, assumed: SimSpec | None = None) -> Summary:
    """Return the summary without data of links."""
    assumed = assumed or SimSpec()
    return summarise(
        rows, assumed, policy="netkv", seed=0, link_load={}, busiest_links=(), wall_s=0.0, cpu_s=0.0, decision_s=None
    )


@some
@given(tables(), assumptions)
def test_parts_of_the_mean_ttft_add_up_to_it(rows: Outcomes, assumed: SimSpec) -> None:
    """The parts are wait, prefill, transfer, queue and first step; either all exist or none."""
    summary = summary_of(rows, assumed)
    parts = msgspec.structs.astuple(summary.ttft_parts_s)
    if summary.ttft_s.mean is None:
        assert parts == (None,) * 5
    else:
        assert sum(parts) == pytest.approx(summary.ttft_s.mean)
        assert all(part >= 0 for part in parts)


@some
@given(tables(), assumptions)
def test_counts_and_shares_equal_a_count_by_row(rows: Outcomes, assumed: SimSpec) -> None:
    """The reference counts row by row in plain Python: measured rows, good rows, and the duration."""
    summary = summary_of(rows, assumed)
    counts = summary.requests
    assert counts.arrived == counts.finished + counts.rejected + counts.in_flight == int((rows.state != 3).sum())
    end_s = float("inf") if assumed.measure_s is None else assumed.warmup_s + assumed.measure_s
    inside = [
        row
        for row in range(len(rows.state))
        if assumed.warmup_s <= rows.arrived_s[row] < end_s and rows.state[row] != NOT_ARRIVED
    ]
    assert summary.measured == len(inside)
    assert np.flatnonzero(window(rows, assumed)).tolist() == inside
    good = sum(_good(rows, row, assumed.slo) for row in inside)
    assert summary.slo_attainment == (pytest.approx(good / len(inside)) if inside else None)
    if assumed.measure_s is not None:
        assert summary.goodput_per_s == pytest.approx(good / assumed.measure_s)
        finished = sum(rows.state[row] == FINISHED for row in inside)
        assert summary.throughput_per_s == pytest.approx(finished / assumed.measure_s)
    placed = [row for row in inside if np.isfinite(rows.landed_s[row])]
    sent = [row for row in placed if rows.source[row] != rows.target[row]]
    assert summary.aggregated_share == pytest.approx(1 - len(sent) / len(placed) if placed else 0.0)
    transfers_s = [rows.landed_s[row] - rows.prefill_finished_s[row] for row in sent]
    assert summary.transfer_s.mean == (pytest.approx(np.mean(transfers_s)) if sent else None)
    for tier, share in summary.tier_share.items():
        assert share == pytest.approx(sum(rows.tier[row] == int(tier) for row in sent) / max(len(sent), 1))
    assert set(summary.tier_share) >= {"0", "1", "2", "3"}


def _good(rows: Outcomes, row: int, slo: Slo) -> bool:
    """Return whether the first token is in time and, if required, the others are fast enough."""
    if not rows.first_token_s[row] - rows.arrived_s[row] <= slo.ttft_s:
        return False
    if slo.tpot_s is None:
        return True
    tpot_s = (rows.finished_s[row] - rows.first_token_s[row]) / max(int(rows.output_tokens[row]) - 1, 1)
    return bool(tpot_s <= slo.tpot_s)


@some
@given(tables(), assumptions)
def test_a_summary_is_json_without_nan(rows: Outcomes, assumed: SimSpec) -> None:
    """Every number is finite or null, and the summary reads back equal."""
    summary = summary_of(rows, assumed)
    json.dumps(msgspec.to_builtins(summary), allow_nan=False)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_spread_ignores_missing_values() -> None:
    """There are a hundred and one values and one missing value."""
    spread = Spread.of(np.array([float("nan"), *range(101)]))
    assert (spread.mean, spread.p50, spread.p95, spread.p99) == pytest.approx((50, 50, 95, 99))
    assert Spread.of(np.array([float("nan")])) == Spread()


def test_a_summary_of_three_requests_by_hand() -> None:
    """Three requests in ten seconds: good, late, rejected; half of the first prompt was cached."""
    rows = Outcomes.empty(3)
    rows.arrived_s[:] = [0.0, 1.0, 2.0]
    rows.prefill_started_s[:2], rows.prefill_finished_s[:2] = [0.0, 2.0], [1.0, 3.0]
    rows.landed_s[:2], rows.admitted_s[:2] = [1.5, 6.0], [1.6, 6.5]
    rows.first_token_s[:2], rows.finished_s[:2] = [1.7, 7.0], [3.7, 10.0]
    rows.state[:], rows.tier[:2] = [FINISHED, FINISHED, REJECTED], [2, 3]
    rows.input_tokens[:], rows.output_tokens[:], rows.hit_tokens[:2] = 100, 11, [50, 0]
    summary = summary_of(rows)
    assert summary.ttft_s.mean == pytest.approx(3.85)
    assert msgspec.structs.astuple(summary.ttft_parts_s) == pytest.approx((0.5, 1.0, 1.75, 0.3, 0.3))
    assert summary.transfer_s.mean == pytest.approx(1.75)
    assert summary.tpot_s.mean == pytest.approx(0.25)
    assert summary.slo_attainment == pytest.approx(1 / 3)
    assert (summary.goodput_per_s, summary.throughput_per_s) == pytest.approx((0.1, 0.2))
    assert summary.tier_share == {"0": 0.0, "1": 0.0, "2": 0.5, "3": 0.5}
    assert summary.cache_hit == 0.25


def test_empty_rows_have_not_arrived() -> None:
    """All their values are missing, and every column exists."""
    rows = Outcomes.empty(2)
    assert all(len(getattr(rows, field.name)) == 2 for field in fields(Outcomes))
    assert summary_of(rows).requests.arrived == summary_of(rows).measured == 0


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"warmup_s": -1.0}, "measurement window"),
        ({"warmup_s": float("nan")}, "measurement window"),
        ({"measure_s": 0.0}, "measurement window"),
        ({"measure_s": float("inf")}, "measurement window"),
        ({"until_s": float("nan")}, "until_s"),
        ({"until_s": -1.0}, "until_s"),
        ({"oracle_refresh_s": 0.0}, "oracle_refresh_s"),
    ],
)
def test_invalid_settings_are_rejected(wrong: dict[str, float], problem: str) -> None:
    """The values are negative, not a number, or infinite."""
    with pytest.raises(InputError, match=problem):
        SimSpec(**wrong)  # type: ignore[arg-type]  # one field each
    with pytest.raises(InputError, match=r"slo\.tpot_s"):
        Slo(tpot_s=0.0)


SMALL = """
name: small
racks: [{name: rack0}]
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 12 ms}}}
defaults: {model: llama-3-70b, tp: 4, kv_capacity: 2 GB}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-3"}
  - {name: p1, role: prefill, gpus: "node0:4-7"}
  - {name: d0, role: decode, gpus: "node1:0-3"}
  - {name: d1, role: decode, gpus: "node1:4-7"}
"""


def request(at_s: float, tokens: int, answer: int, chain: tuple[int, ...] = (), size: int = 512) -> TracedRequest:
    """Return one request of a trace."""
    return TracedRequest(at_s=at_s, input_tokens=tokens, output_tokens=answer, blocks=chain, block_tokens=size)


def test_the_router_does_not_rely_on_prefixes_that_a_full_instance_dropped() -> None:
    """Half-empty last blocks fill the memory before its bytes are used up; a request that returns later is still
    served, with the rest of its prefix."""
    first = [request(0.0, 600, 400, (10 * k, 10 * k + 1)) for k in range(30)]
    again = [request(100.0 + k, 600, 1, (10 * k, 10 * k + 1)) for k in range(30)]
    trace = Trace(name="back", requests=(*first, *again))
    for policy in ("round-robin", "cache-aware", "netkv"):
        run = simulate(parse(SMALL), trace, ControlSpec(decode=policy), SimSpec(prefill_queueing=False))
        assert run.summary.requests.in_flight == 0
        assert (run.outcomes.state[30:] == FINISHED).all()
        assert 0 < run.outcomes.hit_tokens[30:].sum() < 30 * 600


def test_a_run_names_what_it_cannot_simulate() -> None:
    """Two models without a choice; blocks of two sizes."""
    trace = Trace(name="one", requests=(request(0.0, 600, 1),))
    two_models = SMALL.replace("{name: d1,", "{name: d1, model: qwen3-32b,").replace(
        "{name: p1,", "{name: p1, model: qwen3-32b,"
    )
    with pytest.raises(InputError, match="serves llama-3-70b, qwen3-32b"):
        simulate(parse(two_models), trace, ControlSpec(), SimSpec())
    mixed = Trace(name="mixed", requests=(request(0, 600, 1, (1, 2), 512), request(0, 32, 1, (1, 2), 16)))
    with pytest.raises(InputError, match="mixed: the trace has prefix blocks of 16 and 512 tokens"):
        simulate(parse(SMALL), mixed, ControlSpec(), SimSpec())


def test_until_ends_the_run_at_its_time() -> None:
    """At 0.01 s the only prompt is being prefilled, and the second one has not arrived."""
    trace = Trace(name="two", requests=(request(0.0, 600, 1), request(1.0, 600, 1)))
    run = simulate(parse(SMALL), trace, ControlSpec(), SimSpec(until_s=0.01))
    counts = run.summary.requests
    assert (counts.arrived, counts.in_flight) == (1, 1)
    assert run.outcomes.state.tolist() == [IN_FLIGHT, NOT_ARRIVED]
