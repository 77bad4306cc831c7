"""Comparisons over seeds: the interval is Student's, and the sentence claims no more than the numbers show."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.report.compare import difference, verdict
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts


def run(policy: str, seed: int, ttft_s: float | None) -> Summary:
    """Return a run in which only the mean TTFT matters."""
    return Summary(
        policy=policy,
        seed=seed,
        requests=RequestCounts(arrived=1, finished=1, rejected=0, in_flight=0),
        measured=1,
        ttft_s=Spread(mean=ttft_s),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(),
        tbt_s=Spread(),
        tpot_s=Spread(),
        slo_attainment=None,
        goodput_per_s=None,
        throughput_per_s=None,
        tier_share={},
        cache_hit=None,
        prefill_cache_hit=None,
        kv_bytes=0.0,
        link_load={},
        busiest_links=(),
        wall_s=0.0,
        cpu_s=0.0,
    )


def runs(**ttft_s: Sequence[float | None]) -> list[Summary]:
    """Return runs by policy: the mean TTFT of seeds 0, 1, ..."""
    return [run(policy, seed, value) for policy, values in ttft_s.items() for seed, value in enumerate(values)]


seconds = st.floats(0.1, 10.0)


@given(
    st.lists(st.tuples(seconds, seconds), min_size=2, max_size=8).filter(lambda pairs: len(set(pairs)) == len(pairs))
)
def test_the_interval_is_that_of_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    """The interval equals SciPy's for any order of the runs; a difference is noise if SciPy cannot distinguish it from
    zero at 5 %."""
    from scipy.stats import ttest_rel

    first, second = zip(*pairs, strict=True)
    test = ttest_rel(first, second)
    interval = test.confidence_interval(0.95)
    result = difference(runs(a=first, b=second)[::-1], "a", "b")
    assert result is not None
    assert result.half_width is not None
    assert result.mean == pytest.approx((interval.low + interval.high) / 2, abs=1e-9)
    assert result.half_width == pytest.approx((interval.high - interval.low) / 2, abs=1e-9)
    assert result.relative == pytest.approx(result.mean / (sum(second) / len(second)))
    if abs(test.pvalue - 0.05) > 1e-6:
        assert result.is_noise == (test.pvalue > 0.05)


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(seconds, min_size=1, max_size=4), min_size=1))
def test_the_winner_has_the_lowest_mean_and_leads_are_sorted(ttft_s: dict[str, list[float]]) -> None:
    """A tie is won by the first name; every other policy has a difference to the winner."""
    means = {policy: sum(values) / len(values) for policy, values in ttft_s.items()}
    result = verdict(runs(**ttft_s))
    assert result.winner is not None
    assert means[result.winner] == pytest.approx(min(means.values()))
    assert {lead.second for lead in result.leads} == means.keys() - {result.winner}
    rivals = [means[lead.second] for lead in result.leads]
    assert rivals == pytest.approx(sorted(rivals))
    assert verdict(runs(**dict(reversed(ttft_s.items())))) == result


def test_only_common_seeds_are_paired() -> None:
    """Seed 1 of b gave no first token: two pairs remain."""
    result = difference(runs(a=[1.0, 1.0, 1.5], b=[2.0, None, 3.5]), "a", "b")
    assert result is not None
    assert (result.seeds, result.mean) == (2, -1.5)
    assert difference(runs(a=[1.0], b=[None]), "a", "b") is None
    assert difference(runs(a=[1.0]), "a", "b") is None


def test_a_clear_win_is_reported_with_its_interval() -> None:
    """Differences of 0.9, 1.0 and 1.1 s: 1,000 ± 4.303 * 100 / sqrt(3) ms, half of the rival's mean."""
    result = verdict(runs(netkv=[1.1, 1.0, 0.9], cla=[2.0, 2.0, 2.0]))
    assert result.winner == "netkv"
    assert not result.leads[0].is_noise
    assert result.sentence == (
        "netkv has the lowest mean TTFT, 1,000 ms, 1,000.0 ± 248.4 ms (50.0%) below cla (95 % interval over 3 seeds)."
    )


def test_a_lead_within_the_interval_is_called_noise() -> None:
    """The policy is faster on one seed and slower on another."""
    result = verdict(runs(netkv=[1.0, 2.0, 1.4], cla=[1.5, 1.6, 1.5]))
    assert result.leads[0].is_noise
    assert "the difference is noise (95 % interval over 3 seeds includes zero)" in result.sentence


def test_equal_results_are_called_equal() -> None:
    """There may be one seed or several; a third policy is compared with both."""
    result = verdict(runs(netkv=[1.0, 2.0], cla=[1.0, 2.0]))
    assert result.winner == "cla"
    assert result.sentence == "cla and netkv have the same mean TTFT, 1,500 ms on 2 seeds."
    alone = verdict(runs(netkv=[1.0], cla=[1.0], foresight=[1.0]))
    assert alone.sentence == "cla, foresight and netkv have the same mean TTFT, 1,000 ms."
    third = verdict(runs(netkv=[1.0], cla=[1.0], foresight=[1.5]))
    assert third.sentence == (
        "cla and netkv have the same mean TTFT, 1,000 ms, 500.0 ms below foresight; "
        "one seed cannot show whether this is noise; use --seeds 5."
    )


def test_zero_has_no_sign() -> None:
    """The policy is faster on one seed and slower by as much on the other: the difference is zero, but the results are
    not equal."""
    result = verdict(runs(netkv=[1.0, 2.0], cla=[2.0, 1.0]))
    assert "0.0 ±" in result.sentence
    assert "-0" not in result.sentence


def test_one_seed_gives_no_interval() -> None:
    """There is a difference without an interval, and advice to use more seeds."""
    result = verdict(runs(netkv=[1.0], cla=[1.5]))
    assert result.leads[0].half_width is None
    assert result.leads[0].is_noise
    assert "500.0 ms below cla; one seed cannot show whether this is noise; use --seeds 5" in result.sentence


def test_no_winner_without_responses_or_for_a_single_policy() -> None:
    """Without a first token there is no comparison; a rival without one is mentioned."""
    assert verdict([]).winner is None
    without_tokens = verdict(runs(netkv=[None], cla=[None]))
    assert (without_tokens.winner, without_tokens.leads) == (None, ())
    assert "no comparison is possible" in without_tokens.sentence
    assert "no other policy was run" in verdict(runs(netkv=[1.0])).sentence
    one_policy = verdict(runs(netkv=[1.0], cla=[None]))
    assert one_policy.winner == "netkv"
    assert "no other policy produced a first token" in one_policy.sentence


def test_rejections_are_reported() -> None:
    """If requests were rejected, the winner comes with the shares of all policies and the first reason."""
    rejecting = msgspec.structs.replace(
        run("a", 0, 1.0),
        requests=RequestCounts(arrived=4, finished=1, rejected=3, in_flight=0),
        reject_reason="it is full",
    )
    (remark,) = verdict([rejecting, run("b", 0, 2.0)]).remarks
    assert "a 75.0%, b 0.0%" in remark
    assert "it is full" in remark
    assert verdict([run("a", 0, 1.0), run("b", 0, 2.0)]).remarks == ()


@pytest.mark.parametrize(("wait_s", "reported"), [(0.9, True), (0.4, False)])
def test_a_dominant_prefill_wait_is_reported(wait_s: float, reported: bool) -> None:
    """If it is nine tenths of the TTFT of every policy, decode routing is not the relevant cause."""
    both = [
        msgspec.structs.replace(run(policy, 0, 1.0), ttft_parts_s=TtftParts(prefill_wait=wait_s)) for policy in "ab"
    ]
    assert any("wait for prefill" in remark for remark in verdict(both).remarks) == reported
