"""`autoscaling`: a day of requests on instances that follow the traffic, against fixed numbers and a queue-length rule.

Every way has a parameter, here a level. The report compares the levels that reach the same SLO attainment.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import msgspec

from kvroute.control import ControlSpec
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.policies.fleet.autoscaling import ScalingSpec
from kvroute.policies.fleet.replicas import ReplicaBounds, ReplicaTarget
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import QueueRule, ScalingRun, SimSpec, Slo
from kvroute.sim.workload import Trace, generate, read
from kvroute.sim.workload.diurnal import DIURNAL, HOUR_S, hourly_rates, shape_of, with_rates
from kvroute.topology import Cluster, parse
from kvroute_studies.shared.cells import Experiment

STATIC, QUEUE, KVROUTE = "static", "queue-length", "kvroute"
GENERATED = "generated"
MEAN_PER_S = 2.0
HOUR_PLAYED_S = 300.0
"""Each hour is played in this time, so that rates change twelve times as fast as in a day. Start-up times, reviews and
stabilisation are not shortened, so this favours fixed numbers of instances."""
SLO = Slo(ttft_s=10.0, tpot_s=0.06)
EQUAL_ATTAINMENT = 0.9
PREFILL, DECODE = 11, 5
"""Instances that the cluster has."""
LEVELS: dict[str, tuple[tuple[float, ...], ...]] = {
    STATIC: ((7, 1), (8, 1), (9, 1), (8, 2)),
    QUEUE: ((4.0, 40), (2.5, 40), (1.5, 40), (2.5, 20)),
    KVROUTE: ((0.3,), (0.5,), (0.65,), (0.8,)),
}
"""Parameters of each way by level. `static`: prefill and decode instances; `queue-length`: requests per prefill and per
decode instance; `kvroute`: the SLO attainment of its configuration."""
FIRST = (4, 1)
"""Prefill and decode instances with which the ways that follow the traffic begin."""
_CLUSTER = """
name: autoscaling-64gpu
fabric:
  kind: fat-tree
  pods: 2
  racks_per_pod: 2
  nodes_per_rack: 2
  gpus_per_node: 8
  nvlink: 450 GB/s
  nics: {compute: {count: 8, capacity: 100 Gbps, scope: gpu}}
  rack_uplinks: {count: 32, capacity: 50 Gbps}
  pod_uplinks: {count: 64, capacity: 25 Gbps}
network:
  latency: {node: 1 us, rack: 3 us, pod: 8 us, datacenter: 15 us}
  ecmp: flow
timing:
  default: {prefill: {kind: linear, per_token: 180 us, base: 40 ms}, decode: {base: 25 ms, per_request: 0.2 ms}}
defaults: {model: llama-3-70b, tp: 4, batch_max: 64, kv_capacity: 180 GB}
"""

AUTOSCALING = Experiment(
    name="autoscaling",
    title="A day with instances that follow the traffic",
    source="kvroute",
    axes={"level": tuple(float(level) for level in range(4))},
    policies=(STATIC, QUEUE, KVROUTE),
    profiles=(GENERATED,),
    expectation="at equal SLO attainment, kvroute uses the fewest GPU-hours",
    versus=(KVROUTE, STATIC),
)
EXPERIMENTS = {AUTOSCALING.name: AUTOSCALING}


def run_cell(cell: Cell, trace: str = "", hour_s: float = HOUR_PLAYED_S) -> Record:
    """Run a cell.

    Args:
        cell: its level selects the parameters of its policy.
        trace: file whose requests arrive; empty: generated ones.
        hour_s: time in which an hour is played.
    """
    run, parameters = play(cell, trace, hour_s)
    config = {
        "parameters": list(parameters),
        "mean_per_s": MEAN_PER_S,
        "hour_played_s": hour_s,
        "slo": msgspec.to_builtins(SLO),
        "trace": trace,
    }
    hours = run.outcomes.arrived_s.max() / hour_s
    figures = {
        "gpu_hours": float(run.gpu_hours * HOUR_S / hour_s * len(DIURNAL) / max(hours, 1e-9)),
        "attainment": run.summary.slo_attainment or 0.0,
    }
    series = {
        "prefill instances": tuple((at, float(count)) for at, count, _ in run.instances),
        "decode instances": tuple((at, float(count)) for at, _, count in run.instances),
    }
    summary = msgspec.structs.replace(run.summary, policy=cell.policy)
    return Record(key=cell.key, cell=cell, config=config, summary=summary, figures=figures, series=series)


def play(cell: Cell, trace: str = "", hour_s: float = HOUR_PLAYED_S) -> tuple[Run, tuple[float, ...]]:
    """Run a cell; return the run, and the parameters of its level."""
    parameters = LEVELS[cell.policy][int(cell.settings["level"])]
    spec = ControlSpec(decode="foresight", prefill="cache-aware", overcommit=True)
    prefill, decode = FIRST
    queue = None
    if cell.policy == STATIC:
        prefill, decode = int(parameters[0]), int(parameters[1])
    elif cell.policy == QUEUE:
        queue = QueueRule(prefill=parameters[0], decode=parameters[1])
    else:
        target = ReplicaTarget(
            ttft_s=SLO.ttft_s,
            tpot_s=SLO.tpot_s,
            attainment=parameters[0],
            prefill=ReplicaBounds(most=PREFILL),
            decode=ReplicaBounds(most=DECODE),
        )
        spec = msgspec.structs.replace(spec, scaling=ScalingSpec(target=target, manages="instances"))
    settings = SimSpec(slo=SLO, scaling=ScalingRun(prefill=prefill, decode=decode, queue=queue))
    return simulate(cluster(), requests_of(cell.seed, trace, hour_s), spec, settings, seed=cell.seed), parameters


@lru_cache(maxsize=1)
def cluster() -> Cluster:
    """Return the cluster with all instances that may serve."""
    roles = ["prefill"] * PREFILL + ["decode"] * DECODE
    lines = []
    for number, role in enumerate(roles):
        gpus = f"node{number // 2}:" + ("4-7" if number % 2 else "0-3")
        lines.append(f"  - {{name: {role}{number:02}, role: {role}, gpus: '{gpus}'}}")
    return parse(_CLUSTER + "instances:\n" + "\n".join(lines) + "\n")


@lru_cache(maxsize=1)
def requests_of(seed: int, trace: str = "", hour_s: float = HOUR_PLAYED_S) -> Trace:
    """Return the requests of a day, the same for every policy of a seed.

    A trace of at least six hours gives the rates of the day, too: those of 24 equal parts. The requests of a shorter
    one are repeated, with prefixes of their own, at the declared rates of `DIURNAL`.
    """
    needed = int(MEAN_PER_S * hour_s * len(DIURNAL) * 1.05) + 500
    if not trace:
        return with_rates(generate(needed, rate_per_s=MEAN_PER_S, seed=seed), hourly_rates(MEAN_PER_S), hour_s)
    found = read(trace)
    long = bool(found.requests) and found.requests[-1].at_s >= 6 * HOUR_S
    shape = tuple(max(count, 0.01) for count in shape_of(found)) if long else DIURNAL
    return with_rates(_repeated(found, needed, seed), hourly_rates(MEAN_PER_S, shape), hour_s)


def _repeated(trace: Trace, count: int, seed: int) -> Trace:
    """Return `count` requests: the trace from a place that depends on the seed, again and again. Repeated prefixes are
    new ones."""
    size, span_s = len(trace.requests), trace.requests[-1].at_s + 1.0
    first = seed * 997 % size
    requests = []
    for number in range(first, first + count):
        turn, position = divmod(number, size)
        request = trace.requests[position]
        blocks = tuple(block ^ (turn << 52) for block in request.blocks)
        requests.append(msgspec.structs.replace(request, at_s=turn * span_s + request.at_s, blocks=blocks))
    begin_s = requests[0].at_s
    moved = [msgspec.structs.replace(request, at_s=request.at_s - begin_s) for request in requests]
    return replace(trace, requests=tuple(moved))
