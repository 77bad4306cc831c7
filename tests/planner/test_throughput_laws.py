"""Laws of the throughput model: equality with the scalar definition, monotonicity in every resource, and closed
forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.llm import model
from kvroute.policies.fleet.throughput import (
    BINDINGS,
    Mix,
    PdCluster,
    PrfaasCluster,
    Reading,
    StageRates,
    System,
    decode_per_s,
    kv_curve,
    prefill_curve,
    splits,
    stage_rates,
)
from kvroute.timing import prefill_time
from kvroute.types import FloatArray, InputError, LinearPrefill, QuadraticPrefill

INF = float("inf")
readings = st.sampled_from(["representative", "exact"])
counts = st.integers(0, 4)


@dataclass(frozen=True)
class Curve:
    """base + per_token * l + per_token2 * l^2: enough for a difference between E[T(L)] and T(E[L])."""

    base: float
    per_token: float
    per_token2: float = 0.0

    def __call__(self, tokens: FloatArray) -> FloatArray:
        return np.asarray(self.base + self.per_token * tokens + self.per_token2 * tokens**2)

    def at(self, tokens: float) -> float:
        return self.base + self.per_token * tokens + self.per_token2 * tokens**2


times = st.builds(
    Curve, st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([1e-6, 5e-5, 2e-4]), st.sampled_from([0, 1e-9])
)
sizes = st.builds(Curve, st.sampled_from([0.0, 2e8]), st.sampled_from([0.0, 17_280.0, 3e5]))
mixes = st.builds(
    lambda pairs: Mix.of([tokens for tokens, _ in pairs], [weight for _, weight in pairs]),
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 9)), min_size=1, max_size=7),
)
sources = st.builds(PrfaasCluster, counts, times, st.sampled_from([0.0, 1e8, 1e9, 12.5e9]))
pds = st.builds(PdCluster, times, st.sampled_from([0.2, 0.78125, 3.0]))
systems = st.builds(
    System,
    mixes,
    sizes,
    st.lists(sources, max_size=2).map(tuple),
    st.lists(pds, min_size=1, max_size=2).map(tuple),
    readings,
)


def grid(system: System, instances: Sequence[int]) -> StageRates:
    return stage_rates(system, system.mix.thresholds(), *splits(instances))


def everywhere(system: System) -> StageRates:
    return grid(system, [3] * len(system.pd))


def mean(
    mix: Mix, curve: Callable[[float], float], keep: Callable[[float], bool], reading: Reading
) -> tuple[float, float]:
    """Return (share, cost of the mean request) of the lengths to keep, by simple loops."""
    kept = [(n, s) for n, s in zip(mix.tokens.tolist(), mix.share.tolist(), strict=True) if keep(n)]
    share = sum(s for _, s in kept)
    if not kept:
        return 0.0, 0.0
    if reading == "exact":
        return share, sum(s * curve(n) for n, s in kept) / share
    return share, curve(sum(s * n for n, s in kept) / share)


def per_s(have: float, each: float) -> float:
    return (have / each if each else INF) if have else 0.0


def by_definition(system: System, t: float, n_prefill: Sequence[int], n_decode: Sequence[int]) -> tuple[float, ...]:
    """Return Theta_prfaas, Theta_pd-p, Theta_pd-d and Lambda_max of one cell, by equations 3 to 6 one after the
    other."""
    prfaas = 0.0
    p, kv = mean(system.mix, _at(system.kv_bytes), lambda n: n > t, system.reading)
    for source in system.prfaas:
        _, seconds = mean(system.mix, _at(source.prefill_s), lambda n: n > t, system.reading)
        egress = per_s(source.egress_bytes_per_s, kv) if kv else INF
        prfaas += min(per_s(source.instances, seconds), egress) if p else 0.0
    pd_p = 0.0
    rest = 0.0
    for cluster, prefill, decode in zip(system.pd, n_prefill, n_decode, strict=True):
        rest, seconds = mean(system.mix, _at(cluster.prefill_s), lambda n: n <= t, system.reading)
        one = per_s(prefill, seconds) if rest else 0.0
        pd_p += min(one, decode * cluster.decode_per_s) if len(system.pd) > 1 else one
    pd_d = sum(decode * cluster.decode_per_s for cluster, decode in zip(system.pd, n_decode, strict=True))
    bounds = [prfaas / p if p else INF, pd_p / rest if rest else INF, pd_d]
    return prfaas, pd_p, pd_d, min(bounds)


def _at(curve: object) -> Callable[[float], float]:
    assert isinstance(curve, Curve)
    return curve.at


@given(systems)
def test_the_grid_equals_the_definition_cell_by_cell(system: System) -> None:
    rates = everywhere(system)
    for row, t in enumerate(rates.thresholds.tolist()):
        for column in range(len(rates.n_prefill)):
            cell = (
                rates.prfaas_per_s[row],
                rates.pd_p_per_s[row, column],
                rates.pd_d_per_s[column],
                rates.lambda_max_per_s[row, column],
            )
            n_prefill, n_decode = rates.n_prefill[column].tolist(), rates.n_decode[column].tolist()
            assert cell == pytest.approx(by_definition(system, t, n_prefill, n_decode), rel=1e-9)


@given(systems)
def test_no_stage_exceeds_its_bound_and_one_stage_is_the_bottleneck(system: System) -> None:
    rates = everywhere(system)
    rate = rates.lambda_max_per_s
    bounds = {
        "prfaas": np.broadcast_to(rates.prfaas_bound_per_s[:, None], rate.shape),
        "pd_p": rates.pd_p_bound_per_s,
        "pd_d": np.broadcast_to(rates.pd_d_per_s, rate.shape),
    }
    for bound in bounds.values():
        assert (rate <= bound).all()
    for (row, column), code in np.ndenumerate(rates.binding):
        binding = BINDINGS[code]
        assert rate[row, column] == bounds[binding.removesuffix("_compute").removesuffix("_egress")][row, column]


@given(systems)
def test_a_link_is_the_bottleneck_if_more_bandwidth_raises_throughput(system: System) -> None:
    """The law holds for any PrfaaS cluster at every threshold."""
    wider = tuple(replace(site, egress_bytes_per_s=site.egress_bytes_per_s + 1e6) for site in system.prfaas)
    before, after = everywhere(system), everywhere(replace(system, prfaas=wider))
    assert (before.prfaas_egress_binds == (after.prfaas_per_s > before.prfaas_per_s)).all()


@given(systems)
def test_the_mix_is_divided_without_loss(system: System) -> None:
    """p + (1 - p) = 1 and p * l_long + (1 - p) * l_short = E[L], at every threshold."""
    cut = system.mix.cut(system.mix.thresholds())
    assert cut.long_share + cut.short_share == pytest.approx(1)
    total = cut.long_share * cut.long_tokens + cut.short_share * cut.short_tokens
    assert total == pytest.approx(system.mix.mean_tokens)
    assert (cut.long_share[0], cut.short_share[0]) == (1, 0)
    assert (cut.long_share[-1], cut.short_share[-1]) == (0, 1)


@given(systems)
def test_the_best_cell_is_a_maximum_and_ties_are_broken_by_prefill_bound_and_egress(system: System) -> None:
    rates = everywhere(system)
    row, column = rates.best()
    rate, room = rates.lambda_max_per_s, rates.prefill_bound_per_s
    assert rate[row, column] == rate.max()
    equal = rate == rate.max()
    assert room[row, column] == room[equal].max()
    equal &= room == room[equal].max()
    assert rates.egress_bytes_per_s[row, column] == rates.egress_bytes_per_s[equal].min()


@given(systems, st.sampled_from(["egress", "prfaas", "pd", "decode"]))
def test_more_resources_never_serve_less(system: System, what: str) -> None:
    """More of any resource helps or is neutral at every threshold and split, and therefore at the optimum too."""
    more = system
    instances = [3] * len(system.pd)
    if what == "egress":
        prfaas = tuple(replace(source, egress_bytes_per_s=source.egress_bytes_per_s * 1.5) for source in system.prfaas)
        more = replace(system, prfaas=prfaas)
    elif what == "prfaas":
        more = replace(system, prfaas=tuple(replace(site, instances=site.instances + 1) for site in system.prfaas))
    elif what == "decode":
        more = replace(system, pd=tuple(replace(site, decode_per_s=site.decode_per_s * 1.5) for site in system.pd))
    else:
        instances[0] += 1
    before, after = everywhere(system), grid(more, instances)
    assert after.lambda_max_per_s.max() >= before.lambda_max_per_s.max()
    if what != "pd":
        assert (after.lambda_max_per_s >= before.lambda_max_per_s).all()


@given(mixes, sizes, sources, pds, readings)
def test_two_halves_equal_one_cluster(
    mix: Mix, kv_bytes: Curve, source: PrfaasCluster, pd: PdCluster, reading: Reading
) -> None:
    """Equal halves of the PrfaaS cluster and of the PD cluster, split equally, serve the same as the whole clusters."""
    whole = System(mix, kv_bytes, (replace(source, instances=2 * source.instances),), (pd,), reading)
    half = replace(source, egress_bytes_per_s=source.egress_bytes_per_s / 2)
    halves = System(mix, kv_bytes, (half, half), (pd, pd), reading)
    n_prefill = np.array([[0], [2], [4], [6]])
    joined = stage_rates(whole, mix.thresholds(), n_prefill, 6 - n_prefill)
    n_half = np.repeat(n_prefill // 2, 2, axis=1)
    apart = stage_rates(halves, mix.thresholds(), n_half, 3 - n_half)
    assert apart.lambda_max_per_s == pytest.approx(joined.lambda_max_per_s)
    assert apart.prfaas_per_s == pytest.approx(joined.prfaas_per_s)
    assert grid(halves, [3, 3]).lambda_max_per_s.max() <= grid(whole, [6]).lambda_max_per_s.max() * (1 + 1e-9)


@given(st.integers(1, 200_000), sizes, sources, pds, st.integers(1, 6), readings)
def test_one_length_has_a_closed_form(
    tokens: int, kv_bytes: Curve, source: PrfaasCluster, pd: PdCluster, instances: int, reading: Reading
) -> None:
    """Either everything is offloaded and all home instances decode, or nothing is and the split balances the two
    stages."""
    system = System(Mix.of([tokens]), kv_bytes, (source,), (pd,), reading)
    size, local_s = _at(kv_bytes)(tokens), _at(pd.prefill_s)(tokens)
    link_per_s = per_s(source.egress_bytes_per_s, size) if size else INF
    offloaded = min(per_s(source.instances, _at(source.prefill_s)(tokens)), link_per_s, instances * pd.decode_per_s)
    local = max(min(n / local_s, (instances - n) * pd.decode_per_s) for n in range(instances + 1))
    assert grid(system, [instances]).lambda_max_per_s.max() == pytest.approx(max(offloaded, local))


@given(systems)
def test_variance_lowers_throughput_if_prefill_time_is_convex(system: System) -> None:
    """Jensen: E[T(L)] >= T(E[L]) for every curve here, so the paper's reading predicts at least the exact
    throughput."""
    exact = everywhere(replace(system, reading="exact")).lambda_max_per_s
    assert (exact <= everywhere(replace(system, reading="representative")).lambda_max_per_s * (1 + 1e-9)).all()


@given(systems)
def test_no_result_is_nan(system: System) -> None:
    """Empty stages, no bandwidth and no instances give zeros; only the bound of an empty stage is infinite."""
    rates = everywhere(system)
    assert np.isfinite(rates.lambda_max_per_s).all()
    assert np.isfinite(rates.egress_bytes_per_s).all()
    for values in (rates.prfaas_per_s, rates.pd_p_per_s, rates.prfaas_bound_per_s, rates.pd_p_bound_per_s):
        assert not np.isnan(values).any()
        assert (values >= 0).all()
    assert (rates.prfaas_per_s[-1], rates.prfaas_bound_per_s[-1]) == (0, INF)
    assert (rates.pd_p_per_s[0] == 0).all()


def test_one_threshold_by_hand() -> None:
    """Half of the requests have 1,000 tokens, half 9,000; t = 1,000 offloads the long ones.

    PrfaaS: 2 instances at 1 s each could do 2/s, 1 GB/s over 0.8 GB gives 1.25/s, so 2.5/s of all requests. PD-P: 1
    instance at 0.5 s gives 2/s, so 4/s of all. PD-D: 3 x 0.8 = 2.4/s is the limit. With 0.9 GB/s the link is the limit.
    """
    mix = Mix.of([9_000, 1_000, 1_000, 9_000])
    source = PrfaasCluster(2, Curve(0.1, 1e-4), 1e9)
    pd = PdCluster(Curve(0.0, 5e-4), decode_per_s(batch_max=20, iteration_s=0.025, output_tokens=1_000))
    system = System(mix, Curve(0.0, 8e8 / 9_000), (source,), (pd,))
    one = (np.array([1_000.0]), np.array([[1]]), np.array([[3]]))
    rates = stage_rates(system, *one)
    assert (rates.prfaas_per_s[0], rates.pd_p_per_s[0, 0], rates.pd_d_per_s[0]) == pytest.approx((1.25, 2.0, 2.4))
    assert rates.lambda_max_per_s[0, 0] == pytest.approx(2.4)
    assert BINDINGS[rates.binding[0, 0]] == "pd_d"
    assert rates.egress_bytes_per_s[0, 0] == pytest.approx(0.5 * 2.4 * 0.8e9)
    slower = replace(system, prfaas=(replace(source, egress_bytes_per_s=0.9e9),))
    assert BINDINGS[stage_rates(slower, *one).binding[0, 0]] == "prfaas_egress"
    both = replace(system, prfaas=(*slower.prfaas, replace(source, instances=0)))
    assert BINDINGS[stage_rates(both, *one).binding[0, 0]] == "prfaas_egress"
    fewer = replace(system, prfaas=(replace(source, instances=1),))
    assert BINDINGS[stage_rates(fewer, *one).binding[0, 0]] == "prfaas_compute"
    assert BINDINGS[stage_rates(system, one[0], one[1] * 0, one[2]).binding[0, 0]] == "pd_p"


def test_curves_equal_those_of_timing_and_model() -> None:
    """At whole tokens the numbers are identical; between them they are interpolated linearly."""
    time = prefill_time(QuadraticPrefill(base_s=0.3, per_token_s=4e-5, per_token2_s=2e-10))
    hybrid = model("prfaas-1t-hybrid")
    tokens = np.array([1, 1_024, 131_072])
    seconds = prefill_curve(time)
    assert seconds(tokens.astype(float)).tolist() == [time.seconds(count) for count in tokens.tolist()]
    assert kv_curve(hybrid)(tokens.astype(float)).tolist() == hybrid.kv_bytes(tokens).tolist()
    assert seconds(np.array([7.25]))[0] == pytest.approx(0.75 * time.seconds(7) + 0.25 * time.seconds(8))
    linear = prefill_curve(prefill_time(LinearPrefill(per_token_s=1e-4)))
    assert linear(np.array([0.5, 10.5])) == pytest.approx([0.5e-4, 10.5e-4])


@pytest.mark.parametrize(
    ("tokens", "weights", "what"),
    [
        ([], [], "has no request"),
        ([100, 200], [0, 0], "has no request"),
        ([100, 200], [1], "2 lengths but 1 weights"),
        ([-1], [1], "not valid"),
        ([float("nan")], [1], "not valid"),
        ([100], [INF], "not valid"),
    ],
    ids=["empty", "weightless", "unpaired", "negative", "nan", "infinite"],
)
def test_an_invalid_mix_is_rejected(tokens: list[float], weights: list[float], what: str) -> None:
    with pytest.raises(InputError, match=what):
        Mix.of(tokens, weights)


def test_a_mix_merges_equal_lengths_and_drops_zero_weights() -> None:
    mix = Mix.of([300, 100, 300, 200], [1, 2, 1, 0])
    assert (mix.tokens.tolist(), mix.share.tolist()) == ([100, 300], [0.5, 0.5])
    assert mix.thresholds().tolist() == [0, 100, 300]
