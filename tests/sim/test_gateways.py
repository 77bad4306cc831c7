"""Several simulated gateways: with an exchange without delay they decide as one; without any, requests wait longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli.cli_rig import CLUSTER, EXAMPLES

from kvroute.control import ControlSpec
from kvroute.control.state.hotspots import CopySpec
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import load
from kvroute.types import InputError

FABRIC, LARGE = load(Path(CLUSTER)), load(EXAMPLES / "fat-tree-64gpu.yaml")


def trace(count: int, gap_s: float) -> Trace:
    """Requests with different prompts at equal distances."""
    requests = [
        TracedRequest(
            at_s=gap_s * n, input_tokens=4_000 + 997 * (n % 7), output_tokens=30, blocks=(n,), block_tokens=512
        )
        for n in range(count)
    ]
    return Trace("even", tuple(requests))


def run(count: int, gap_s: float, policy: str = "netkv", seed: int = 0, **more: Any) -> Run:
    """Simulate some requests."""
    return simulate(FABRIC, trace(count, gap_s), ControlSpec(decode=policy), SimSpec(**more), seed=seed)


@settings(max_examples=12)
@given(
    gateways=st.integers(2, 6),
    gap_s=st.sampled_from((0.02, 0.1, 0.4)),
    policy=st.sampled_from(("netkv", "cla")),
    seed=st.integers(0, 99),
)
def test_gateways_that_know_all_at_once_decide_as_one(gateways: int, gap_s: float, policy: str, seed: int) -> None:
    """Number of gateways and draw make no difference if nothing is late."""
    single = run(60, gap_s, policy, seed)
    several = run(60, gap_s, policy, seed, gateways=gateways, sync_s=0.0)
    for name in ("source", "target", "first_token_s", "finished_s"):
        assert getattr(single.outcomes, name).tolist() == getattr(several.outcomes, name).tolist(), name


@settings(max_examples=12)
@given(
    gateways=st.integers(2, 20),
    sync_s=st.sampled_from((0.0, 0.003, 0.2, 5.0, None)),
    policy=st.sampled_from(("round-robin", "cla", "netkv", "foresight")),
)
def test_every_request_ends_once_and_a_run_repeats(gateways: int, sync_s: float | None, policy: str) -> None:
    """However late the exchange is, no request is lost, and equal arguments give an equal run."""
    first, again = (run(50, 0.05, policy, gateways=gateways, sync_s=sync_s) for _ in range(2))
    requests = first.summary.requests
    assert (requests.arrived, requests.finished + requests.rejected, requests.in_flight) == (50, 50, 0)
    assert first.outcomes.first_token_s.tobytes() == again.outcomes.first_token_s.tobytes()


def test_gateways_without_exchange_choose_the_same_instances() -> None:
    """Herding: gateways that do not know of each other take longer than those that do, and the delay is between."""
    means = [
        simulate(
            LARGE, trace(200, 0.3), ControlSpec(decode="netkv"), SimSpec(gateways=8, sync_s=sync_s)
        ).summary.ttft_s.mean
        or 0.0
        for sync_s in (0.0, 0.8, None)
    ]
    assert means == sorted(means)
    assert means[2] > 1.1 * means[0], means


def test_features_whose_state_is_not_exchanged_are_refused() -> None:
    """The message names the feature."""
    spec = msgspec.structs.replace(ControlSpec(), copies=CopySpec())
    with pytest.raises(InputError, match="several gateways are not simulated with `copies`"):
        simulate(FABRIC, trace(3, 0.1), spec, SimSpec(gateways=2))
    with pytest.raises(InputError, match="0 gateways"):
        SimSpec(gateways=0)
