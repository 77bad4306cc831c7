"""Offloading by worked examples: the two rules of PrfaaS 3.4.3, the threshold under a burst, reviews of the split."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from kvroute.control.offload.allocation import Allocation, SiteCapacity
from kvroute.control.offload.threshold import Threshold, scarcity_of, threshold_of
from kvroute.control.state.traffic import TrafficLengths
from kvroute.policies.fleet.offload import OffloadSpec, SiteCandidates, choose_site, longest
from kvroute.policies.fleet.role_switch import Home, LongTerm, PlannedSwitch, Stage, StageLoad, judge
from kvroute.policies.fleet.short_term import ShortTerm
from kvroute.policies.fleet.throughput import PrfaasCluster
from kvroute.types import FloatArray, InputError

SPEC = OffloadSpec()
COARSE = ShortTerm(step=1.25, dwell_s=5.0)


def sites(*cached: int, threshold: float = 20_000, scarce: bool = True) -> SiteCandidates:
    """Return a home and PrfaaS sites, all up and idle; 0.1 ms and 0.02 ms of prefill per uncached token of 60,000."""
    n = len(cached)
    tokens = np.array(cached)
    slow = np.array([1e-4, *[2e-5] * (n - 1)])
    return SiteCandidates(
        names=("home", "north", "south")[:n],
        up=np.ones(n, dtype=np.bool_),
        scarce=np.full(n, scarce),
        threshold_tokens=np.full(n, float(threshold)),
        utilisation=np.full(n, 0.8 if scarce else 0.1),
        cached_tokens=tokens,
        queue_s=np.zeros(n),
        prefill_s=slow * (60_000 - tokens),
        warm_prefill_s=slow * (60_000 - max(cached)),
        transfer_s=np.array([0.0, *[0.9] * (n - 1)]),
        copy_s=np.where(tokens < max(cached), 0.4, 0.0),
    )


def test_scarce_bandwidth_keeps_caches_separate() -> None:
    """50,000 of 60,000 tokens are cached at PrfaaS and none at home: 60,000 > 20,000 is offloaded; nothing is
    copied."""
    choice = choose_site(SPEC, 60_000, sites(0, 50_000))
    assert (choice.index, choice.reason, choice.incremental_tokens) == (1, "long", 60_000)
    assert (choice.copy_from, choice.cached_tokens) == (None, 50_000)
    home = choose_site(SPEC, 60_000, sites(40_000, 50_000))
    assert (home.index, home.reason, home.incremental_tokens, home.cached_tokens) == (0, "short", 20_000, 40_000)


def test_abundant_bandwidth_copies_the_longer_cache_to_the_prefill_site() -> None:
    """With the best cache 10,000 tokens remain: they are computed at home, and 50,000 tokens are copied to it."""
    choice = choose_site(SPEC, 60_000, sites(0, 50_000, scarce=False))
    assert (choice.index, choice.reason, choice.incremental_tokens) == (0, "short", 10_000)
    assert (choice.copy_from, choice.copied_tokens, choice.cached_tokens) == (1, 50_000, 50_000)
    assert choice.terms.parts["copy_s"].tolist() == [0.4, 0.0]
    assert choice.terms.cost == pytest.approx([0.4 + 1.0, 0.9])
    queued = choose_site(SPEC, 60_000, replace(sites(0, 50_000, scarce=False), queue_s=np.array([0.3, 0.0])))
    assert queued.terms.cost == pytest.approx([0.4 + 1.0, 0.9]), "the copy arrives while the request waits"
    away = choose_site(SPEC, 60_000, sites(30_000, 5_000, scarce=False))
    assert (away.index, away.copy_from, away.copied_tokens) == (1, 0, 25_000)
    small = choose_site(OffloadSpec(copy_min_tokens=25_001), 60_000, sites(30_000, 5_000, scarce=False))
    assert (small.index, small.copy_from, small.cached_tokens) == (1, None, 5_000)


def test_the_site_that_finishes_first_is_chosen() -> None:
    """South has a queue; then it has a cached prefix that outweighs the queue; then north is down."""
    pair = replace(sites(0, 0, 0), queue_s=np.array([0.0, 0.0, 0.5]))
    assert choose_site(SPEC, 60_000, pair).index == 1
    cached = replace(sites(0, 0, 50_000), queue_s=np.array([0.0, 0.0, 0.2]))
    assert choose_site(SPEC, 60_000, cached).index == 2
    assert choose_site(SPEC, 60_000, replace(sites(0, 0, 0), up=np.array([True, False, True]))).index == 2
    assert choose_site(SPEC, 60_000, sites(0, 0, 0)).index == 1, "the first of equals"
    high = replace(sites(0, 0, 0), threshold_tokens=np.array([0.0, 70_000.0, 50_000.0]))
    assert choose_site(SPEC, 60_000, high).index == 2, "each site has its own threshold"


def test_layerwise_hides_the_shorter_of_prefill_and_transfer() -> None:
    assert choose_site(SPEC, 60_000, sites(0, 0)).terms.cost == pytest.approx([6.0, 1.2])
    serial = choose_site(OffloadSpec(layerwise=False), 60_000, sites(0, 0))
    assert serial.terms.cost == pytest.approx([6.0, 1.2 + 0.9])


def test_an_offload_with_a_very_slow_transfer_can_be_avoided() -> None:
    """The transfer takes 40 s over a broken link against 6 s at home; the publication would use the link."""
    slow = replace(sites(0, 0), transfer_s=np.array([0.0, 40.0]))
    assert choose_site(SPEC, 60_000, slow).index == 1
    assert choose_site(OffloadSpec(stay_factor=7.0), 60_000, slow).index == 1
    stays = choose_site(OffloadSpec(stay_factor=6.0), 60_000, slow)
    assert (stays.index, stays.reason) == (0, "not_worth_it")
    queued = replace(slow, queue_s=np.array([1.0, 0.0]))
    assert choose_site(OffloadSpec(stay_factor=6.0), 60_000, queued).index == 1, "home would take 7 s"


def test_a_site_that_is_down_gets_no_requests() -> None:
    """No prefix is copied from it either."""
    dead = replace(sites(0, 50_000, scarce=False), up=np.array([True, False]))
    choice = choose_site(SPEC, 60_000, dead)
    assert (choice.index, choice.reason, choice.copy_from, choice.incremental_tokens) == (0, "away_down", None, 60_000)
    assert longest(dead.up, dead.scarce, dead.cached_tokens) == (0, 0)
    short = choose_site(SPEC, 60_000, replace(sites(59_000, 0), up=np.array([False, True])))
    assert (short.index, short.reason, short.cached_tokens) == (1, "home_down", 0)
    cold = choose_site(SPEC, 60_000, replace(sites(59_000, 0, scarce=False), up=np.array([False, True])))
    assert (cold.index, cold.copy_from, cold.incremental_tokens) == (1, None, 60_000)
    north_down = replace(sites(50_000, 0, 0), up=np.array([True, False, True]))
    next_one = choose_site(SPEC, 60_000, replace(north_down, threshold_tokens=np.array([0.0, 20_000.0, 30_000.0])))
    assert (next_one.index, next_one.decisive, next_one.threshold_tokens) == (0, 2, 30_000)
    all_down = choose_site(SPEC, 60_000, replace(dead, up=np.zeros(2, dtype=np.bool_)))
    assert (all_down.index, all_down.reason) == (0, "no_instance_up")
    alone = choose_site(SPEC, 60_000, sites(0))
    assert (alone.index, alone.reason, alone.threshold_tokens) == (0, "away_down", 0.0)


def test_a_choice_contains_its_terms() -> None:
    record = choose_site(SPEC, 60_000, sites(0, 50_000, scarce=False)).offload()
    assert (record.site, record.reason) == ("home", "short")
    assert record.terms == pytest.approx(
        {
            "incremental_tokens": 10_000.0,
            "threshold_tokens": 20_000.0,
            "scarce": 0.0,
            "copied_tokens": 50_000.0,
            "home.finish_s": 1.4,
            "home.copy_s": 0.4,
            "home.prefill_s": 1.0,
            "home.utilisation": 0.1,
            "north.finish_s": 0.9,
            "north.prefill_s": 0.2,
            "north.transfer_s": 0.9,
            "north.cached_tokens": 50_000.0,
            "north.utilisation": 0.1,
        }
    )


def test_a_burst_raises_the_threshold_and_its_end_lowers_it() -> None:
    """From 20,000 tokens, the factor is 1.25, with at most one change in 5 s; a long queue alone is enough."""
    threshold = Threshold(COARSE, 20_000)
    assert [threshold.observe(at, 0.95, 0.0) for at in (0.0, 4.9, 5.0)] == [25_000, 25_000, 31_250]
    assert threshold.observe(10.0, 0.5, 6.0) == 39_062.5
    assert threshold.observe(15.0, 0.85, 0.0) == 39_062.5, "in the band it holds"
    assert threshold.observe(16.0, 0.7, 2.0) == 39_062.5, "both must be quiet"
    assert [threshold.observe(at, 0.7, 0.0) for at in (20.0, 25.0, 30.0, 35.0)] == [31_250, 25_000, 20_000, 20_000]


def test_the_threshold_does_not_rise_while_home_has_a_queue() -> None:
    """From a home queue of 1 s on the threshold stays, from 5 s on it falls back, however long the site's own queue
    is."""
    threshold = Threshold(COARSE, 20_000)
    assert threshold.observe(0.0, 0.99, 80.0, home_queue_s=1.1) == 20_000
    assert threshold.observe(1.0, 0.99, 80.0, home_queue_s=1.0) == 25_000
    assert threshold.observe(9.0, 0.99, 80.0, home_queue_s=4.9) == 25_000
    assert threshold.observe(10.0, 0.99, 80.0, home_queue_s=5.0) == 20_000


def test_a_home_with_a_backlog_offloads_more_to_an_idle_site() -> None:
    """The threshold stays below the base while the backlog lasts, and returns when the backlog is gone or if the site
    is overloaded too."""
    threshold = Threshold(COARSE, 20_000)
    assert [threshold.observe(at, 0.1, 0.0, home_queue_s=60.0) for at in (0.0, 4.9, 5.0)] == [16_000, 16_000, 12_800]
    assert threshold.observe(10.0, 0.1, 0.0, home_queue_s=4.9) == 12_800
    assert [threshold.observe(at, 0.1, 0.0, home_queue_s=1.0) for at in (15.0, 20.0, 25.0)] == [16_000, 20_000, 20_000]
    assert threshold.observe(30.0, 0.1, 0.0, home_queue_s=5.0) == 16_000
    assert threshold.rebase(15_000) == 15_000
    assert threshold.observe(36.0, 0.1, 0.0, home_queue_s=5.0) == 12_000
    assert threshold.rebase(14_000) == 12_000
    assert threshold.observe(41.0, 0.95, 6.0, home_queue_s=9.0) == 14_000
    assert threshold.rebase(30_000) == 30_000


def test_the_threshold_falls_if_all_sites_are_overloaded() -> None:
    """Site and home are overloaded: the threshold falls below the base to 14,000 tokens and stays until the home queue
    is short."""
    threshold = Threshold(COARSE, 20_000)
    path = [threshold.observe(at, 1.0, 30.0, home_queue_s=9.0, keep_tokens=14_000) for at in (0.0, 5.0, 10.0)]
    assert path == [16_000, 14_000, 14_000]
    assert threshold.observe(15.0, 0.1, 0.0, home_queue_s=9.0, keep_tokens=14_000) == 11_200, "a quiet site takes more"
    assert threshold.observe(20.0, 1.0, 30.0, home_queue_s=9.0, keep_tokens=14_000) == 14_000
    assert threshold.observe(25.0, 1.0, 30.0, home_queue_s=1.1) == 14_000
    assert [threshold.observe(at, 1.0, 30.0, home_queue_s=1.0) for at in (30.0, 35.0, 40.0)] == [17_500, 20_000, 25_000]


def test_the_threshold_rises_at_most_to_what_home_can_serve() -> None:
    """The threshold rises to 22,000 tokens; with a lower limit it stays, and a new base takes precedence."""
    threshold = Threshold(COARSE, 20_000)
    threshold.limit(22_000)
    assert [threshold.observe(at, 1.0, 0.0) for at in (0.0, 5.0)] == [22_000, 22_000]
    threshold.limit(0.0)
    assert threshold.observe(10.0, 1.0, 0.0) == 22_000
    assert threshold.rebase(30_000) == 30_000
    assert threshold.observe(15.0, 1.0, 0.0) == 30_000
    threshold.limit(math.inf)
    assert threshold.observe(20.0, 1.0, 0.0) == 37_500


def test_a_wrong_step_down_is_halved_and_then_probed_rarely() -> None:
    """All prompts have 24,000 tokens: a threshold of 20,000 fills the link, one of 25,000 empties it."""
    threshold = Threshold(ShortTerm(step=1.25, dwell_s=1.0), 20_000)
    path = [threshold.observe(float(at), 0.99 if threshold.tokens < 24_000 else 0.0, 0.0) for at in range(800)]
    assert path[:8] == pytest.approx([25_000, 20_000, 25_000, 22_360.7, 25_000, 23_643.5, 25_000, 24_312.3], abs=0.1)
    assert set(path[8:246]) == {path[7]}, "the gap is too small to be halved again"
    probes = [at for at, (before, after) in enumerate(pairwise(path), start=1) if after < before and at > 7]
    assert probes == [246, 727], "60 s doubled by each of three mistakes, 6 s in; then by a fourth"
    assert path[246:248] == pytest.approx([23_643.5, 24_312.3], abs=0.1)


def test_a_new_base_moves_a_settled_threshold() -> None:
    threshold = Threshold(COARSE, 20_000)
    assert threshold.rebase(16_000) == 16_000
    assert threshold.observe(0.0, 1.0, 0.0) == 20_000
    assert threshold.rebase(18_000) == 20_000, "one that has risen falls by itself"
    assert threshold.rebase(30_000) == 30_000
    assert threshold.rebase(0.0) == 1_000.0, "within bounds"
    fallen = Threshold(COARSE, 20_000)
    assert [fallen.observe(at, load, 0.0) for at, load in ((0.0, 1.0), (5.0, 0.0))] == [25_000, 20_000]
    assert fallen.rebase(30_000) == 30_000
    assert fallen.observe(10.0, 1.0, 0.0) == 37_500, "a step up, not back to where it fell from"
    fixed = Threshold(ShortTerm(enabled=False), 20_000)
    assert fixed.observe(0.0, 1.0, 30.0) == 20_000


def curve(tokens: tuple[float, ...], values: tuple[float, ...]) -> Any:
    """Return a piecewise linear function through the points."""

    def between(lengths: FloatArray) -> FloatArray:
        return np.interp(lengths, tokens, values)

    return between


def case_study(n_prefill: int) -> SiteCapacity:
    """PrfaaS 4.1: four instances of 8 H200 behind 100 Gbps, eight of 8 H20; Table 5 and its derived H20 times."""
    points = (1_024.0, 8_192.0, 32_768.0, 131_072.0)
    names = [f"pd{index}" for index in range(8)]
    home = Home(
        prefill=names[:n_prefill],
        decode=names[n_prefill:],
        prefill_s=curve((0.0, 10_200.0, 27_500.0, 62_400.0, 131_072.0), (0.5, 1.829, 4.265, 9.73, 21.0)),
        batch_max=20,
        iteration_s=0.025,
    )
    kv_bytes = curve(points, tuple(mib * 2**20 for mib in (190.8, 308.9, 701.3, 2316.3)))
    prfaas = PrfaasCluster(4, curve(points, (0.44, 0.72, 1.84, 7.40)), 12.5e9)
    return SiteCapacity(kv_bytes, (prfaas,), (home,))


def long_prompts(allocation: Allocation, at: float) -> None:
    """Record 1,000 quantiles of the case study's lengths with outputs of 1,024 tokens."""
    normal = np.random.default_rng(4).normal(9.9, 1.0, 1_000)
    for length in np.clip(np.exp(normal), 128, 131_072).astype(int).tolist():
        allocation.traffic.arrived(at, length)
        allocation.traffic.answered(at, 1_024)


def test_a_review_of_the_case_study_switches_roles_step_by_step() -> None:
    """From one prefill instance, which is busy and limits the throughput, the review moves towards the best split of
    the model."""
    allocation = Allocation(LongTerm(review_s=60.0, window_s=6_000.0))
    assert allocation.review(0.0, case_study(1), {}) is None, "nothing has been seen"
    long_prompts(allocation, 0.0)
    busy: dict[Stage, StageLoad] = {"prefill": StageLoad(0.97, 8.0), "decode": StageLoad(0.6)}
    review = allocation.review(0.0, case_study(1), busy)
    assert review is not None
    assert (review.verdict, review.busy, review.binding) == ("switch_role", ("prefill",), "prfaas_compute")
    assert review.role_switches == (PlannedSwitch(instance="pd1", role="prefill"),)
    assert review.n_prefill[0] + review.n_decode[0] == 8
    assert review.gain == pytest.approx(1 - review.lambda_max_per_s / review.best_per_s)
    assert not allocation.due(59.0)
    assert allocation.review(59.0, case_study(2), busy) is None
    assert allocation.threshold_tokens(59.0, case_study(2)) != review.threshold_tokens, "it goes with the split"
    in_progress = allocation.review(60.0, case_study(1), busy, switching=1)
    assert in_progress is not None
    assert (in_progress.verdict, in_progress.role_switches) == ("switching", ())
    calm = allocation.review(120.0, case_study(1), {"prefill": StageLoad(0.3)})
    assert calm is not None
    assert (calm.verdict, calm.role_switches) == ("not_busy", ())
    best = allocation.review(
        180.0, case_study(review.n_prefill[0]), {"prefill": StageLoad(0.97), "decode": StageLoad(0.9)}
    )
    assert best is not None
    assert (best.verdict, best.gain, best.role_switches) == ("no_gain", 0.0, ())
    assert best.lambda_max_per_s == review.best_per_s
    msgspec.json.encode(review)


def test_a_nearly_optimal_threshold_is_kept() -> None:
    """A gain of 2 % in the throughput of the prefill stages is not worth a change."""
    allocation = Allocation(LongTerm())
    long_prompts(allocation, 0.0)
    best = allocation.threshold_tokens(0.0, case_study(3))
    assert best is not None
    assert allocation.threshold_tokens(0.0, case_study(3), base_tokens=best + 1.0) == best + 1.0
    assert allocation.threshold_tokens(0.0, case_study(3), base_tokens=best * 1.5) == best
    review = allocation.review(0.0, case_study(3), {}, base_tokens=best + 1.0)
    assert review is not None
    assert review.threshold_tokens == best + 1.0


def test_a_first_threshold_is_searched_before_the_first_review() -> None:
    """The threshold is searched after 20, 40 and 80 arrivals without a completed request; the first review ends
    this."""
    allocation, due = Allocation(LongTerm()), []
    for number, at in enumerate(np.arange(120) / 10, start=1):
        allocation.traffic.arrived(float(at), 10_000 + 500 * number)
        if allocation.start_due(float(at)):
            due.append(number)
            assert allocation.threshold_tokens(float(at), case_study(3)) is not None
    assert due == [20, 40, 80]
    long_prompts(allocation, 12.0)
    assert allocation.review(12.0, case_study(3), {}) is not None
    long_prompts(allocation, 13.0)
    assert not allocation.start_due(13.0)


def test_the_limit_is_the_capacity_of_the_homes() -> None:
    """At the limit, the home's instances are fully busy with recent traffic; fewer instances or more traffic lower it;
    without traffic it is infinite."""
    allocation = Allocation(LongTerm(window_s=800.0))
    assert allocation.limit_tokens(0.0, case_study(3)) == math.inf
    long_prompts(allocation, 0.0)
    limits = [allocation.limit_tokens(at, case_study(n)) for at, n in ((199.0, 3), (199.0, 1), (100.0, 3), (1.0, 3))]
    assert limits[0] > limits[1] > limits[3]
    assert limits[0] > limits[2] > limits[3]
    lengths = np.clip(np.exp(np.random.default_rng(4).normal(9.9, 1.0, 1_000)), 128, 131_072).astype(int)
    at_home = lengths[lengths <= limits[0]]
    busy = 1_000 / 199.0 * case_study(3).homes[0].prefill_s(at_home.astype(float)).sum() / 1_000 / 3
    assert busy == pytest.approx(1.0, abs=0.08)


def test_without_a_link_the_split_changes_and_the_threshold_is_kept() -> None:
    """Everything is then prefilled at home, so more prefill instances are needed."""
    allocation = Allocation(LongTerm())
    long_prompts(allocation, 0.0)
    joined, cut = case_study(3), replace(case_study(3), prfaas=())
    busy: dict[Stage, StageLoad] = {"prefill": StageLoad(1.0), "decode": StageLoad(1.0)}
    before = allocation.review(0.0, joined, busy)
    after = allocation.review(60.0, cut, busy)
    assert before is not None
    assert after is not None
    assert before.threshold_tokens is not None
    assert after.threshold_tokens is None
    assert allocation.threshold_tokens(60.0, cut) is None
    assert after.n_prefill > before.n_prefill


def test_a_role_with_a_queue_gets_a_spare_instance_of_the_other_role() -> None:
    """The model predicts no gain, but the decode instances have a queue; prefill at 0.5 * 3 / 2 is not busy."""
    allocation = Allocation(LongTerm())
    long_prompts(allocation, 0.0)
    best = allocation.review(0.0, case_study(3), {})
    assert best is not None
    split = best.n_prefill[0]
    for step, (spare, verdict) in enumerate([(0.5, "relieve"), (0.79, "no_gain")], start=1):
        measured: dict[Stage, StageLoad] = {"prefill": StageLoad(spare), "decode": StageLoad(1.0, 12.0)}
        review = allocation.review(60.0 * step, case_study(split), measured)
        assert review is not None
        assert review.verdict == verdict
        assert review.role_switches == ((PlannedSwitch(instance="pd0", role="decode"),) if verdict == "relieve" else ())


def pair() -> tuple[Home, Home]:
    """Return two homes of one kind, with three and six prefill instances and two decode instances each."""
    a, b = (
        Home(
            [f"{letter}-p{index}" for index in range(count)], [f"{letter}-d0", f"{letter}-d1"], curve((), ()), 20, 0.025
        )
        for letter, count in (("a", 3), ("b", 6))
    )
    return a, b


def test_the_home_farthest_from_its_best_split_switches_first() -> None:
    """The homes have one and four prefill instances too many. A gain below the minimum changes nothing; busy PrfaaS
    instances call for prefill."""
    busy: dict[Stage, StageLoad] = {"decode": StageLoad(0.9)}
    target = np.array([2, 2])
    verdict, role_switches = judge(LongTerm(at_once=5), pair(), target, 0.3, busy, 0)
    assert verdict == "switch_role"
    assert [role_switch.instance for role_switch in role_switches] == ["b-p0", "b-p1", "b-p2", "b-p3", "a-p0"]
    assert judge(LongTerm(gain_min=0.31), pair(), target, 0.3, busy, 0) == ("no_gain", ())
    away: dict[Stage, StageLoad] = {"prfaas": StageLoad(0.9)}
    assert judge(LongTerm(), pair(), target, 0.3, away, 0) == ("not_busy", ())
    more = judge(LongTerm(), pair(), np.array([4, 6]), 0.3, away, 0)
    assert more == ("switch_role", (PlannedSwitch(instance="a-d0", role="prefill"),))


def test_a_role_switch_must_pay_for_switching_there_and_back() -> None:
    """A third of 13 instances for 100 s is 433 s. Each of the two instances that switch costs 100 s, and a decode
    instance 120 s for switching back. Those with the lowest cost switch first."""
    busy: dict[Stage, StageLoad] = {"decode": StageLoad(0.9)}
    costs_s = dict.fromkeys(("a-p0", "a-p1", "b-p0", "b-p2", "b-p3", "b-p4", "b-p5"), 100.0) | {"b-p1": 90.0}
    back_s = dict.fromkeys(("a-d0", "a-d1", "b-d0", "b-d1"), 120.0)
    target = np.array([3, 4])
    best = ("switch_role", (PlannedSwitch(instance="b-p1", role="decode"),))
    assert judge(LongTerm(), pair(), target, 1 / 3, busy, 0, 100.0, costs_s | back_s) == best
    assert judge(LongTerm(), pair(), target, 1 / 3, busy, 0, 98.0, costs_s | back_s) == ("costly", ())
    assert judge(LongTerm(), pair(), target, 1 / 3, busy, 0, 98.0, costs_s) == best


def test_a_role_that_was_busy_in_the_window_keeps_its_instances() -> None:
    """Nine prefill instances do the work of at most 6.5: 0.81 of eight. A queue at the other role takes precedence."""
    target, prefill = np.array([3, 4]), StageLoad(0.2, 0.0, 6.5 / 9)
    busy: dict[Stage, StageLoad] = {"decode": StageLoad(0.9), "prefill": prefill}
    assert judge(LongTerm(), pair(), target, 0.3, busy, 0) == ("no_room", ())
    queue: dict[Stage, StageLoad] = {"decode": StageLoad(0.9, 6.0), "prefill": prefill}
    assert judge(LongTerm(), pair(), target, 0.3, queue, 0)[0] == "switch_role"
    assert judge(LongTerm(spare_below=0.82), pair(), target, 0.3, busy, 0)[0] == "switch_role"
    less: dict[Stage, StageLoad] = busy | {"prefill": StageLoad(0.2, 0.0, 6 / 9)}
    assert len(judge(LongTerm(at_once=2), pair(), target - 1, 0.3, less, 0)[1]) == 1, "0.75 of eight, 0.86 of seven"


def test_decode_load_is_estimated_from_arrivals() -> None:
    """Prefill is overloaded, so decode gets few requests. Six decode instances complete 4.7 requests a second and would
    be 80 % busy with the four that arrive; at two a second they would not."""
    for rate_per_s, verdict in ((2.0, "switch_role"), (4.0, "no_room")):
        allocation = Allocation(LongTerm(window_s=80.0))
        for index in range(int(100 * rate_per_s)):
            allocation.traffic.arrived(index / rate_per_s, (2_000, 20_000, 60_000)[index % 3])
            allocation.traffic.answered(index / rate_per_s, 1_024)
        busy: dict[Stage, StageLoad] = {"prefill": StageLoad(0.97, 1.0), "decode": StageLoad(0.3)}
        review = allocation.review(100.0, case_study(1), busy)
        assert review is not None
        assert review.gain > 0.1
        assert review.verdict == verdict


def test_a_queue_is_relieved_by_an_instance_that_its_home_can_spare() -> None:
    """Decode has a queue: home b can spare one instance, and none if six must stay; the longer queue is relieved."""
    queues: dict[Stage, StageLoad] = {"prefill": StageLoad(0.1, 1.0), "decode": StageLoad(1.0, 9.0)}
    relieved = ("relieve", (PlannedSwitch(instance="b-p0", role="decode"),))
    assert judge(LongTerm(), pair(), np.array([3, 6]), 0.0, queues, 0) == relieved
    assert judge(LongTerm(prefill_min=5), pair(), np.array([3, 6]), 0.0, queues, 0) == relieved
    assert judge(LongTerm(prefill_min=6), pair(), np.array([3, 6]), 0.0, queues, 0) == ("no_gain", ())
    costs_s = {f"b-p{index}": 80.0 for index in range(6)}
    assert judge(LongTerm(), pair(), np.array([3, 6]), 0.0, queues, 0, 101.0, costs_s) == relieved, "4/5 of 101 s"
    assert judge(LongTerm(), pair(), np.array([3, 6]), 0.0, queues, 0, 99.0, costs_s) == ("no_gain", ())


def test_traffic_measures_the_arrival_rate() -> None:
    """Ten requests a second for four seconds: the rate is measured since the first event, then over the window of eight
    seconds."""
    traffic = TrafficLengths(8.0)
    assert traffic.rate_per_s(0.0) == 0.0
    assert traffic.output_tokens(0.0) is None
    for index in range(40):
        traffic.arrived(100.0 + index / 10, 500)
    assert traffic.rate_per_s(104.0) == pytest.approx(10.0)
    assert traffic.rate_per_s(106.0) == pytest.approx(40 / 6)
    assert traffic.requests(112.0) == 0
    for index in range(400):
        traffic.arrived(200.0 + index / 10, 500)
    assert traffic.rate_per_s(240.0) == pytest.approx(10.0), "what came before the window counts no more"


def test_recent_traffic_and_its_median() -> None:
    """The window has parts of a second: one request a second for a long time, then ten; half of them have at most 100
    tokens."""
    traffic = TrafficLengths(8.0)
    assert (traffic.recent_per_s(0.0), traffic.median_tokens(0.0)) == (0.0, math.inf)
    for at in range(8):
        traffic.arrived(float(at), 100)
    assert traffic.recent_per_s(7.5) == pytest.approx(2 / 1.5)
    for index in range(20):
        traffic.arrived(8.0 + index / 10, 100 if index % 2 else 9_000)
    assert traffic.recent_per_s(10.0) == pytest.approx(10.0)
    assert 100 <= traffic.median_tokens(10.0) < 105
    assert traffic.median_tokens(100.0) == math.inf


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rule": "rare"}, "unknown rule 'rare'; known: auto, scarce, abundant"),
        ({"scarce_above": 0.5}, "leave no gap"),
        ({"scarce_above": 1.5}, "leave no gap"),
        ({"abundant_below": -0.1}, "leave no gap"),
        ({"stay_factor": 0.0}, "offload.stay_factor"),
        ({"stay_factor": math.nan}, "offload.stay_factor"),
        ({"copy_min_tokens": 0}, "give 1 or more"),
        ({"threshold_tokens": 10.0}, r"outside \[1000, 1e\+06\]"),
        ({"threshold_tokens": math.nan}, "offload.threshold_tokens"),
    ],
)
def test_invalid_specs_are_rejected_with_a_hint(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        OffloadSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"utilisation_low": 0.95}, "offload.short_term.utilisation: low 0.95 and high 0.95"),
        ({"utilisation_high": 1.1}, "0 <= low < high <= 1"),
        ({"queue_low_s": 6.0}, "low_s 6.0 and high_s 5.0"),
        ({"queue_high_s": math.inf}, "offload.short_term.queue"),
        ({"step": 1.0}, "not a factor above 1"),
        ({"dwell_s": -1.0}, "offload.short_term.dwell_s"),
        ({"remember_s": math.nan}, "offload.short_term.remember_s"),
        ({"threshold_min_tokens": 0.0}, "not a valid range"),
        ({"threshold_max_tokens": 10.0}, "not a valid range"),
    ],
)
def test_invalid_short_term_settings_are_rejected_with_a_hint(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        ShortTerm(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"review_s": 0.0}, "review_s"),
        ({"window_s": math.inf}, "window_s"),
        ({"requests_min": 0}, "requests_min"),
        ({"start_requests": 0}, "start_requests"),
        ({"gain_min": 0.0}, "gain_min"),
        ({"at_once": 0}, "at_once"),
        ({"prefill_min": -1}, "prefill_min"),
        ({"busy_above": 1.0}, "busy_above"),
        ({"spare_below": 0.0}, "spare_below"),
        ({"threshold_gain_min": math.nan}, "threshold_gain_min"),
        ({"reading": "mean"}, "reading"),
        ({"queue_high_s": -1.0}, "queue_high_s"),
    ],
)
def test_invalid_long_term_settings_are_rejected_with_a_hint(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"offload.long_term.{name}: .*; give "):
        LongTerm(**fields)


def test_a_spec_round_trips_through_json() -> None:
    text = b'{"threshold_tokens":19000,"rule":"scarce","short_term":{"step":1.5},"long_term":{"role_switches":false}}'
    spec = msgspec.json.decode(text, type=OffloadSpec)
    assert (threshold_of(spec).tokens, scarcity_of(spec).scarce) == (19_000, True)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=OffloadSpec) == spec
    assert threshold_of(OffloadSpec()).tokens == 1_000_000, "nothing leaves before a search"
