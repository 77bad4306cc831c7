"""PrfaaS's experiments as data, and the function that runs a cell of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.planner.throughput.search import KINDS, deployment
from kvroute.sim.workload import Agents
from kvroute_studies.prfaas.burst import (
    DUAL,
    SCENARIOS,
    THRESHOLDS,
    TRACE_THRESHOLDS,
    burst_run,
    static,
)
from kvroute_studies.prfaas.kv import KV_THROUGHPUT
from kvroute_studies.prfaas.queue import AGENTS, TRACE, PrfaasStudy, case_run, planned, source
from kvroute_studies.shared.cells import Experiment

CASE_STUDY = Experiment(
    name="prfaas-case-study",
    title="Closed formula and queues",
    source="PrfaaS 4, Table 6",
    axes={"load": (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.2)},
    policies=KINDS,
    profiles=("no-variance", "lengths", "poisson"),
    expectation="without variance the queues reach the throughput of the formula; PrfaaS-PD serves more than "
    "homogeneous PD and more than naive offloading",
    versus=("prfaas", "homogeneous"),
    certain=("no-variance", TRACE),
)
BURST = Experiment(
    name="prfaas-burst",
    title="Static thresholds and the dual-timescale scheduler",
    source="PrfaaS 3.4.3",
    axes={},
    policies=(DUAL, *map(static, THRESHOLDS)),
    profiles=tuple(SCENARIOS),
    expectation="the scheduler serves about as many good requests as the best threshold in hindsight, and more than "
    "the threshold that was best for the old traffic",
    versus=(DUAL, static(19_600)),
)
EXPERIMENTS = {experiment.name: experiment for experiment in (CASE_STUDY, BURST, KV_THROUGHPUT)}
_RUNS: dict[str, Callable[[PrfaasStudy, Cell], Record]] = {CASE_STUDY.name: case_run, BURST.name: burst_run}


def of_study(experiment: Experiment, study: PrfaasStudy) -> Experiment:
    """Adapt the sweep to the study. With a trace, its own requests replace the generated ones, and thresholds are lower
    because cached prefixes do not count; the planner's threshold for this trace is added to them."""
    if not study.trace or experiment.name == KV_THROUGHPUT.name:
        return experiment
    if experiment.name == CASE_STUDY.name:
        return replace(experiment, profiles=(AGENTS if isinstance(source(study.trace), Agents) else TRACE,))
    on_traces = tuple(name for name, scenario in SCENARIOS.items() if scenario.on_traces)
    best = deployment(planned(study, "prfaas", study.assumed.burst_wan_gbps)).threshold_tokens
    assert best is not None
    statics = tuple(map(static, sorted({*TRACE_THRESHOLDS, best})))
    return replace(experiment, profiles=on_traces, policies=(DUAL, *statics), versus=(DUAL, static(best)))


def run_cell(study: PrfaasStudy, cell: Cell) -> Record:
    """Run one cell. It is picklable together with its study, for processes and Ray."""
    return _RUNS[cell.experiment](study, cell)
