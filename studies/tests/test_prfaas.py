"""PrfaaS's experiments: formula and queues agree without variance, all policies get the same requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.planner.throughput.problem import read_problem
from kvroute.planner.throughput.search import KINDS, Kind, deployment, find
from kvroute.policies.fleet.throughput import Mix
from kvroute.sim.metrics import FINISHED, Outcomes
from kvroute.sim.settings import Slo
from kvroute.sim.workload import generate, write
from kvroute.types import InputError
from kvroute_studies.prfaas.burst import (
    DUAL,
    FROM_S,
    SCENARIOS,
    WARMUP_S,
    good_over_time,
    requests_of,
    static,
)
from kvroute_studies.prfaas.case_study import (
    MU,
    assumptions,
    exact,
    problem,
    published_lengths,
    published_optimum,
    published_problem,
)
from kvroute_studies.prfaas.kv import HYBRID, KV_THROUGHPUT, computed
from kvroute_studies.prfaas.queue import PrfaasStudy, keeps_up_per_s
from kvroute_studies.prfaas.run import BURST, CASE_STUDY, EXPERIMENTS, of_study, run_cell
from kvroute_studies.prfaas.traffic import Disturbance, spread_lengths, two_lengths
from kvroute_studies.shared.cells import cells

STUDY = PrfaasStudy(assumptions(["requests=600", "connections=2"]))
EXAMPLE = Path(__file__).parents[2] / "examples" / "prfaas-case-study.yaml"


def case(policy: str, load: float, profile: str = "no-variance", seed: int = 0) -> Cell:
    """Return a cell of the case study."""
    return Cell(
        experiment=CASE_STUDY.name, reading="paper", profile=profile, settings={"load": load}, policy=policy, seed=seed
    )


def burst(policy: str, profile: str, seed: int = 0) -> Cell:
    """Return a cell of the bursts."""
    return Cell(experiment=BURST.name, reading="paper", profile=profile, settings={}, policy=policy, seed=seed)


def test_sweeps_have_unique_cells_for_two_seeds() -> None:
    """There are cells for two seeds; a deterministic cell is run once; keys are unique."""
    swept = {name: cells(experiment, "paper", experiment.profiles, (0, 1)) for name, experiment in EXPERIMENTS.items()}
    assert {name: len(sweep) for name, sweep in swept.items()} == {
        "prfaas-case-study": 7 * 3 * (1 + 2 + 2),
        "prfaas-burst": 5 * 9 * 2,
        "prfaas-kv-throughput": 4 * 7,
    }
    keys = [cell.key for sweep in swept.values() for cell in sweep]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("kind", KINDS)
def test_the_case_study_equals_the_example_file(kind: Kind) -> None:
    """The data of the experiment and those of examples/prfaas-case-study.yaml have the same optimum."""
    here, there = (deployment(find(problem, kind), kind) for problem in (published_problem(), read_problem(EXAMPLE)))
    assert (here.n_prefill, here.n_decode, here.threshold_tokens) == (
        there.n_prefill, there.n_decode, there.threshold_tokens,
    )  # fmt: skip
    assert here.lambda_max_per_s == pytest.approx(there.lambda_max_per_s)
    assert here.stage_per_s == pytest.approx(there.stage_per_s)


def test_the_mean_request_costs_more_than_the_request_of_mean_length() -> None:
    """Naive: four instances over E[T(L)], and the link is never the limit; prefill is convex, so each throughput is
    lower."""
    naive = published_optimum("naive")
    mix = naive.system.mix
    assert exact(naive) == pytest.approx(4 / (naive.system.prfaas[0].prefill_s(mix.tokens) @ mix.share))
    for kind in KINDS:
        assert exact(published_optimum(kind)) < published_optimum(kind).lambda_max_per_s * 0.99


@pytest.mark.parametrize("gbps", [1.0, 6.0])
def test_the_plan_for_bursts_has_a_narrow_link(gbps: float) -> None:
    """In units of 1e9 bits a second: naive offloading is limited by the link."""
    narrow = find(problem(published_lengths(), wan_gbps=gbps), "naive")
    assert deployment(narrow, "naive").egress_gbps == pytest.approx(gbps)
    assert deployment(narrow, "naive").binding == "prfaas_egress"


@pytest.mark.parametrize("kind", KINDS)
def test_without_variance_throughput_equals_the_formula(kind: str) -> None:
    """Evenly spaced arrivals of the two representative lengths, 20 % above the formula, give its throughput within 5
    %."""
    record = run_cell(STUDY, case(kind, 1.2))
    assert record.figures["keeps_up_per_s"] == pytest.approx(record.figures["lambda_max_per_s"], rel=0.05)
    assert record.summary.requests.rejected == 0


def test_below_saturation_nothing_waits_for_prefill() -> None:
    """At 90 % of the load without variance; the formula's shares equal those of the run."""
    record = run_cell(STUDY, case("prfaas", 0.9))
    figures = record.figures
    assert max(figures["prfaas_wait_s"], figures["pd_p_wait_s"], figures["pd_d_wait_s"]) < 0.1
    assert figures["egress_gbps"] == pytest.approx(0.9 * figures["model_egress_gbps"], rel=0.02)
    assert [figures["prfaas_busy"], figures["pd_p_busy"]] == pytest.approx([0.9, 0.9], abs=0.02)


def test_variance_increases_waiting() -> None:
    """With equal load and lengths, random arrivals wait longer than even ones, and even ones of many lengths longer
    than of two."""
    waits = []
    for profile in CASE_STUDY.profiles:
        parts = run_cell(STUDY, case("prfaas", 0.9, profile)).summary.ttft_parts_s
        waits.append(parts.prefill_wait or 0.0)
    assert waits[0] < waits[1] < waits[2]


@given(st.integers(2, 400), st.integers(0, 5), st.integers(0, 5))
def test_lengths_of_seeds_differ_only_in_order(count: int, one: int, other: int) -> None:
    first, second = (spread_lengths(count, np.random.default_rng(seed)) for seed in (one, other))
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert (first == second).all() == (one == other or len(set(first.tolist())) == 1) or count < 8


def test_spread_lengths_have_the_planned_mean() -> None:
    assert spread_lengths(2_000, np.random.default_rng(0)).mean() == pytest.approx(
        published_problem().lengths.mix.mean_tokens, rel=2e-3
    )


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=20), st.integers(0, 100_000), st.integers(1, 300))
def test_two_lengths_occur_in_their_shares(tokens: list[int], threshold: int, count: int) -> None:
    """Any first part of the sequence deviates by at most one request."""
    cut = Mix.of(tokens).cut(np.array([float(threshold)]))
    lengths = two_lengths(count, cut)
    share = float(cut.long_share[0])
    long = lengths > threshold
    expected = share * np.arange(1, count + 1)
    assert np.abs(np.cumsum(long) - expected).max() <= 1.0


@given(
    st.floats(1.0, 500.0), st.floats(0.0, 500.0), st.floats(0.1, 5.0), st.floats(0.1, 10.0), st.floats(0.01, 2_000.0)
)
def test_a_disturbance_shifts_arrivals_and_loses_none(
    from_s: float, lasts_s: float, factor: float, rate_per_s: float, at_s: float
) -> None:
    """A request due after a number of expected requests comes when that number is expected."""
    disturbed = Disturbance(from_s, from_s + lasts_s, rate_factor=factor)
    inside = min(max(at_s - from_s, 0.0), lasts_s)
    due = rate_per_s * (at_s + (factor - 1.0) * inside)
    assert disturbed.unwound(np.array([due]), rate_per_s)[0] == pytest.approx(at_s, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenarios_share_the_requests_before_the_disturbance(name: str) -> None:
    """The same seed gives the same requests until the disturbance, and always the same for every policy."""
    calm, other = (requests_of(STUDY, SCENARIOS[scenario], 1.5, 3) for scenario in ("calm", name))
    before = [request for request in other.requests if request.at_s < FROM_S]
    assert before == [request for request in calm.requests if request.at_s < FROM_S]
    assert requests_of(STUDY, SCENARIOS[name], 1.5, 4) != other
    assert sum(request.at_s >= WARMUP_S for request in other.requests) > 1_000


def test_every_seed_uses_another_part_of_a_trace(tmp_path: Path) -> None:
    """A run needs 450 of the 600 requests; those before the disturbance are equal in all scenarios."""
    path = tmp_path / "mine.jsonl"
    write(generate(600, rate_per_s=3.4, seed=1), path)
    study = PrfaasStudy(assumptions(), str(path))
    parts = [requests_of(study, SCENARIOS["calm"], 0.25, seed) for seed in (0, 1)]
    assert [request.input_tokens for request in parts[0].requests] != [r.input_tokens for r in parts[1].requests]
    doubled = requests_of(study, SCENARIOS["load-doubles"], 0.25, 0)
    before = [request for request in parts[0].requests if request.at_s < FROM_S]
    assert before == [request for request in doubled.requests if request.at_s < FROM_S]
    assert len(doubled.requests) > 1.3 * len(parts[0].requests)
    with pytest.raises(InputError, match="600 requests are too few"):
        requests_of(study, SCENARIOS["calm"], 0.5, 0)


def test_disturbances_change_rate_and_lengths_as_named() -> None:
    """There are twice as many requests; prompts are about twice as long, except for the cut at the limit."""
    traces = {name: requests_of(STUDY, SCENARIOS[name], 1.5, 0) for name in SCENARIOS}

    def inside(name: str) -> list[int]:
        return [request.input_tokens for request in traces[name].requests if FROM_S <= request.at_s < 900.0]

    assert len(inside("load-doubles")) == pytest.approx(2 * len(inside("calm")), rel=0.15)
    assert np.median(inside("longer-prompts")) == pytest.approx(np.exp(10.6 - MU) * np.median(inside("calm")), rel=0.15)
    over = [
        [request for request in traces[name].requests if request.at_s >= 900.0] for name in ("calm", "longer-prompts")
    ]
    assert over[0] == over[1], "then all is as it was"
    assert SCENARIOS["link-30"].changes[0].share == 0.3


@pytest.fixture(scope="module")
def narrow() -> dict[str, Record]:
    """The link has 30 % for ten minutes, under the scheduler and under the threshold for the old traffic."""
    return {policy: run_cell(STUDY, burst(policy, "link-30")) for policy in (DUAL, static(12_500))}


def test_a_static_threshold_never_changes(narrow: dict[str, Record]) -> None:
    """The link has a backlog of hours, yet exactly the longer prompts are offloaded."""
    record = narrow[static(12_500)]
    requests = requests_of(STUDY, SCENARIOS["link-30"], record.config["rate_per_s"], 0).requests
    longer = [request.input_tokens > 12_500 for request in requests if request.at_s >= WARMUP_S]
    assert record.figures["offloaded_share"] == pytest.approx(float(np.mean(longer)))
    assert (record.summary.role_switches, "threshold_tokens" in record.series) == (0, False)


def test_the_scheduler_beats_an_outdated_threshold_on_a_narrow_link(narrow: dict[str, Record]) -> None:
    """The scheduler's threshold rises; every request is answered once under both."""
    dual, old = narrow.values()
    for record in (dual, old):
        counts = record.summary.requests
        assert (counts.finished, counts.rejected, counts.in_flight) == (counts.arrived, 0, 0)
    assert (dual.summary.goodput_per_s or 0.0) > 1.3 * (old.summary.goodput_per_s or 0.0)
    assert dual.series["n_prefill"][0] == (0.0, dual.config["n_prefill"])
    thresholds = dict(dual.series["threshold_tokens"])
    assert max(thresholds[at] for at in thresholds if 400 <= at < 900) > 1.5 * thresholds[280.0]


def test_stage_waits_add_up_to_the_total_wait(narrow: dict[str, Record]) -> None:
    """The wait before prefill is the sum of each stage's wait, weighted by the share of its requests."""
    for record in narrow.values():
        figures, parts = record.figures, record.summary.ttft_parts_s
        away = figures["offloaded_share"]
        assert figures["prfaas_wait_s"] != pytest.approx(figures["pd_p_wait_s"], rel=0.1)
        whole = away * figures["prfaas_wait_s"] + (1 - away) * figures["pd_p_wait_s"]
        assert whole == pytest.approx(parts.prefill_wait, rel=1e-6)
        assert figures["service_mean_s"] == pytest.approx(parts.prefill, rel=1e-6)


def rows(arrived_s: list[float], finished_s: list[float], first_s: list[float]) -> Outcomes:
    """Return answered requests of two tokens."""
    made = Outcomes.empty(len(arrived_s))
    made.arrived_s[:], made.finished_s[:], made.first_token_s[:] = arrived_s, finished_s, first_s
    made.output_tokens[:], made.state[:] = 2, FINISHED
    return made


def test_sustained_throughput_is_that_of_the_site_that_falls_behind() -> None:
    """Every second request is offloaded. Home keeps up with the arrivals, 10 a second; the remote site completes only 8
    a second."""
    arrived = np.arange(100) / 10
    away = np.arange(100) % 2 == 0
    first = np.where(away, 3.0 + np.arange(100) / 8, arrived + 1.0).tolist()
    behind = rows(arrived.tolist(), first, first)
    assert keeps_up_per_s(behind, away) == pytest.approx(8.0)
    assert keeps_up_per_s(behind, np.zeros(100, dtype=np.bool_)) == pytest.approx(9.0, abs=0.5)


def test_goodput_over_time() -> None:
    """The steps are 20 s by arrival; requests with late first tokens, slow tokens or no token are not good."""
    nan = float("nan")
    some = rows(
        [0.0, 1.0, 25.0, 26.0, 27.0, 65.0], [1.1, 9.0, 25.1, 26.9, nan, 65.1], [1.0, 8.0, 25.0, 26.0, nan, 65.0]
    )
    good = good_over_time(some, Slo(ttft_s=5.0, tpot_s=0.5))
    assert good == ((0.0, 0.5), (20.0, 1 / 3), (60.0, 1.0))


def test_a_users_trace_keeps_its_prefixes(tmp_path: Path) -> None:
    """The user's trace replaces the drawn requests; its prefixes are used, and the plan is made for the uncached
    tokens."""
    path = tmp_path / "mine.jsonl"
    write(generate(600, rate_per_s=3.4, seed=1), path)
    study = PrfaasStudy(assumptions(["requests=400"]), str(path))
    assert of_study(CASE_STUDY, study).profiles == ("trace",)
    assert "longer-prompts" not in of_study(BURST, study).profiles
    record = run_cell(study, case("prfaas", 0.5, "trace"))
    assert (record.summary.prefill_cache_hit or 0.0) > 0.1
    assert record.figures["lambda_max_per_s"] > deployment(find(published_problem())).lambda_max_per_s
    assert record.config["trace"].startswith("mine.jsonl, XXH64 ")


def test_published_kv_throughput_equals_size_over_time() -> None:
    """Where size and time were published, Eq. 1 holds within their three digits; otherwise the time is derived and
    checks nothing."""
    points = computed(cells(KV_THROUGHPUT, "paper", KV_THROUGHPUT.profiles, (0,)))
    for point in points:
        figures = point.figures
        assert ("computed_gbps" in figures) == (point.cell.policy == HYBRID)
        assert not {"computed_gbps", "implied_prefill_s"} <= figures.keys()
        assert figures["need_gbps"] == pytest.approx(64 * figures["published_gbps"])
        if "computed_gbps" in figures:
            assert figures["computed_gbps"] == pytest.approx(figures["published_gbps"], rel=0.01)
    times = [p.figures["implied_prefill_s"] for p in points if p.cell.policy == "qwen3-235b"]
    assert times == sorted(times)


def test_assumptions_can_be_changed_by_field() -> None:
    changed = assumptions(["wan_gbps=50", "requests=200"])
    assert (changed.wan_gbps, changed.requests, changed.name) == (50.0, 200, "paper+wan_gbps=50+requests=200")


@pytest.mark.parametrize("change", ["wan=1", "name=mine", "requests=many", "requests"])
def test_an_invalid_change_is_named(change: str) -> None:
    with pytest.raises(InputError, match="--set"):
        assumptions([change])
