"""`aggregated`: the default policy, which chooses for each request a pair or one instance, compared with pairs for all
requests, against no pairs at all, and against a choice with an upper bound on delays."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvroute.control import ControlSpec
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.policies import NO_BOUND
from kvroute.sim.metrics import REJECTED, window
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace
from kvroute.topology import Cluster, build
from kvroute.topology.reading.expansion import entries_of
from kvroute_studies.aggregated.cases import AGGREGATED_CASES, AggregatedCase
from kvroute_studies.aggregated.network_cases import NetworkCase, network_cluster, network_trace
from kvroute_studies.netkv.setup import cluster_of, requests_of
from kvroute_studies.never_worse.run import Traces, figures_of, settings_of, study_of
from kvroute_studies.shared.cells import Experiment

CHOICE, PAIRS, AGGREGATED, BOUNDED = "foresight-joint", "disaggregated", "aggregated", "bounded"
"""`foresight-joint` with its default parameters; the same with pairs for all requests; a cluster in which every
instance serves its requests itself; and `foresight-joint` with an upper bound on delays in place of their price."""
BASELINES = (PAIRS, AGGREGATED, BOUNDED)
_PARAMETERS = {
    PAIRS: {"aggregated": 0.0},
    AGGREGATED: {"token_delay_price": 0.0},
    BOUNDED: {"token_delay_price": NO_BOUND},
}

EXPERIMENT = Experiment(
    name="aggregated",
    title="Pairs, or one instance",
    source="kvroute",
    axes={},
    policies=(CHOICE, *BASELINES),
    profiles=tuple(AGGREGATED_CASES),
    expectation="the choice's mean response time is nowhere more than 2 % above that of the best of the others",
    versus=(CHOICE, AGGREGATED),
)
EXPERIMENTS = {EXPERIMENT.name: EXPERIMENT}


def run_cell(cell: Cell) -> Record:
    """Run a cell on the same hardware and requests for every policy.

    The baseline `aggregated` uses the choice's prices too, on a cluster without prefill instances.
    """
    case = AGGREGATED_CASES[cell.profile]
    run, settings = play(case, cell)
    summary = msgspec.structs.replace(run.summary, policy=cell.policy)
    config = {"case": msgspec.json.decode(msgspec.json.encode(case)), "policy": cell.policy}
    figures = figures_of(run, settings)
    rejected = (run.outcomes.state == REJECTED)[window(run.outcomes, settings)]
    figures["rejected"] = float(rejected.sum())
    return Record(key=cell.key, cell=cell, config=config, summary=summary, figures=figures)


def play(profile: AggregatedCase | NetworkCase, cell: Cell) -> tuple[Run, SimSpec]:
    """Run a cell; return the run with the times of every request, and its settings."""
    if isinstance(profile, NetworkCase):
        cluster, trace = network_cluster(profile), network_trace(profile, cell.seed)
        spec, settings = _spec(cell.policy), SimSpec()
    else:
        cluster, trace, spec, settings = _of_matrix(profile, cell)
    if cell.policy == AGGREGATED:
        decoding = tuple(msgspec.structs.replace(instance, role="decode") for instance in cluster.instances)
        cluster = replace(cluster, instances=decoding)
    return simulate(cluster, trace, spec, settings, seed=cell.seed), settings


def _of_matrix(aggregated_case: AggregatedCase, cell: Cell) -> tuple[Cluster, Trace, ControlSpec, SimSpec]:
    case = aggregated_case.case
    study = study_of(case, Traces(), cell)
    study = replace(study, engine=msgspec.structs.replace(study.engine, chunk_tokens=aggregated_case.chunk_tokens))
    inner = msgspec.structs.replace(cell, profile=case.profile, settings=dict(case.settings) or {"load": 1.0})
    cluster, trace = cluster_of(study.reading, inner, study.engine), requests_of(study, inner)
    if aggregated_case.prefill is not None:
        cluster = _with_prefill(cluster, aggregated_case.prefill)
    spec = msgspec.structs.replace(
        _spec(cell.policy), prefill=study.reading.prefill_policy, prefill_cache=study.reading.prefill_cache
    )
    return cluster, _longer(trace, aggregated_case.output_factor), spec, settings_of(case, study)


def _spec(policy: str) -> ControlSpec:
    return ControlSpec(decode="foresight-joint", parameters=_PARAMETERS.get(policy, {}))


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
