"""Laws of offloading: the published rule, thresholds that settle, exact counts, role switches that end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control.offload.allocation import Allocation, Review, SiteCapacity
from kvroute.control.offload.threshold import Scarcity, Threshold
from kvroute.control.state.traffic import Tally, TrafficLengths
from kvroute.policies.fleet.offload import HOME, OffloadSpec, SiteCandidates, choose_site, longest
from kvroute.policies.fleet.role_switch import STAGES, Home, LongTerm, Stage, StageLoad, judge
from kvroute.policies.fleet.short_term import ShortTerm
from kvroute.policies.fleet.throughput import (
    Mix,
    PdCluster,
    PrfaasCluster,
    Reading,
    System,
    decode_per_s,
    splits,
    stage_rates,
)
from kvroute.types import FloatArray

shares = st.floats(0, 1.2)
queues_s = st.floats(0, 30)


@st.composite
def situations(draw: st.DrawFn, most: int = 4) -> tuple[int, SiteCandidates]:
    """Draw a prompt and 1 to `most` sites; lengths have few levels, so that ties and equalities are common."""
    n = draw(st.integers(1, most))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    total = draw(st.sampled_from([1, 1_000, 60_000]))
    cached = np.minimum(random.choice([0, 1, 500, 30_000, 59_999], n), total)
    transfer_s = random.choice([0.0, 0.5, 20.0], n)
    transfer_s[HOME] = 0.0
    prefill_s = random.choice([0.0, 1.0, 2.0], n)
    return total, SiteCandidates(
        names=("home", *(f"prfaas{index}" for index in range(1, n))),
        up=random.random(n) < 0.8,
        scarce=random.random(n) < 0.5,
        threshold_tokens=random.choice([1.0, 500.0, 30_000.0, 1e6], n),
        utilisation=random.random(n),
        cached_tokens=cached,
        queue_s=random.choice([0.0, 1.0, 7.0], n),
        prefill_s=prefill_s,
        warm_prefill_s=prefill_s / 2,
        transfer_s=transfer_s,
        copy_s=random.choice([0.0, 0.5, 3.0], n),
    )


@given(situations(2))
def test_a_single_link_follows_prfaas(situation: tuple[int, SiteCandidates]) -> None:
    """For one home and one PrfaaS site that is up, the choice equals PrfaaS 3.4.3."""
    total, sites = situation
    if len(sites.names) == 1:
        return
    sites = replace(sites, up=np.ones(2, dtype=np.bool_))
    l_pd, l_prfaas = sites.cached_tokens.tolist()
    scarce, threshold = bool(sites.scarce[1]), float(sites.threshold_tokens[1])
    l_prefix = l_pd if scarce else max(l_prfaas, l_pd)
    choice = choose_site(OffloadSpec(), total, sites)
    assert choice.index == (0 if total - l_prefix <= threshold else 1)
    own, other = (l_pd, l_prfaas) if choice.index == 0 else (l_prfaas, l_pd)
    if not scarce and other > own:
        assert (choice.copy_from, choice.copied_tokens) == (1 - choice.index, other - own)
        assert choice.cached_tokens == other
    else:
        assert (choice.copy_from, choice.copied_tokens, choice.cached_tokens) == (None, 0, own)
    assert (choice.decisive, choice.scarce, choice.threshold_tokens) == (1, scarce, threshold)


@given(situations(), st.none() | st.floats(0.1, 10), st.booleans())
def test_only_sites_that_are_up_get_work_and_terms_add_up(
    situation: tuple[int, SiteCandidates], stay_factor: float | None, layerwise: bool
) -> None:
    """Only sites that are up get work, if there is any. A finish time is at least its longest part and at most their
    sum. Of the sites above their threshold, the first one with the earliest finish is chosen."""
    total, sites = situation
    choice = choose_site(OffloadSpec(stay_factor=stay_factor, layerwise=layerwise), total, sites)
    assert sites.up[choice.index] or not sites.up.any()
    parts = np.array([choice.terms.parts[name] for name in ("queue_s", "copy_s", "prefill_s", "transfer_s")])
    assert (choice.terms.cost >= parts.max(axis=0)).all()
    assert (choice.terms.cost <= parts.sum(axis=0)).all()
    assert choice.copied_tokens >= 0
    assert choice.cached_tokens <= total
    if choice.copy_from is not None:
        assert choice.copy_from != choice.index
        assert sites.cached_tokens[choice.copy_from] == choice.cached_tokens
        assert not sites.scarce[[index for index in (choice.copy_from, choice.index) if index != HOME]].any()
    if choice.reason == "long":
        away = [i for i in range(1, len(sites.names)) if sites.up[i]]
        rivals = [i for i in away if choice.incremental_tokens > sites.threshold_tokens[i]]
        if stay_factor is not None:
            limit_s = stay_factor * float(choice.terms.cost[HOME])
            rivals = [i for i in rivals if sites.transfer_s[i] <= limit_s]
        assert choice.index == min(rivals, key=lambda i: (choice.terms.cost[i], i))
    record = choice.offload()
    assert record.site == sites.names[choice.index]
    assert all(math.isfinite(value) for value in record.terms.values())
    if choice.copy_from is not None:
        assert sites.up[choice.copy_from], "no site that is down is a source of copies"


@given(situations())
def test_a_dead_link_keeps_everything_at_home(situation: tuple[int, SiteCandidates]) -> None:
    total, sites = situation
    up = np.zeros(len(sites.names), dtype=np.bool_)
    up[HOME] = True
    choice = choose_site(OffloadSpec(), total, replace(sites, up=up))
    assert (choice.index, choice.copy_from, choice.reason) == (HOME, None, "away_down")
    assert longest(up, sites.scarce, sites.cached_tokens) == (HOME, sites.cached_tokens[HOME])


@given(situations(), st.integers(1, 100_000))
def test_offloading_is_monotonic_in_prompt_length(situation: tuple[int, SiteCandidates], more: int) -> None:
    """With all else equal, a prompt that is offloaded at some length is offloaded at every greater length."""
    total, sites = situation
    before, after = (choose_site(OffloadSpec(), length, sites) for length in (total, total + more))
    assert before.index == HOME or after.index != HOME


@st.composite
def short_terms(draw: st.DrawFn) -> ShortTerm:
    """Draw settings with a dwell time of one second, so that the time counts changes."""
    utilisation_low = draw(st.floats(0.1, 0.8))
    queue_low_s = draw(st.floats(0, 5))
    return ShortTerm(
        utilisation_low=utilisation_low,
        utilisation_high=draw(st.floats(utilisation_low + 0.01, 1.0)),
        queue_low_s=queue_low_s,
        queue_high_s=queue_low_s + draw(st.floats(0.1, 10)),
        step=draw(st.floats(1.1, 3.0)),
        dwell_s=1.0,
        remember_s=draw(st.sampled_from([0.0, 5.0, 20.0])),
        threshold_min_tokens=1_000.0,
        threshold_max_tokens=200_000.0,
    )


measurements = st.lists(st.tuples(shares, queues_s, queues_s), max_size=30)
bases = st.floats(0, 300_000)


def after(spec: ShortTerm, base: float, history: list[tuple[float, float, float]]) -> tuple[Threshold, float]:
    """Return a threshold with a history, and the time of its end."""
    threshold = Threshold(spec, base)
    for at, measured in enumerate(history):
        threshold.observe(float(at), *measured)
    return threshold, float(len(history))


def most_moves(spec: ShortTerm) -> int:
    """Return a limit for the number of changes: twice from bound to bound, and those until all errors are forgotten."""
    span = math.log(spec.threshold_max_tokens / spec.threshold_min_tokens) / math.log(spec.step)
    return 2 * math.ceil(span) + math.ceil(16 * spec.remember_s) + 2


def rest(
    threshold: Threshold, spec: ShortTerm, measured: tuple[float, float, float], keep_tokens: float, limit: float
) -> float:
    """Return the final threshold under a constant input, by the documented rules."""
    utilisation, queue_s, home_queue_s = measured
    base, now = threshold.base_tokens, threshold.tokens
    surges = utilisation >= spec.utilisation_high or queue_s >= spec.queue_high_s
    quiet = utilisation <= spec.utilisation_low and queue_s <= spec.queue_low_s
    highest = max(now, base, min(max(limit, base), spec.threshold_max_tokens))
    if home_queue_s >= spec.queue_high_s:
        kept = max(min(base, keep_tokens), spec.threshold_min_tokens)
        return spec.threshold_min_tokens if quiet else kept if surges else min(now, kept)
    if home_queue_s <= spec.queue_low_s:
        return highest if surges else base if quiet else max(now, base)
    return min(now, base) if quiet else now


levels = st.sampled_from(["low", "band", "high"])


@given(short_terms(), bases, measurements, levels, levels, levels, bases | st.just(math.inf), bases | st.just(math.inf))
def test_the_threshold_settles_under_constant_input(
    spec: ShortTerm,
    base: float,
    history: list[tuple[float, float, float]],
    utilisation: str,
    queue_s: str,
    home_queue_s: str,
    keep_tokens: float,
    limit: float,
) -> None:
    """After any history the threshold moves in one direction only and then stays; within the band it does not change at
    all."""
    threshold, start = after(spec, base, history)
    threshold.limit(limit)
    at_utilisation = {"low": spec.utilisation_low, "high": spec.utilisation_high}
    at_queue = {"low": spec.queue_low_s, "high": spec.queue_high_s}
    middle_s = (spec.queue_low_s + spec.queue_high_s) / 2
    measured = (
        at_utilisation.get(utilisation, (spec.utilisation_low + spec.utilisation_high) / 2),
        at_queue.get(queue_s, middle_s),
        at_queue.get(home_queue_s, middle_s),
    )
    expected, moves = rest(threshold, spec, measured, keep_tokens, limit), 2 * most_moves(spec)
    path = [threshold.tokens]
    path += [threshold.observe(start + at, *measured, keep_tokens) for at in range(2 * moves)]
    assert path in (sorted(path), sorted(path, reverse=True))
    assert set(path[moves:]) == {expected}


@given(short_terms(), bases, measurements, bases, st.integers(0, 30))
def test_the_threshold_stays_within_bounds_and_respects_the_dwell_time(
    spec: ShortTerm, base: float, history: list[tuple[float, float, float]], other: float, when: int
) -> None:
    """With measurements half a dwell time apart, two in a row never both change it; it depends only on its inputs."""
    first, second = Threshold(spec, base), Threshold(spec, base)
    path = [first.tokens]
    for step, measured in enumerate(history):
        if step == when:
            for threshold in (first, second):
                threshold.rebase(other)
            assert first.base_tokens == min(max(other, spec.threshold_min_tokens), spec.threshold_max_tokens)
            path = [first.tokens]
        path.append(first.observe(step / 2, *measured))
        for tokens in (first.base_tokens, first.tokens):
            assert spec.threshold_min_tokens <= tokens <= spec.threshold_max_tokens
        if all(home_queue_s < spec.queue_high_s for _, _, home_queue_s in history):
            assert first.base_tokens <= first.tokens
        assert second.observe(step / 2 + 4_096, *measured) == first.tokens, "only differences of times count"
        assert len(set(path[-3:])) < 3


@given(short_terms(), bases, measurements, measurements)
def test_a_recovered_link_starts_from_its_base_threshold(
    spec: ShortTerm,
    base: float,
    history: list[tuple[float, float, float]],
    then: list[tuple[float, float, float]],
) -> None:
    """Measurements of a dead link have no effect, and earlier history does not count once the link is back."""
    threshold, start = after(spec, base, history)
    before = threshold.tokens
    threshold.set_up(False)
    assert threshold.observe(start + 100.0, 1.0, 30.0) == before
    threshold.set_up(True)
    fresh = Threshold(spec, base)
    assert threshold.tokens == fresh.tokens
    for at, measured in enumerate(then):
        assert threshold.observe(start + 101.0 + at, *measured) == fresh.observe(float(at), *measured)


def live(spec: ShortTerm, base: float, load: Callable[[float], float], moves: int) -> list[float]:
    """Return the thresholds over time for a link whose utilisation follows the threshold at once."""
    threshold = Threshold(spec, base)
    return [threshold.observe(float(at), load(threshold.tokens), 0.0) for at in range(moves)]


@given(st.floats(0.1, 0.6), st.floats(1.05, 1.5), st.floats(0.2, 1.0), st.floats(0.05, 20), st.floats(1e3, 1e5))
def test_the_threshold_settles_if_traffic_responds_smoothly(
    low: float, gap: float, softness: float, load: float, base: float
) -> None:
    """Closed loop: if one step changes the utilisation by less than the width of the band, the threshold stops."""
    high = low * gap
    step = gap**softness
    spec = ShortTerm(utilisation_low=low, utilisation_high=high, step=step, dwell_s=1.0)
    moves = 2 * math.ceil(math.log(1e6 / 1e3) / math.log(step)) + 2
    path = live(spec, base, lambda tokens: min(load * (base / tokens) ** 0.99, 1.2), 2 * moves)
    assert len(set(path[moves:])) == 1


@given(st.floats(1.1, 3.0), st.floats(1e3, 1e5), st.floats(1.01, 50))
def test_the_threshold_is_probed_less_and_less_often_if_traffic_responds_in_steps(
    step: float, base: float, height: float
) -> None:
    """Closed loop: all prompts have one length, so that no threshold gives a utilisation within the band. Without a
    memory the threshold would change at every measurement, and the link would be congested half of the time."""
    cliff = base * height
    spec = ShortTerm(step=step, dwell_s=1.0, remember_s=10.0, threshold_max_tokens=1e8)
    path = live(spec, base, lambda tokens: 0.99 if tokens < cliff else 0.1, 2_000)
    late = path[1_000:]
    moves = sum(before != after for before, after in pairwise(late))
    assert moves <= 20
    assert sum(tokens < cliff for tokens in late) <= 10


@given(st.floats(0.1, 0.9), st.floats(0.01, 0.09), st.lists(shares, min_size=1), shares)
def test_scarcity_changes_only_outside_the_band(low: float, gap: float, history: list[float], last: float) -> None:
    scarcity = Scarcity("auto", low + gap, low)
    assert scarcity.scarce
    for utilisation in history:
        before = scarcity.scarce
        after = scarcity.observe(utilisation)
        assert after == (before if low < utilisation <= low + gap else utilisation > low)
    settled = scarcity.observe(last)
    assert {scarcity.observe(last) for _ in range(5)} == {settled}
    assert {Scarcity("scarce", 0.7, 0.5).observe(observed) for observed in history} == {True}
    assert {Scarcity("abundant", 0.7, 0.5).observe(observed) for observed in history} == {False}


events = st.lists(
    st.tuples(st.floats(0, 5), st.integers(0, 9) | st.integers(0, 2**21), st.integers(1, 4096)), min_size=1, max_size=60
)


@given(events)
def test_traffic_statistics_equal_those_of_a_list(steps: list[tuple[float, int, int]]) -> None:
    """The window of 16 s has slots of 2 s: whole slots are dropped; the shares at every threshold are exact."""
    traffic, at = TrafficLengths(16.0), 0.0
    seen: list[tuple[float, int, int]] = []
    for wait_s, tokens, output in steps:
        at += wait_s
        traffic.arrived(at, tokens)
        traffic.answered(at, output)
        seen.append((at, tokens, output))
    kept = [observed for observed in seen if math.floor(observed[0] / 2) > math.floor(at / 2) - 8]
    assert traffic.requests(at) == len(kept)
    lengths = np.array([max(tokens, 1) for _, tokens, _ in kept], dtype=np.float64)
    answered = traffic.output_tokens(at)
    assert answered is not None
    assert math.isclose(answered, sum(output for _, _, output in kept) / len(kept))
    estimate = traffic.mix(at)
    assert estimate is not None
    mix, thresholds = estimate
    assert math.isclose(mix.mean_tokens, lengths.mean(), rel_tol=1e-9, abs_tol=1e-9)
    for threshold, share in zip(thresholds, mix.cut(thresholds).long_share, strict=True):
        assert math.isclose(share, (lengths > threshold).mean(), abs_tol=1e-9)
    assert traffic.requests(at + 18.0) == 0
    assert traffic.mix(at + 18.0) is None


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2), st.floats(0, 1e3)), min_size=1, max_size=60))
def test_a_tally_equals_the_sum_of_a_list(steps: list[tuple[float, int, float]]) -> None:
    """The window of 16 s has parts of 2 s: sums over all, over the last two, and over each completed part."""
    tally, at = Tally(16.0, 3), 0.0
    seen: list[tuple[int, int, float]] = []
    for wait_s, column, amount in steps:
        at += wait_s
        tally.add_one(at, column, amount)
        tally.add(at, np.array([0.0, 1.0, 0.0]))
        seen += [(math.floor(at / 2), column, amount), (math.floor(at / 2), 1, 1.0)]
    now = math.floor(at / 2)

    def total(first: int, last: int) -> list[float]:
        return [sum(a for part, c, a in seen if c == column and first <= part <= last) for column in range(3)]

    assert np.allclose(tally.window(at), total(now - 7, now))
    assert np.allclose(tally.recent(at), total(now - 1, now))
    assert np.allclose(tally.parts(at), [total(part, part) for part in range(now - 7, now)])
    assert not tally.window(at + 18.0).any()


@given(events)
def test_the_busiest_part_of_the_window_is_found(steps: list[tuple[float, int, int]]) -> None:
    """The arrivals of each completed part of 2 s, and of the last one with the present one; the longest output."""
    traffic, at = TrafficLengths(16.0), 0.0
    seen: list[tuple[float, int]] = []
    for wait_s, tokens, output in steps:
        at += wait_s
        traffic.arrived(at, tokens)
        traffic.answered(at, output)
        seen.append((math.floor(at / 2), output))
    now, kept = math.floor(at / 2), [observed for observed in seen if observed[0] > math.floor(at / 2) - 8]
    over = max(sum(part == earlier for part, _ in kept) / 2.0 for earlier in range(now - 7, now))
    assert math.isclose(traffic.peak_per_s(at), max(over, traffic.recent_per_s(at)))
    assert traffic.longest_tokens(at) == max(output for _, output in kept)
    assert traffic.longest_tokens(at + 18.0) == 0.0


def convex_curve(per_token_s: float) -> Callable[[FloatArray], FloatArray]:
    """Return a prefill time that grows faster than linearly, so that the mean cost differs from the cost of the
    mean."""
    return lambda tokens: 0.1 + per_token_s * tokens * (1.0 + tokens / 50_000)


def linear(base_s: float, per_token_s: float) -> Callable[[FloatArray], FloatArray]:
    return lambda tokens: base_s + per_token_s * tokens


@st.composite
def capacities(draw: st.DrawFn) -> SiteCapacity:
    """Draw one or two homes and up to two PrfaaS sites."""
    homes = []
    for letter in draw(st.sampled_from(["a", "ab"])):
        total = draw(st.integers(2, 9))
        prefill = draw(st.integers(1, total - 1))
        homes.append(
            Home(
                prefill=[f"{letter}{index}" for index in range(prefill)],
                decode=[f"{letter}{index}" for index in range(prefill, total)],
                prefill_s=convex_curve(draw(st.floats(1e-5, 3e-4))),
                batch_max=draw(st.integers(1, 64)),
                iteration_s=0.025,
            )
        )
    prfaas = tuple(
        PrfaasCluster(draw(st.integers(1, 8)), linear(0.1, 2e-5), draw(st.floats(1e7, 1e10)))
        for _ in range(draw(st.integers(0, 2)))
    )
    return SiteCapacity(linear(2e8, 2e4), prfaas, tuple(homes))


lengths = st.lists(st.sampled_from([100, 2_000, 9_000, 30_000, 120_000]), min_size=1, max_size=12)
ALL_QUEUED: dict[Stage, StageLoad] = {stage: StageLoad(0.0, 60.0) for stage in STAGES}
"""Every role has a queue, and none is so busy that it could not give an instance away."""


def observed(spec: LongTerm, tokens: list[int]) -> Allocation:
    """Return an allocation that has recorded these requests at time 0."""
    allocation = Allocation(spec)
    for length in tokens:
        allocation.traffic.arrived(0.0, length)
        allocation.traffic.answered(0.0, 200)
    return allocation


def applied(capacity: SiteCapacity, review: Review) -> SiteCapacity:
    """Return the capacity after the role switches are complete."""
    moved = {switch.instance for switch in review.role_switches}
    homes = []
    for home in capacity.homes:
        leaving, joining = moved & set(home.prefill), moved & set(home.decode)
        prefill = [name for name in home.prefill if name not in leaving] + sorted(joining)
        decode = [name for name in home.decode if name not in joining] + sorted(leaving)
        homes.append(replace(home, prefill=prefill, decode=decode))
    return replace(capacity, homes=tuple(homes))


@given(capacities(), lengths, st.integers(1, 3), st.floats(0.001, 0.5))
def test_role_switches_end_near_the_best_split(
    capacity: SiteCapacity, tokens: list[int], at_once: int, gain_min: float
) -> None:
    """Traffic is constant, every role has a queue and there is nothing to lose: each review proposes at most `at_once`
    existing instances in the given order. Soon there is none and never again; the gain that remains is less than
    `gain_min`."""
    spec = LongTerm(requests_min=1, review_s=1.0, window_s=1e4, at_once=at_once, gain_min=gain_min)
    allocation = observed(spec, tokens)
    idle, quiet, missed = False, 0, 1.0
    for step in range(30):
        review = allocation.review(float(step), capacity, ALL_QUEUED)
        assert review is not None
        assert len(review.role_switches) <= at_once
        for role in ("prefill", "decode"):
            names = [role_switch.instance for role_switch in review.role_switches if role_switch.role == role]
            pools = [home.decode if role == "prefill" else home.prefill for home in capacity.homes]
            assert all(set(names) & set(pool) == set(pool[: len(set(names) & set(pool))]) for pool in pools)
        assert 0.0 <= review.gain <= 1.0
        assert not (idle and review.role_switches)
        idle = not review.role_switches
        capacity = applied(capacity, review)
        assert all(home.prefill and home.decode for home in capacity.homes)
        missed = review.gain
        quiet += idle
        if quiet == 3:
            break
    assert idle
    assert missed < gain_min


@given(capacities(), lengths, st.sampled_from(["exact", "representative"]))
def test_a_review_finds_the_optimum_of_the_model(capacity: SiteCapacity, tokens: list[int], reading: Reading) -> None:
    """The best split is that of the full grid over the true lengths; the threshold is the best one of the present
    split."""
    spec = LongTerm(requests_min=1, prefill_min=0, decode_min=0, reading=reading)
    review = observed(spec, tokens).review(0.0, capacity, {})
    assert review is not None
    pd = tuple(
        PdCluster(home.prefill_s, decode_per_s(home.batch_max, home.iteration_s, 200)) for home in capacity.homes
    )
    mix = Mix.of(tokens)
    system = System(mix, capacity.kv_bytes, capacity.prfaas, pd, reading)
    grid = stage_rates(system, mix.thresholds(), *splits([home.instances for home in capacity.homes]))
    assert math.isclose(review.best_per_s, float(grid.lambda_max_per_s.max()), rel_tol=1e-9)
    here = np.array([[len(home.prefill) for home in capacity.homes]])
    there = np.array([[len(home.decode) for home in capacity.homes]])
    present = stage_rates(system, mix.thresholds(), here, there)
    assert math.isclose(review.lambda_max_per_s, float(present.lambda_max_per_s.max()), rel_tol=1e-9)
    assert (review.threshold_tokens is None) == (not capacity.prfaas)
    if review.threshold_tokens is not None:
        routed = stage_rates(system, np.array([review.threshold_tokens]), here, there)
        assert math.isclose(float(routed.lambda_max_per_s[0, 0]), review.lambda_max_per_s, rel_tol=1e-9)


loads = st.builds(StageLoad, st.floats(0, 1), queues_s)


@given(capacities(), lengths, loads, loads, st.booleans(), st.integers(0, 1))
def test_only_a_busy_role_grows(
    capacity: SiteCapacity,
    tokens: list[int],
    prefill: StageLoad,
    decode: StageLoad,
    role_switches: bool,
    switching: int,
) -> None:
    """No role switch starts while another one is in progress or if they are disabled."""
    spec = LongTerm(requests_min=1, role_switches=role_switches)
    measured: dict[Stage, StageLoad] = {"prefill": prefill, "decode": decode}
    review = observed(spec, tokens).review(0.0, capacity, measured, switching)
    assert review is not None
    assert bool(review.role_switches) == (review.verdict in ("switch_role", "relieve"))
    if switching or not role_switches:
        assert not review.role_switches
    for switch in review.role_switches:
        grows = measured[switch.role]
        assert grows.utilisation >= spec.busy_above or grows.queue_s >= spec.queue_high_s
    if review.verdict == "relieve":
        (switch,) = review.role_switches
        giver = decode if switch.role == "prefill" else prefill
        homes = capacity.homes
        count = sum(len(home.decode if switch.role == "prefill" else home.prefill) for home in homes)
        assert giver.utilisation * count < spec.busy_above * (count - 1), "else it would be switched back"


@st.composite
def split_reviews(draw: st.DrawFn) -> tuple[tuple[Home, ...], np.ndarray[Any, np.dtype[np.int64]], float, float]:
    """Draw homes, the best split, the gain over the present one, and the duration of the traffic."""
    homes = draw(capacities()).homes
    target = np.array([draw(st.integers(0, home.instances)) for home in homes], dtype=np.int64)
    return homes, target, draw(st.floats(0, 1)), draw(st.floats(0, 1e3))


costs = st.dictionaries(st.from_regex(r"[ab][0-8]", fullmatch=True), st.floats(0, 1e4), max_size=12)


@given(split_reviews(), costs, loads, loads, loads)
def test_a_role_switch_gains_at_least_its_cost(
    judgement: tuple[Any, ...], costs_s: dict[str, float], prfaas: StageLoad, prefill: StageLoad, decode: StageLoad
) -> None:
    """The gain over all instances is at least the loss of those that switch."""
    homes, target, gain, used_s = judgement
    measured: dict[Stage, StageLoad] = {"prfaas": prfaas, "prefill": prefill, "decode": decode}
    verdict, role_switches = judge(LongTerm(at_once=3), homes, target, gain, measured, 0, used_s, costs_s)
    lost_s = sum(costs_s.get(role_switch.instance, 0.0) for role_switch in role_switches)
    most_s = gain * sum(home.instances for home in homes) if verdict == "switch_role" else 1.0
    assert lost_s <= most_s * used_s


@given(split_reviews(), loads, st.sampled_from(STAGES), st.integers(1, 3))
def test_idle_instances_without_cache_switch_if_it_helps(
    judgement: tuple[Any, ...], busy: StageLoad, stage: Stage, at_once: int
) -> None:
    """The other rules remain: the gain is sufficient, and the role that grows is busy."""
    homes, target, gain, used_s = judgement
    spec = LongTerm(at_once=at_once)
    verdict, role_switches = judge(spec, homes, target, gain, {stage: busy}, 0, used_s)
    more = [int(count) - len(home.prefill) for count, home in zip(target, homes, strict=True)]
    grows = sum(max(-added if stage == "decode" else added, 0) for added in more)
    binds = busy.utilisation >= spec.busy_above or busy.queue_s >= spec.queue_high_s
    if gain >= spec.gain_min:
        assert len(role_switches) == (min(grows, at_once) if binds else 0)
        assert verdict == ("switch_role" if role_switches else "not_busy")


@given(split_reviews(), st.floats(0, 12), st.floats(0, 12), st.floats(0, 1), st.data())
def test_under_constant_load_no_instance_switches_back_and_forth(
    judgement: tuple[Any, ...], prefill: float, decode: float, prfaas: float, data: st.DataObject
) -> None:
    """Each role has a constant amount of work, which queues if there are fewer instances; the model's best split may be
    anything and may change at every review."""
    homes = judgement[0]
    changed = set[str]()
    for _ in range(12):
        busy: dict[Stage, StageLoad] = {"prfaas": StageLoad(prfaas)}
        works: tuple[tuple[Stage, float], ...] = (("prefill", prefill), ("decode", decode))
        for stage, work in works:
            count = sum(len(home.prefill if stage == "prefill" else home.decode) for home in homes)
            share = work / count if count else 0.0
            busy[stage] = StageLoad(min(share, 1.0), 60.0 if share > 1.0 else 0.0, share)
        target = np.array([data.draw(st.integers(0, home.instances)) for home in homes], dtype=np.int64)
        gain = data.draw(st.sampled_from([0.0, 0.3]))
        _, role_switches = judge(LongTerm(at_once=data.draw(st.integers(1, 3))), homes, target, gain, busy, 0)
        moved = {role_switch.instance for role_switch in role_switches}
        assert not moved & changed
        changed |= moved
        homes = tuple(
            replace(
                home,
                prefill=[n for n in home.prefill if n not in moved] + [n for n in home.decode if n in moved],
                decode=[n for n in home.decode if n not in moved] + [n for n in home.prefill if n in moved],
            )
            for home in homes
        )
