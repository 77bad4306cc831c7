"""Values that one core has learned from transfers and output lengths, passed to another core as events: both have the
same state."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import CLUSTER as TEXT

from kvroute.control import ControlSpec
from kvroute.control.learning.learned_capacity import Answers, LearnedCapacity
from kvroute.oracle import NetworkOracle, OracleSpec
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.topology import parse
from kvroute.types import (
    TIER_COUNT,
    BandwidthLearned,
    CapacityLearned,
    Event,
    InputError,
    RatioLearned,
    TransferMeasured,
)

CLUSTER = parse(TEXT)
NAMES = [instance.name for instance in CLUSTER.instances]
PREFILLS = [name for name in NAMES if name.startswith("prefill")]
DECODES = [name for name in NAMES if name.startswith("decode")]
times = st.integers(0, 40).map(lambda tenths: tenths / 10)
ended = st.tuples(times, st.integers(2, 4), st.floats(1e6, 1e9), st.floats(1e6, 1e9))
measured = st.tuples(
    times, st.sampled_from(PREFILLS), st.sampled_from(DECODES), st.floats(1e7, 1e9), st.floats(0.01, 9)
)


def add_measurements(learned: LearnedCapacity, at: float, measurements: list[tuple[float, int, float, float]]) -> float:
    """Report transfers that end one after the other from `at` on; return the time of the last end."""
    for wait_s, tier, kv_bytes, predicted_bytes in measurements:
        at += wait_s
        learned.grown_old(at)
        learned.ended(tier, kv_bytes, predicted_bytes, 0.0)
    return at


@given(st.lists(ended, max_size=12), times, st.lists(ended, max_size=6))
def test_foresight_continues_from_the_learned_state_of_another_core(
    before: list[tuple[float, int, float, float]], wait_s: float, after: list[tuple[float, int, float, float]]
) -> None:
    """The state is equal at once, and nearly equal after later transfers (two decays round twice)."""
    old, new = LearnedCapacity(ForesightSpec()), LearnedCapacity(ForesightSpec())
    at = add_measurements(old, 100.0, before) + wait_s
    shown = old.seen(at)
    new.resume(at, old.known_at(at, ()))
    assert new.seen(at) == shown == old.seen(at)
    end = add_measurements(old, at, after)
    assert add_measurements(new, at, after) == end
    for learned in (old, new):
        learned.grown_old(end)
    np.testing.assert_allclose(new.factor, old.factor, rtol=1e-9)
    assert [tier.transfers for tier in new.seen(end)] == [tier.transfers for tier in old.seen(end)]


@given(st.lists(st.integers(1, 5_000), max_size=3_000))
def test_only_observed_output_lengths_are_carried_over(tokens: list[int]) -> None:
    """For the other lengths, both cores use the same prior."""
    old, new = Answers(ForesightSpec()), Answers(ForesightSpec())
    for answer_tokens in tokens:
        old.finished(answer_tokens)
    for length in old.last:
        new.finished(length)
    assert (new.mean_tokens, new.last) == (old.mean_tokens, old.last)


@given(st.lists(measured, max_size=12), st.lists(measured, max_size=6), st.floats(0, 90))
def test_the_oracle_continues_from_the_learned_state_of_another_one(
    before: list[tuple[float, str, str, float, float]],
    after: list[tuple[float, str, str, float, float]],
    later_s: float,
) -> None:
    """Costs are equal to the last bit, at once and after later transfers."""
    spec = ControlSpec(oracle=OracleSpec(self_measured=True, stale_after_s=30.0))
    old, new = spec.build(CLUSTER), spec.build(CLUSTER)
    at = 0.0
    for wait_s, source, target, kv_bytes, seconds in before:
        at += wait_s
        old.handle(TransferMeasured(at, source, target, kv_bytes, seconds))
    for event in old.knowledge(at):
        written = msgspec.json.encode(event)
        new.handle(msgspec.json.decode(written, type=Event))
    assert _costs(new.oracle, at) == _costs(old.oracle, at)
    for wait_s, source, target, kv_bytes, seconds in after:
        at += wait_s
        for core in (old, new):
            core.handle(TransferMeasured(at, source, target, kv_bytes, seconds))
    assert _costs(new.oracle, at + later_s) == _costs(old.oracle, at + later_s)
    assert new.oracle.learned_ratio(at) == old.oracle.learned_ratio(at)


def _costs(oracle: NetworkOracle, at: float) -> list[list[float]]:
    targets = np.array([NAMES.index(name) for name in DECODES])
    return [oracle.residual_bytes_per_s(NAMES.index(name), targets, at).tolist() for name in PREFILLS]


@pytest.mark.parametrize(
    "event",
    [
        CapacityLearned(1.0, (0.0,), (0.0,), (0,), (None,)),
        CapacityLearned(1.0, (float("nan"),) * TIER_COUNT, (1.0,) * TIER_COUNT, (1,) * TIER_COUNT, (0,) * TIER_COUNT),
        BandwidthLearned(1.0, (None,)),
        BandwidthLearned(1.0, (RatioLearned(0.0, 1.0, 0.0, 1.0),) * TIER_COUNT),
        BandwidthLearned(
            1.0, (None,) * TIER_COUNT, (("prefill0", "no-such-instance", RatioLearned(0.0, 1.0, 1.0, 1.0)),)
        ),
    ],
)
def test_a_learned_state_that_does_not_fit_is_rejected(event: Event) -> None:
    """A log may come from an unknown source; the core stays unchanged."""
    core = ControlSpec(decode="foresight", oracle=OracleSpec(self_measured=True)).build(CLUSTER)
    before = core.learned(1.0)
    with pytest.raises(InputError):
        core.handle(event)
    assert core.learned(1.0) == before
