"""Instances that a cluster needs for a workload: over the request rate, and over the hours of a day, by formula."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvroute import llm
from kvroute.control.scaling.scaled_fleet import replica_model
from kvroute.planner.throughput.lengths import incremental
from kvroute.policies.fleet.replicas import (
    Demand,
    ReplicaModel,
    ReplicaNeed,
    ReplicaTarget,
    demand_of,
    needed_replicas,
)
from kvroute.sim.workload import Trace
from kvroute.timing import prefill_time
from kvroute.topology import Cluster
from kvroute.types import InputError, Instance

HOURS = 24
FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
"""Rates of the first table, as multiples of the given one."""


class RateRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one rate needs."""

    rate_per_s: float
    need: ReplicaNeed
    gpus: int


class DayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A day: instances that follow each hour's rate, and a fixed number for the highest rate."""

    hours: tuple[RateRow, ...]
    gpu_hours: float
    static_gpu_hours: float

    @property
    def saving(self) -> float:
        """Share of the GPU-hours that following the rate saves."""
        return 1.0 - self.gpu_hours / self.static_gpu_hours


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `kvroute plan replicas`."""

    cluster: str
    model: str
    workload: str
    target: ReplicaTarget
    gpus_each: tuple[int, int]
    """GPUs of a prefill and of a decode instance."""
    present: tuple[int, int]
    """Prefill and decode instances in the cluster file."""
    cached_share: float
    """Share of the prompt tokens that a cache without limit holds."""
    mean_prefill_s: float
    mean_output_tokens: float
    rates: tuple[RateRow, ...]
    day: DayPlan


def plan_replicas(
    cluster: Cluster,
    trace: Trace,
    target: ReplicaTarget,
    *,
    rate_per_s: float,
    hourly: Sequence[float],
    cached: bool = True,
    model: str = "",
) -> ReplicaPlan:
    """Return the instances that the requests of a trace need.

    Args:
        cluster: timings, limits and network of the instances; how many there are does not matter.
        trace: lengths and prefixes of the requests.
        target: SLO and limits.
        rate_per_s: mean rate of the day.
        hourly: [24] rates of the hours, relative to each other.
        cached: whether prefill instances keep the prefixes of the trace, without limit of memory.
        model: name of the model in the cluster; empty: the only one.

    Raises:
        InputError: the cluster has several models and none is named, or no prefill and decode instances of it; the
            trace has no requests; or not 24 rates, of which one is above 0.
    """
    name = _model_name(cluster, model)
    prefill, decode = (_first(cluster, name, role) for role in ("prefill", "decode"))
    demand, cached_share = _demand(cluster, trace, prefill, cached=cached)
    able = replica_model(cluster, name)
    gpus = len(prefill.gpus), len(decode.gpus)
    of_model = [instance for instance in cluster.instances if instance.model == name]
    return ReplicaPlan(
        cluster=cluster.name,
        model=name,
        workload=f"{len(trace.requests):,} requests of {trace.name}",
        target=target,
        gpus_each=gpus,
        present=(sum(i.role == "prefill" for i in of_model), sum(i.role == "decode" for i in of_model)),
        cached_share=cached_share,
        mean_prefill_s=float(demand.share @ demand.service_s),
        mean_output_tokens=demand.output_tokens,
        rates=tuple(_row(target, demand.at(rate_per_s * factor), able, gpus) for factor in FACTORS),
        day=_day(target, demand.at(rate_per_s), able, gpus, hourly),
    )


def _day(
    target: ReplicaTarget, demand: Demand, able: ReplicaModel, gpus: tuple[int, int], hourly: Sequence[float]
) -> DayPlan:
    total = math.fsum(hourly)
    if len(hourly) != HOURS or min(hourly) < 0.0 or not 0.0 < total < math.inf:
        raise InputError(f"{len(hourly)} hourly rates are given", hint="give 24 numbers of 0 or more, one above 0")
    hours = tuple(_row(target, demand.at(demand.rate_per_s * rate * HOURS / total), able, gpus) for rate in hourly)
    return DayPlan(
        hours=hours,
        gpu_hours=float(sum(row.gpus for row in hours)),
        static_gpu_hours=float(HOURS * max(row.gpus for row in hours)),
    )


def _row(target: ReplicaTarget, demand: Demand, able: ReplicaModel, gpus: tuple[int, int]) -> RateRow:
    need = needed_replicas(target, demand, able)
    count = need.prefill.replicas * gpus[0] + need.decode.replicas * gpus[1]
    return RateRow(rate_per_s=demand.rate_per_s, need=need, gpus=count)


def _model_name(cluster: Cluster, model: str) -> str:
    names = sorted({instance.model for instance in cluster.instances})
    if model in names:
        return model
    if model:
        raise InputError(f"there is no model {model!r} in {cluster.name}", hint=f"choose one of {', '.join(names)}")
    if len(names) != 1:
        what = f"{cluster.name} serves {', '.join(names) or 'no model'}"
        raise InputError(what, hint="name one with --model" if names else "list its instances in the cluster file")
    return names[0]


def _first(cluster: Cluster, model: str, role: str) -> Instance:
    found = next((instance for instance in cluster.instances if (instance.model, instance.role) == (model, role)), None)
    if found is None:
        what = f"{cluster.name} has no {role} instance of {model}"
        raise InputError(what, hint="list at least one instance of each role in the cluster file")
    return found


def _demand(cluster: Cluster, trace: Trace, prefill: Instance, *, cached: bool) -> tuple[Demand, float]:
    """Return the demand of the trace at rate 1, and the share of prompt tokens that are cached."""
    if not trace.requests:
        raise InputError("the trace has no requests", where=trace.name, hint="use a trace with requests")
    new, cached_share = incremental(trace, None if cached else 0)
    time, geometry = prefill_time(cluster.timing[prefill.timing].prefill), llm.model(prefill.model)
    prompts = np.array([request.input_tokens for request in trace.requests], dtype=np.int64)
    outputs = np.array([request.output_tokens for request in trace.requests], dtype=np.int64)
    service_s = [
        time.seconds(tokens, tokens - uncached)
        for tokens, uncached in zip(prompts.tolist(), new.astype(np.int64).tolist(), strict=True)
    ]
    output_tokens = max(float(outputs.mean()), 1.0)
    return (
        demand_of(
            1.0,
            np.array(service_s),
            np.asarray(geometry.kv_bytes(prompts), dtype=np.float64),
            np.asarray(geometry.kv_bytes(prompts + outputs), dtype=np.float64),
            output_tokens,
            float(prompts.mean()) + output_tokens / 2.0,
        ),
        cached_share,
    )
