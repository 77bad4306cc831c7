"""Laws of the number of instances that a demand needs, and of how it changes over time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.fleet.autoscaling import ScalingSpec, Stabiliser, best_split, one_switch, shortage
from kvroute.policies.fleet.replicas import (
    REPLICAS_MAX,
    SCALED_ROLES,
    Demand,
    ReplicaBounds,
    ReplicaModel,
    ReplicaTarget,
    demand_of,
    needed_replicas,
    predicted,
)
from kvroute.timing.queueing import erlang_c, waiting
from kvroute.types import DecodeSpec, InputError

MODEL = ReplicaModel(
    bytes_per_s=50e9,
    transfer_bytes_per_s=12.5e9,
    latency_s=10e-6,
    decode=DecodeSpec(base_s=12.5e-3, per_request_s=0.1e-3),
    batch_max=64,
    kv_bytes=200e9,
)
TOKEN_BYTES = 327_680.0


def demand(
    rate_per_s: float,
    *,
    tokens: tuple[int, ...] = (1_000, 4_000, 16_000),
    output_tokens: float = 300.0,
    cv2: float = 1.0,
) -> Demand:
    """Return a demand for Llama-3-70B on four H100."""
    prompts = np.array(tokens, dtype=np.float64)
    return demand_of(
        rate_per_s,
        0.02 + 90e-6 * prompts,
        prompts * TOKEN_BYTES,
        (prompts + output_tokens) * TOKEN_BYTES,
        output_tokens,
        float(prompts.mean()) + output_tokens / 2,
        cv2,
    )


demands = st.builds(
    demand,
    st.floats(0.01, 500.0),
    tokens=st.lists(st.integers(16, 60_000), min_size=1, max_size=8).map(tuple),
    output_tokens=st.floats(1.0, 3_000.0),
    cv2=st.floats(1.0, 20.0),
)
targets = st.builds(
    ReplicaTarget,
    ttft_s=st.floats(0.05, 20.0),
    tpot_s=st.none() | st.floats(0.005, 0.2),
    attainment=st.floats(0.5, 0.999),
    utilisation_max=st.floats(0.3, 0.95),
)
models = st.builds(
    ReplicaModel,
    bytes_per_s=st.floats(1e8, 1e11),
    transfer_bytes_per_s=st.floats(1e8, 1e11),
    latency_s=st.just(1e-5),
    decode=st.builds(
        DecodeSpec,
        base_s=st.floats(1e-3, 0.05),
        per_request_s=st.floats(0.0, 1e-3),
        per_context_token_s=st.floats(0.0, 1e-7),
    ),
    batch_max=st.integers(1, 512),
    kv_bytes=st.just(0.0) | st.floats(1e9, 1e12),
    stages=st.integers(1, 4),
    overlaps=st.booleans(),
)


@given(targets, demands, models, st.floats(1.0, 4.0))
def test_more_load_never_needs_fewer_instances(
    target: ReplicaTarget, low: Demand, model: ReplicaModel, factor: float
) -> None:
    less, more = needed_replicas(target, low, model), needed_replicas(target, low.at(low.rate_per_s * factor), model)
    for role in SCALED_ROLES:
        assert more.of(role).replicas >= less.of(role).replicas


@given(targets, demands, models)
def test_no_resource_is_planned_above_its_utilisation(
    target: ReplicaTarget, wanted: Demand, model: ReplicaModel
) -> None:
    need = needed_replicas(target, wanted, model)
    for role in SCALED_ROLES:
        one = need.of(role)
        assert one.utilisation <= target.utilisation_max + 1e-6 or one.replicas == REPLICAS_MAX
        assert 1 <= one.replicas <= REPLICAS_MAX
        assert 0.0 <= one.attainment <= 1.0


@given(targets, demands, models)
def test_one_instance_less_is_too_few(target: ReplicaTarget, wanted: Demand, model: ReplicaModel) -> None:
    """The number is the least: with one instance less, utilisation or attainment is not kept."""
    need = needed_replicas(target, wanted, model)
    for role in SCALED_ROLES:
        one = need.of(role)
        if one.replicas in (1, REPLICAS_MAX):
            continue
        less = {scaled_role: need.of(scaled_role).replicas - (scaled_role == role) for scaled_role in SCALED_ROLES}
        worse = predicted(target, wanted, model, **less).of(role)
        best = predicted(target, wanted.at(1e-12), model, 1, 1).of(role).attainment
        enough = min(math.sqrt(target.attainment), 0.99 * best)
        assert worse.utilisation > target.utilisation_max - 1e-6 or worse.attainment < enough


@given(targets, demands, models)
def test_a_target_that_some_number_reaches_is_reached(
    target: ReplicaTarget, wanted: Demand, model: ReplicaModel
) -> None:
    need = needed_replicas(target, wanted, model)
    best = predicted(target, wanted, model, REPLICAS_MAX, REPLICAS_MAX)
    for role in SCALED_ROLES:
        if need.of(role).replicas < REPLICAS_MAX:
            enough = min(math.sqrt(target.attainment), 0.99 * best.of(role).attainment)
            assert need.of(role).attainment >= enough - 1e-9


def test_a_worked_example() -> None:
    """10 requests/s with 0.65 s of prefill each are 6.5 busy prefill instances; the queue sets their number."""
    need = needed_replicas(ReplicaTarget(ttft_s=3.0, tpot_s=0.025), demand(10.0), MODEL)
    assert need.prefill.reason in ("ttft", "compute")
    assert 9 <= need.prefill.replicas <= 11
    assert need.attainment >= 0.9
    bursty = needed_replicas(ReplicaTarget(ttft_s=3.0, tpot_s=0.025), demand(10.0, cv2=9.0), MODEL)
    assert bursty.prefill.replicas > need.prefill.replicas


def test_a_slow_network_binds_both_roles() -> None:
    slow = replace(MODEL, bytes_per_s=1e9, transfer_bytes_per_s=1e9, latency_s=0.0)
    need = needed_replicas(ReplicaTarget(ttft_s=60.0), demand(10.0), slow)
    assert (need.prefill.reason, need.decode.reason) == ("network", "network")


def test_waiting_work_is_done_within_the_time_for_it() -> None:
    target = ReplicaTarget(ttft_s=10.0, catch_up_s=60.0)
    waits = replace(demand(1.0), prefill_backlog_s=600.0)
    need = needed_replicas(target, waits, MODEL)
    assert need.prefill.reason == "backlog"
    assert need.prefill.replicas == math.ceil(0.65 + 10.0)


def test_bounds_are_kept_and_named() -> None:
    target = ReplicaTarget(ttft_s=3.0, prefill=ReplicaBounds(least=20), decode=ReplicaBounds(most=1))
    need = needed_replicas(target, demand(10.0), MODEL)
    assert (need.prefill.replicas, need.prefill.reason) == (20, "minimum")
    assert (need.decode.replicas, need.decode.reason) == (1, "maximum")


@pytest.mark.parametrize(
    ("field", "value"),
    [("ttft_s", 0.0), ("tpot_s", math.inf), ("attainment", 1.0), ("utilisation_max", 0.0), ("catch_up_s", -1.0)],
)
def test_impossible_targets_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        ReplicaTarget(**{field: value})  # type: ignore[arg-type]


def test_impossible_bounds_and_times_are_refused() -> None:
    with pytest.raises(InputError, match="prefill"):
        ReplicaTarget(prefill=ReplicaBounds(least=3, most=2))
    with pytest.raises(InputError, match="window_s"):
        ScalingSpec(window_s=0.0)
    with pytest.raises(InputError, match="margin"):
        ScalingSpec(margin=2.0)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_erlang_c_is_the_steady_state_of_the_birth_death_process(servers: int, utilisation: float) -> None:
    load = servers * utilisation
    below = sum(math.exp(k * math.log(load) - math.lgamma(k + 1)) for k in range(servers))
    above = math.exp(servers * math.log(load) - math.lgamma(servers + 1)) / (1.0 - utilisation)
    assert erlang_c(servers, load) == pytest.approx(above / (below + above), rel=1e-9)


@given(st.floats(0.05, 0.95), st.integers(1, 30))
def test_one_server_with_poisson_arrivals_is_pollaczek_khinchine(utilisation: float, groups: int) -> None:
    service_s = np.linspace(0.1, 2.0, groups)
    share = np.full(groups, 1.0 / groups)
    rate = utilisation / float(share @ service_s)
    exact = waiting(rate, service_s, share)
    near = waiting(rate, service_s, share, servers=1, arrival_cv2=1.0 + 1e-12)
    assert near.mean_s == pytest.approx(exact.mean_s, rel=1e-6)
    assert near.waits == pytest.approx(exact.waits)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_instances_are_added_at_once_and_taken_away_after_a_period(needs: list[int]) -> None:
    stabiliser = Stabiliser(300.0)
    stabiliser.begin(0.0, 1)
    for step, needed in enumerate(needs):
        at = 15.0 * step
        desired = stabiliser.update(at, needed, needed)
        recent = [n for k, n in enumerate(needs[: step + 1]) if 15.0 * k >= at - 300.0]
        assert desired == max(recent + ([1] if at <= 300.0 else []))


@given(st.integers(1, 20), st.lists(st.booleans(), min_size=1, max_size=100))
def test_a_need_that_varies_within_the_margin_changes_nothing(count: int, ups: list[bool]) -> None:
    """The need is `count` or one less, and `count` is kept in both cases: no flapping."""
    stabiliser = Stabiliser(60.0)
    stabiliser.begin(0.0, count)
    for step, up in enumerate(ups):
        assert stabiliser.update(60.0 * step, count if up else count - 1, count) == count


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 40))
def test_the_best_split_leaves_the_least_shortage(prefill: int, decode: int, total: int) -> None:
    best = best_split((prefill, decode), total, ReplicaTarget())
    assert best is not None
    least = min(shortage((prefill, decode), count, total) for count in range(1, total))
    assert shortage((prefill, decode), best, total) == least


def test_a_role_switch_must_relieve_the_role_that_lacks_more() -> None:
    target = ReplicaTarget()
    assert one_switch((6, 2), 4, 8, target) == "prefill"
    assert one_switch((2, 6), 4, 8, target) == "decode"
    assert one_switch((4, 4), 4, 8, target) is None
    assert one_switch((8, 8), 4, 8, target) is None  # both lack the same
    assert one_switch((3, 3), 4, 8, target) is None  # nothing lacks
    assert best_split((1, 1), 1, target) is None
