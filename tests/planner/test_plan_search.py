"""The search for a plan, the effects that move its optimum, and its tables: laws of random problems, then the published
inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvroute.planner.throughput.kv_throughput import (
    PUBLISHED_TOKENS,
    egress_bytes_per_s,
    kv_bytes_per_s,
    mean_kv_bytes_per_s,
    published_kv_bytes_per_s,
)
from kvroute.planner.throughput.lengths import Lengths, grouped, incremental, log_normal
from kvroute.planner.throughput.plan import make_plan, over_splits, over_thresholds
from kvroute.planner.throughput.problem import Hardware, Problem, Site, read_problem
from kvroute.planner.throughput.search import KINDS, deployment, find, kept
from kvroute.planner.throughput.sensitivity import (
    LENGTH_FACTORS,
    price_point,
    with_egress,
    with_lengths,
    with_spread,
)
from kvroute.policies.fleet.throughput import splits, stage_rates
from kvroute.sim.workload import generate
from kvroute.sim.workload.trace import Trace, TracedRequest
from kvroute.types import FloatArray, InputError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "prfaas-case-study.yaml"
GBPS = 1e9 / 8


def _line(base: float, per_token: float) -> Line:
    return Line(base=base, per_token=per_token)


class Line(msgspec.Struct, frozen=True):
    """base + per_token * tokens."""

    base: float
    per_token: float

    def __call__(self, tokens: FloatArray) -> FloatArray:
        return self.base + self.per_token * tokens


hardware = st.builds(
    Hardware,
    st.just("gpu"),
    st.builds(_line, st.sampled_from([0.05, 0.4]), st.sampled_from([2e-5, 1e-4])),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([1.0, 2.5]),
)
sites = st.builds(lambda kind, count: Site("pd", kind, count, 8 * count), hardware, st.integers(2, 5))
prefill_sites = st.builds(
    lambda kind, count, gbps: Site("prfaas", kind, count, 8 * count, gbps * GBPS),
    hardware,
    st.integers(1, 4),
    st.sampled_from([1.0, 10.0, 100.0]),
)
lengths = st.lists(st.integers(1, 100_000), min_size=1, max_size=30).map(
    lambda tokens: grouped(np.array(tokens, dtype=float), np.ones(len(tokens)), 100, "drawn")
)
problems = st.builds(
    Problem,
    st.just("drawn"),
    lengths,
    st.just(_line(1.8e8, 17_280.0)),
    st.lists(prefill_sites, min_size=1, max_size=2).map(tuple),
    st.lists(sites, min_size=1, max_size=2).map(tuple),
    sites,
    st.just(8),
    st.sampled_from(["representative", "exact"]),
    st.just(()),
)


@pytest.fixture(scope="module")
def case() -> Problem:
    return read_problem(EXAMPLE)


@settings(max_examples=40)
@given(problems)
def test_the_optimum_is_no_worse_than_any_cell(problem: Problem) -> None:
    """The optimum equals the best of all thresholds and splits, and the naive deployment is one of these cells."""
    best = find(problem)
    rates = stage_rates(best.system, problem.lengths.thresholds, *splits([site.instances for site in problem.pd]))
    assert best.lambda_max_per_s == rates.lambda_max_per_s.max()
    assert best.lambda_max_per_s >= find(problem, "naive").lambda_max_per_s


@settings(max_examples=40)
@given(problems, st.sampled_from([0.1, 0.5, 2.0]))
def test_a_new_search_is_never_worse_than_the_old_plan(problem: Problem, factor: float) -> None:
    best = find(problem)
    for changed in (with_egress(problem, factor), with_lengths(problem, factor)):
        assert find(changed).lambda_max_per_s >= kept(changed, best).lambda_max_per_s[0, 0] * (1 - 1e-12)


@settings(max_examples=40)
@given(problems)
def test_bandwidth_beyond_the_plans_use_has_no_effect(problem: Problem) -> None:
    """A link with exactly the plan's own traffic serves as much; with less bandwidth it serves less."""
    one = replace(problem, prfaas=problem.prfaas[:1])
    best = find(one)
    used = deployment(best).egress_gbps * GBPS
    if used == 0:
        return
    factor = used / one.prfaas[0].egress_bytes_per_s
    assert kept(with_egress(one, factor * (1 + 1e-9)), best).lambda_max_per_s[0, 0] == pytest.approx(
        best.lambda_max_per_s
    )
    assert kept(with_egress(one, factor * 0.9), best).lambda_max_per_s[0, 0] == pytest.approx(
        0.9 * best.lambda_max_per_s
    )


@settings(max_examples=40)
@given(problems)
def test_ttft_of_a_plan_covers_all_requests(problem: Problem) -> None:
    """The TTFT of a plan equals that of a simple list of (seconds, share), cluster by cluster, sorted."""
    for kind in KINDS:
        best = find(problem, kind)
        rows: list[tuple[float, float]] = []
        mix, cell = best.system.mix, best.cell
        for tokens, share in zip(mix.tokens.tolist(), mix.share.tolist(), strict=True):
            is_long = tokens > best.threshold_tokens
            places = best.prfaas if is_long else best.pd
            rates = cell.prfaas_each_per_s[:, 0] if is_long else cell.pd_p_each_per_s[:, 0, 0]
            for site, rate in zip(places, rates.tolist(), strict=True):
                seconds = float(site.hardware.prefill_s(np.array([tokens]))[0])
                rows.append((seconds, share * rate / float(rates.sum())))
        ttft = deployment(best, kind).ttft_s
        assert ttft.mean == pytest.approx(sum(seconds * share for seconds, share in rows))
        assert sum(share for seconds, share in rows if seconds <= ttft.p90 * (1 + 1e-9)) >= 0.9 - 1e-6
        assert sum(share for seconds, share in rows if seconds < ttft.p90 * (1 - 1e-9)) <= 0.9 + 1e-6


@settings(max_examples=40)
@given(problems)
def test_every_instance_is_counted_once(problem: Problem) -> None:
    """There may be several clusters; a stage without requests has no rate."""
    for kind in KINDS:
        best = find(problem, kind)
        result = deployment(best, kind)
        assert result.n_prefill + result.n_decode == sum(site.instances for site in best.pd)
        assert result.n_prfaas == sum(site.instances for site in best.prfaas)
        assert best.gpus == sum(site.gpus for site in (*best.prfaas, *best.pd))
        assert (result.stage_per_s["prfaas"] > 0) == (result.offloaded_share > 0)
        assert (result.stage_per_s["pd_p"] > 0) == (result.offloaded_share < 1)


@settings(max_examples=15)
@given(problems)
def test_both_plans_cost_the_same_at_the_break_even_price(problem: Problem) -> None:
    plan = make_plan(problem)
    at = price_point(plan.optima, plan.report.sensitivity.break_even_factor).requests_per_price
    assert at["prfaas"] == pytest.approx(at["homogeneous"])
    now = price_point(plan.optima, 1.0).requests_per_price
    assert now == {kind: pytest.approx(cost.requests_per_price) for kind, cost in plan.report.costs.items()}


@settings(max_examples=25)
@given(problems)
def test_a_report_describes_its_optimum(problem: Problem) -> None:
    """The lowest bound is the rate served, splits and bandwidth are those of the clusters, and gains are ratios."""
    plan = make_plan(problem)
    report, best = plan.report, plan.optima["prfaas"]
    assert min(bound for bound in report.bounds_per_s.values() if bound is not None) == best.lambda_max_per_s
    assert report.splits["pd"] == (int(best.cell.n_prefill[0, -1]), int(best.cell.n_decode[0, -1]))
    assert [need.available_gbps * GBPS for need in report.egress_need] == pytest.approx(
        [site.egress_bytes_per_s for site in problem.prfaas]
    )
    for kind, gain in report.gain_over.items():
        assert (1 + gain) * report.deployments[kind].lambda_max_per_s == pytest.approx(best.lambda_max_per_s)


@settings(max_examples=25)
@given(problems)
def test_sensitivity_is_a_search_of_the_changed_problem(problem: Problem) -> None:
    """Without a change the result is the plan; keeping the plan is never better than a new search."""
    plan = make_plan(problem)
    best, sensitivity = plan.optima["prfaas"], plan.report.sensitivity
    for egress in sensitivity.egress:
        changed = with_egress(problem, egress.factor)
        assert egress.lambda_max_per_s == find(changed).lambda_max_per_s
        assert egress.kept_per_s == kept(changed, best).lambda_max_per_s[0, 0]
    mean_tokens = problem.lengths.mix.mean_tokens
    longer = [(with_lengths(problem, point.factor), point, point.factor * mean_tokens) for point in sensitivity.lengths]
    for changed, point, tokens in longer + [
        (with_spread(problem, p.factor), p, mean_tokens) for p in sensitivity.spread
    ]:
        assert point.lambda_max_per_s == pytest.approx(find(changed).lambda_max_per_s)
        assert point.kept_per_s == pytest.approx(kept(changed, best).lambda_max_per_s[0, 0])
        assert point.homogeneous_per_s == pytest.approx(find(changed, "homogeneous").lambda_max_per_s)
        assert point.mean_tokens == pytest.approx(tokens)
    same = [(point.lambda_max_per_s, point.kept_per_s) for point in sensitivity.egress if point.factor == 1]
    same += [(point.lambda_max_per_s, point.kept_per_s) for point in sensitivity.lengths if point.factor == 1]
    assert same == [(best.lambda_max_per_s, best.lambda_max_per_s)] * 2


@settings(max_examples=40)
@given(problems)
def test_the_needed_egress_is_the_least_that_never_limits_prefill(problem: Problem) -> None:
    """Eq. 2 against eq. 3: with this bandwidth PrfaaS is limited by compute, with 1 % less by the link."""
    one = replace(problem, prfaas=problem.prfaas[:1])
    plan = make_plan(one)
    best, need = plan.optima["prfaas"], plan.report.egress_need[0]
    if best.cell.cut.long_share[0] == 0:
        assert need.offloaded_gbps == 0
        return
    for share, binds in ((1 + 1e-9, False), (0.99, True)):
        factor = share * need.offloaded_gbps / need.available_gbps
        assert kept(with_egress(one, factor), best).prfaas_egress_binds.tolist() == [binds]


def test_many_splits_are_searched_in_parts(case: Problem) -> None:
    """Two PD clusters of 31 x 31 splits and 1,311 thresholds do not fit in one part. Nothing is missed: decode is fast
    here, so the optimum is in the last part."""
    site = replace(case.pd[0], instances=30, hardware=replace(case.pd[0].hardware, decode_per_s=8.0))
    large = replace(case, pd=(replace(site, name="a"), replace(site, name="b")))
    best = find(large)
    n_prefill, n_decode = splits([30, 30])
    highest = max(
        float(stage_rates(best.system, case.lengths.thresholds, n_prefill[at], n_decode[at]).lambda_max_per_s.max())
        for at in (slice(0, 200), slice(200, 700), slice(700, None))
    )
    assert best.lambda_max_per_s == highest
    assert best.cell.n_prefill.min() >= 27
    with pytest.raises(InputError, match="too many to search"):
        find(replace(case, pd=(site,) * 4))


def test_the_first_of_equal_optima_is_chosen(case: Problem) -> None:
    """The prefill work at home can be shared between two equal clusters in many ways, in both parts of the search."""
    source = replace(case.prfaas[0], instances=20, gpus=160)
    slow = replace(case.pd[0].hardware, decode_per_s=1.0, prefill_s=Line(base=0.5, per_token=1e-3))
    best = find(replace(case, prfaas=(source,), pd=tuple(Site(name, slow, 30, 240) for name in "ab")))
    rates = stage_rates(best.system, case.lengths.thresholds, *splits([30, 30]))
    row, column = rates.best()
    equal = np.flatnonzero((rates.lambda_max_per_s == rates.lambda_max_per_s.max()).any(axis=0))
    assert equal.min() == column < equal.max() - 100
    assert best.threshold_tokens == case.lengths.thresholds[row]
    assert best.cell.n_prefill[0].tolist() == rates.n_prefill[column].tolist()


def test_lengths_without_compute_time_are_left_out_of_the_sensitivity(case: Problem) -> None:
    """Extrapolated to shorter prompts, this profile reaches zero at 600 tokens: for 1,000 tokens the factors of a half
    and a quarter are left out."""
    steep = replace(case.pd[0].hardware, prefill_s=lambda tokens: np.maximum(1e-3 * (tokens - 600.0), 0.0))
    one = grouped(np.array([1_000.0]), np.ones(1), 100, "one")
    short = replace(case, lengths=one, pd=(replace(case.pd[0], hardware=steep),))
    assert [point.factor for point in make_plan(short).report.sensitivity.lengths] == [0.75, 1.0, 1.5, 2.0]
    assert [point.factor for point in make_plan(case).report.sensitivity.lengths] == list(LENGTH_FACTORS)


def test_deployments_that_cannot_serve_are_rejected(case: Problem) -> None:
    alone = replace(case, homogeneous=replace(case.homogeneous, instances=1))
    with pytest.raises(InputError, match="homogeneous deployment cannot serve requests"):
        find(alone, "homogeneous")


def test_the_case_study_is_balanced(case: Problem) -> None:
    """Eq. 7: one step lower PrfaaS is the bottleneck, one step higher PD-P is. Only inputs are the published ones, no
    result."""
    best = find(case)
    rates = over_thresholds(make_plan(case))
    row = int(np.searchsorted(case.lengths.thresholds, best.threshold_tokens))
    assert rates.prfaas_bound_per_s[row - 1] < rates.pd_p_bound_per_s[row - 1, 0]
    assert rates.prfaas_bound_per_s[row + 1] > rates.pd_p_bound_per_s[row + 1, 0]
    deployments = {kind: deployment(find(case, kind), kind) for kind in KINDS}
    assert (
        deployments["prfaas"].lambda_max_per_s
        > deployments["naive"].lambda_max_per_s
        > deployments["homogeneous"].lambda_max_per_s
    )
    assert deployments["prfaas"].n_prefill + deployments["prfaas"].n_decode == 8
    assert deployments["homogeneous"].n_prefill + deployments["homogeneous"].n_decode == 12
    assert (deployments["naive"].n_prfaas, deployments["naive"].n_decode, deployments["naive"].offloaded_share) == (
        4,
        8,
        1,
    )
    assert 0 < deployments["prfaas"].egress_gbps < 100
    assert over_splits(make_plan(case)).lambda_max_per_s.max() == best.lambda_max_per_s


def test_the_profile_gives_the_published_kv_throughput(case: Problem) -> None:
    """Eq. 1 with sizes and times of Table 5 gives its third row, within its rounding."""
    tokens = np.array(PUBLISHED_TOKENS, dtype=float)
    phi = kv_bytes_per_s(case.kv_bytes, case.prfaas[0].hardware.prefill_s, tokens) / GBPS
    assert phi == pytest.approx([3.61, 3.59, 3.19, 2.62], rel=0.01)


@pytest.mark.parametrize(
    ("name", "tokens", "gpus", "gbps"),
    [
        ("minimax-m2.5", 32_768, 512, 3_800),
        ("qwen3-235b", 32_768, 512, 2_100),
        ("ring-2.5-1t", 32_768, 512, 170),
        ("ring-2.5-1t", 131_072, 10_000, 1_800),
    ],
    ids=["minimax", "qwen3", "ring", "ring-10000"],
)
def test_the_published_egress_follows_from_table_3(name: str, tokens: int, gpus: int, gbps: float) -> None:
    """Eq. 2 as computed in PrfaaS 2.3; its figures are rounded."""
    assert egress_bytes_per_s(gpus, 8, published_kv_bytes_per_s(name, tokens)) / GBPS == pytest.approx(gbps, rel=0.03)


def test_longer_prompts_of_ring_need_less_egress() -> None:
    """PrfaaS 2.3: below 100 Gbps at 128K tokens. Between two lengths of the table, the need is between theirs."""
    at_128k = egress_bytes_per_s(512, 8, published_kv_bytes_per_s("ring-2.5-1t", 131_072))
    assert at_128k < 100 * GBPS
    assert at_128k < egress_bytes_per_s(512, 8, published_kv_bytes_per_s("ring-2.5-1t", 65_536))
    assert published_kv_bytes_per_s("ring-2.5-1t", 65_536) == pytest.approx((2.59 + 1.46) / 2 * GBPS)
    for tokens in (1_023, 131_073):
        with pytest.raises(InputError, match="does not cover"):
            published_kv_bytes_per_s("ring-2.5-1t", tokens)


@given(problems, st.integers(0, 100_000))
def test_the_mean_kv_throughput_is_total_bytes_over_total_seconds(problem: Problem, threshold: int) -> None:
    """The first form of Eq. 2, request by request."""
    mix, site = problem.lengths.mix, problem.prfaas[0]
    throughput = mean_kv_bytes_per_s(mix, threshold, problem.kv_bytes, site.hardware.prefill_s, "exact")
    kept = mix.tokens > threshold
    if not kept.any():
        assert throughput == 0
        return
    nbytes = (problem.kv_bytes(mix.tokens) * mix.share)[kept].sum()
    assert throughput == pytest.approx(nbytes / (site.hardware.prefill_s(mix.tokens) * mix.share)[kept].sum())


def test_the_second_form_is_the_kv_throughput_of_the_mean_length(case: Problem) -> None:
    """The second form of Eq. 2; the profile is not linear, so that the first form gives another value."""
    mix, prefill_s = case.lengths.mix, case.prfaas[0].hardware.prefill_s
    kept = mix.tokens > 1_000
    mean = np.array([mix.tokens[kept] @ mix.share[kept] / mix.share[kept].sum()])
    representative, exact = (
        mean_kv_bytes_per_s(mix, 1_000, case.kv_bytes, prefill_s, reading) for reading in ("representative", "exact")
    )
    assert representative == pytest.approx(case.kv_bytes(mean)[0] / prefill_s(mean)[0])
    assert representative != pytest.approx(exact, rel=1e-3)


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=60), st.integers(1, 700))
def test_grouping_keeps_the_mean_and_every_share(tokens: list[int], step: int) -> None:
    """At every threshold, groups and lengths are divided equally."""
    drawn = np.array(tokens, dtype=float)
    groups = grouped(drawn, np.ones(len(tokens)), step, "drawn")
    assert groups.mix.mean_tokens == pytest.approx(drawn.mean())
    assert (np.diff(groups.thresholds) > 0).all()
    longer = (drawn[None, :] > groups.thresholds[:, None]).mean(axis=1)
    assert groups.mix.cut(groups.thresholds).long_share == pytest.approx(longer)
    assert (longer[0], longer[-1]) == (1, 0)


@settings(max_examples=25)
@example(6.0, 1.0, 1_000, 2_000)  # one step covers all lengths
@given(st.floats(6, 11), st.floats(0.2, 2), st.integers(1, 1_000), st.integers(2_000, 200_000))
def test_the_log_normal_is_exact_for_any_step(mu: float, sigma: float, least: int, most: int) -> None:
    """Mean and tail equal a numerical integration of the density."""
    from scipy.integrate import quad
    from scipy.stats import norm

    low, high = (np.log(least) - mu) / sigma, (np.log(most) - mu) / sigma
    mass = norm.cdf(high) - norm.cdf(low)
    assume(mass > 1e-3)
    fine, coarse = log_normal(mu, sigma, least, most, 100), log_normal(mu, sigma, least, most, 1_000)
    mean = quad(lambda z: np.exp(mu + sigma * z) * norm.pdf(z), low, high)[0] / mass
    for distribution in (fine, coarse):
        assert distribution.mix.mean_tokens == pytest.approx(mean, rel=1e-5)
        middle = distribution.thresholds[
            (len(distribution.thresholds) - 1) // 2
        ]  # not the last one, above which no prompt is
        tail = (norm.cdf(high) - norm.cdf((np.log(middle) - mu) / sigma)) / mass
        assert distribution.mix.cut(np.array([middle])).long_share[0] == pytest.approx(tail, abs=1e-6)


def test_an_unlimited_cache_hits_as_the_trace_statistics_report() -> None:
    trace = generate(400, seed=3)
    new, cached = incremental(trace, None)
    assert cached == pytest.approx(trace.statistics().reused_token_share, abs=0.01)
    assert new.min() >= 1
    whole, nothing = incremental(trace, 0)
    assert nothing == 0
    assert whole.tolist() == [request.input_tokens for request in trace.requests]
    assert cached > incremental(trace, 200_000)[1] > 0


def test_a_small_cache_evicts_the_least_recently_used() -> None:
    """There is room for two blocks of 10: after a, b, c, b is cached and a is not; a repeated prompt costs one
    token."""
    chains = [(1,), (2,), (3,), (2,), (1,), (1,)]
    trace = Trace("small", tuple(TracedRequest(float(at), 10, 1, chain, 10) for at, chain in enumerate(chains)))
    assert incremental(trace, 20)[0].tolist() == [10, 10, 10, 1, 10, 1]
    assert incremental(trace, None)[0].tolist() == [10, 10, 10, 1, 1, 1]


@given(lengths, st.floats(0.3, 2.0))
def test_spreading_lengths_keeps_mean_order_and_groups(drawn: Lengths, factor: float) -> None:
    """Differences of logarithms grow by `factor`; lengths between two thresholds stay between them."""
    spread = drawn.spread(factor)
    assert spread.mix.mean_tokens == pytest.approx(drawn.mix.mean_tokens)
    apart = np.log(spread.mix.tokens / spread.mix.tokens[0])
    assert apart == pytest.approx(factor * np.log(drawn.mix.tokens / drawn.mix.tokens[0]))
    assert (spread.thresholds[:-1] <= spread.mix.tokens).all()
    assert (spread.mix.tokens <= spread.thresholds[1:]).all()


def test_spreading_a_log_normal_mix_changes_its_sigma() -> None:
    """The shares are within a percent, because the cut edges move too."""
    one, wide = log_normal(9.0, 0.6, 1, 10**7, 100).spread(1.5), log_normal(9.0, 0.9, 1, 10**7, 100)
    for times in (0.3, 1.0, 3.0):
        cut = times * one.mix.mean_tokens
        above = float(one.mix.share[one.mix.tokens > cut].sum())
        assert above == pytest.approx(
            float(wide.mix.share[wide.mix.tokens > times * wide.mix.mean_tokens].sum()), abs=0.01
        )


def test_scaling_lengths_scales_thresholds() -> None:
    drawn: Lengths = grouped(np.array([100.0, 900.0]), np.ones(2), 100, "two")
    twice = drawn.scaled(2)
    assert (twice.mix.mean_tokens, twice.thresholds.tolist()) == (1_000, [0, 200, 1_800])
