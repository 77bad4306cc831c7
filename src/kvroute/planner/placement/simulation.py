"""Simulates a placement at the rate that the planner predicts, with the control core that `kvroute serve` uses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvroute.control import ControlSpec
from kvroute.planner.placement.output import Named, cluster_file
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSettings, Slo
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import build

_SEED = 15
_REQUESTS_MIN, _REQUESTS_PER_INSTANCE, _REQUESTS_MAX = 2_000, 100, 20_000
_BLOCK_TOKENS = 16
_WARMUP_SHARE = 0.2
"""Share of the requests that arrive before the measurement begins, while the batches fill."""


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation of the placement."""

    requests: int
    """Requests that were counted."""
    rate_per_s: float
    slo_attainment: float
    """Share of the requests that met both SLOs."""
    predicted_attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


def simulated(
    problem: PlacementProblem, instances: Sequence[Named], rate_per_s: float, predicted_attainment: float
) -> Simulated:
    """Run Poisson arrivals at `rate_per_s` on the instances, lengths as in the problem's traffic.

    The number of requests is 100 per instance, between 2,000 and 20,000; the first fifth is not counted.
    """
    cluster = build(cluster_file(problem, instances))
    count = min(max(_REQUESTS_MIN, _REQUESTS_PER_INSTANCE * len(instances)), _REQUESTS_MAX)
    trace = _trace(problem, count, rate_per_s)
    slo = Slo(ttft_s=problem.objective.ttft_s, tpot_s=problem.objective.tpot_s)
    # Requests share no prefix, so caches on decode instances would only take memory.
    settings = SimSettings(slo=slo, warmup_s=_WARMUP_SHARE * count / rate_per_s, decode_cache=False)
    summary = simulate(cluster, trace, ControlSpec(), settings, seed=_SEED).summary
    return Simulated(
        requests=summary.requests,
        rate_per_s=rate_per_s,
        slo_attainment=summary.slo_attainment,
        predicted_attainment=predicted_attainment,
        ttft_p50_s=summary.ttft_s.p50,
        ttft_p99_s=summary.ttft_s.p99,
        tpot_p50_s=summary.tpot_s.p50,
        tpot_p99_s=summary.tpot_s.p99,
    )


def _trace(problem: PlacementProblem, count: int, rate_per_s: float) -> Trace:
    draw = np.random.default_rng(_SEED)
    at_s = np.cumsum(draw.exponential(1.0 / rate_per_s, count))
    mix = problem.lengths.mix
    tokens = np.maximum(np.rint(draw.choice(mix.tokens, count, p=mix.share)), 1).astype(np.int64)
    rows = zip(at_s.tolist(), tokens.tolist(), strict=True)
    requests = tuple(TracedRequest(at, length, problem.output_tokens, (), _BLOCK_TOKENS) for at, length in rows)
    return Trace(f"{problem.cluster.name}, Poisson", requests)
