"""Simulates a placement at the rate that the planner predicts, with the control core that `kvroute serve` uses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvroute.control import ControlSpec
from kvroute.planner.placement.evaluation import isolated_per_s
from kvroute.planner.placement.instances import PlacedInstance
from kvroute.planner.placement.output import cluster_file, named
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.search import Placement
from kvroute.sim.metrics import AllReduceCost, Spread
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec, Slo
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import build
from kvroute.types import FloatArray

PAIRS = ControlSpec(decode="foresight")
"""Configuration of the core for a cluster file without a `gateway` section: a placement is for pairs."""
_SEED = 15
_SIDE_MAX = 16
"""Instances of one phase that are simulated; of a larger placement, an even selection at a lower rate."""
_REQUESTS_MIN, _REQUESTS_MAX = 2_000, 30_000
_RESIDENCES, _WARMUP_RESIDENCES = 6.0, 2.0
"""Length of the run, and of its beginning that is not counted, in residence times of a decode."""
_BLOCK_TOKENS = 16


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation of the placement."""

    prefill_instances: int
    """Number of prefill instances that were simulated: all of them, or an even selection."""
    decode_instances: int
    requests: int
    """Requests that were counted."""
    rate_per_s: float
    """Rate of the simulated instances; the predicted rate if all are simulated."""
    slo_attainment: float | None
    """Share of the requests that met both SLOs."""
    ttft_s: Spread
    tpot_s: Spread
    transfer_s: Spread
    all_reduces: dict[str, AllReduceCost] = {}
    """By phase: all-reduces that share links with other traffic; empty if there are none."""


def simulated(
    problem: PlacementProblem, placement: Placement, rate_per_s: float, spec: ControlSpec = PAIRS
) -> Simulated:
    """Run Poisson arrivals on the placement, with prompt lengths as in the problem's traffic.

    All-reduces of groups that span servers share links with KV transfers.

    Args:
        problem: the problem.
        placement: instances of both phases.
        rate_per_s: request rate of the whole placement; a selection of instances gets its share.
        spec: configuration of the core.
    """
    sides = {"prefill": _selected(placement.prefill), "decode": _selected(placement.decode)}
    shares = [_total_per_s(problem, sides[phase]) / _total_per_s(problem, getattr(placement, phase)) for phase in sides]
    rate_per_s *= min(shares)
    cluster = build(cluster_file(problem, named(problem, sides["prefill"], sides["decode"])))
    decode = placement.decode[0]
    residence_s = problem.output_tokens * decode.times().decode.base_s
    wanted = rate_per_s * _RESIDENCES * residence_s
    count = round(min(max(_REQUESTS_MIN, wanted), _REQUESTS_MAX))
    slo = Slo(ttft_s=problem.objective.ttft_s, tpot_s=problem.objective.tpot_s)
    warmup_s = min(_WARMUP_RESIDENCES * residence_s, 0.5 * count / rate_per_s)
    # Requests share no prefix, so a cache on decode instances would only take memory.
    settings = SimSpec(slo=slo, warmup_s=warmup_s, decode_cache=False)
    summary = simulate(cluster, poisson_trace(problem, count, rate_per_s, _SEED), spec, settings, seed=_SEED).summary
    return Simulated(
        prefill_instances=len(sides["prefill"]),
        decode_instances=len(sides["decode"]),
        requests=summary.measured,
        rate_per_s=rate_per_s,
        slo_attainment=summary.slo_attainment,
        ttft_s=summary.ttft_s,
        tpot_s=summary.tpot_s,
        transfer_s=summary.transfer_s,
        all_reduces=summary.all_reduces,
    )


def _selected(instances: Sequence[PlacedInstance]) -> tuple[PlacedInstance, ...]:
    places = np.unique(np.linspace(0, len(instances) - 1, _SIDE_MAX).round().astype(int))
    return tuple(instances[place] for place in places.tolist())


def _total_per_s(problem: PlacementProblem, instances: Sequence[PlacedInstance]) -> float:
    return sum(isolated_per_s(problem, instance) for instance in instances)


def poisson_trace(problem: PlacementProblem, count: int, rate_per_s: float, seed: int) -> Trace:
    """Return requests with Poisson arrivals and prompt lengths as in the problem's traffic."""
    draw = np.random.default_rng(seed)
    at_s: FloatArray = np.cumsum(draw.exponential(1.0 / rate_per_s, count))
    mix = problem.lengths.mix
    tokens = np.maximum(np.rint(draw.choice(mix.tokens, count, p=mix.share)), 1).astype(np.int64)
    rows = zip(at_s.tolist(), tokens.tolist(), strict=True)
    requests = tuple(TracedRequest(at, length, problem.output_tokens, (), _BLOCK_TOKENS) for at, length in rows)
    return Trace(f"{problem.cluster.name}, Poisson", requests)
