"""`alone`: requests that one instance serves alone, against pairs for all requests and no pairs at all."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvroute.comparison.cells import Cell, Record
from kvroute.control import ControlSpec
from kvroute.experiments.alone_cases import ALONE_CASES, AloneCase
from kvroute.experiments.cells import Experiment
from kvroute.experiments.never_worse_run import Traces, figures_of, settings_of, study_of
from kvroute.experiments.setup import cluster_of, requests_of
from kvroute.policies import NO_BOUND
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSettings
from kvroute.sim.workload import Trace
from kvroute.topology import Cluster, build
from kvroute.topology.check import entries_of

PAIRS, JOINT_PAIRS, AGGREGATED, CHOICE = "disaggregated", "disaggregated-joint", "aggregated", "choice"
"""Pairs chosen by `foresight`; pairs chosen by `foresight-joint`; every instance serves its requests alone; and
`foresight-joint`, which chooses between both for each request, without a bound on the time between tokens."""
BOUNDED = "choice-bounded"
"""The same with a bound on the time between tokens: a price that no advantage outweighs."""
BASELINES = (PAIRS, JOINT_PAIRS, AGGREGATED)
_PARAMETERS = {
    JOINT_PAIRS: {"alone": 0.0},
    AGGREGATED: {"token_delay_max": NO_BOUND},
    CHOICE: {"token_delay_max": NO_BOUND},
    BOUNDED: {"token_delay_max": 0.05, "token_delay_price": 1e9},
}

ALONE = Experiment(
    name="alone",
    title="Pairs, or one instance alone",
    source="kvroute",
    axes={},
    policies=(*BASELINES, CHOICE, BOUNDED),
    profiles=tuple(ALONE_CASES),
    expectation="the choice's mean response time is never significantly above a baseline's, and below all in a third",
    versus=(CHOICE, AGGREGATED),
)
EXPERIMENTS = {ALONE.name: ALONE}


def run_cell(cell: Cell) -> Record:
    """Run a cell on the same hardware and requests for every policy.

    The baseline `aggregated` uses the choice's prices too, on a cluster without prefill instances.
    """
    one = ALONE_CASES[cell.profile]
    run, settings = play(one, cell)
    summary = msgspec.structs.replace(run.summary, policy=cell.policy)
    config = {"case": msgspec.json.decode(msgspec.json.encode(one)), "policy": cell.policy}
    return Record(key=cell.key, cell=cell, config=config, summary=summary, figures=figures_of(run, settings))


def play(one: AloneCase, cell: Cell) -> tuple[Run, SimSettings]:
    """Run a cell; return the run with the times of every request, and its settings."""
    case = one.case
    study = study_of(case, Traces(), cell)
    study = replace(study, engine=msgspec.structs.replace(study.engine, chunk_tokens=one.chunk_tokens))
    inner = msgspec.structs.replace(cell, profile=case.profile, settings=dict(case.settings))
    cluster, trace = cluster_of(study.reading, inner, study.engine), requests_of(study, inner)
    if one.prefill is not None:
        cluster = _with_prefill(cluster, one.prefill)
    if cell.policy == AGGREGATED:
        decoding = tuple(msgspec.structs.replace(instance, role="decode") for instance in cluster.instances)
        cluster = replace(cluster, instances=decoding)
    spec = ControlSpec(
        decode="foresight" if cell.policy == PAIRS else "foresight-joint",
        parameters=_PARAMETERS.get(cell.policy, {}),
        prefill=study.reading.prefill_policy,
        prefill_cache=study.reading.prefill_cache,
    )
    settings = settings_of(case, study)
    return simulate(cluster, _longer(trace, one.output_factor), spec, settings, seed=cell.seed), settings


def _with_prefill(cluster: Cluster, count: int) -> Cluster:
    """Return the cluster with the first `count` instances, those that prefill first, as its prefill instances."""
    entries = sorted(entries_of(cluster.file), key=lambda entry: (entry.role != "prefill", entry.name))
    roles = ["prefill"] * count + ["decode"] * (len(entries) - count)
    changed = [msgspec.structs.replace(entry, role=role) for entry, role in zip(entries, roles, strict=True)]
    return build(msgspec.structs.replace(cluster.file, instances=changed))


def _longer(trace: Trace, factor: float) -> Trace:
    if factor == 1.0:
        return trace
    longer = [
        msgspec.structs.replace(request, output_tokens=int(request.output_tokens * factor))
        for request in trace.requests
    ]
    return replace(trace, requests=tuple(longer))
