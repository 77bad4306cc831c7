"""Comparison of several policies over several seeds, on the user's own cluster and trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvroute.collectives import instance_traffic
from kvroute.control import ControlSpec
from kvroute.control.log import EventLog
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.planner.comparison.parallel import stream
from kvroute.planner.comparison.requests import Workload
from kvroute.planner.comparison.served import GrantedService, served_file
from kvroute.sim.gateways import refuse_features
from kvroute.sim.groups.lock_step import lock_step_groups
from kvroute.sim.network.capacity import links_named
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class ComparisonSpec:
    """The user's input. It is picklable, for worker processes."""

    cluster: str
    workload: Workload
    settings: SimSpec
    spec: ControlSpec
    """Settings of one policy; each other policy gets the parameters that it has."""
    service: GrantedService = field(default_factory=GrantedService)
    parameters: Mapping[str, dict[str, float]] = field(default_factory=dict)
    """By policy: parameters that replace those of `spec`."""

    def spec_of(self, policy: str) -> ControlSpec:
        """Return the control specification for a run of that policy. In lock-step every request is a pair, because an
        instance that serves an aggregated one is not modelled."""
        spec = self.spec.with_policy(policy)
        spec = msgspec.structs.replace(spec, parameters=spec.parameters | self.parameters.get(policy, {}))
        return spec.pairs_only() if self.settings.lock_step else spec

    def check(self, policies: Sequence[str], seed: int) -> None:
        """Raise InputError if a run cannot start: a wrong cluster, all-reduce, link, trace, policy or constraint."""
        cluster = served_file(self.cluster).cluster
        all_reducing = instance_traffic(cluster)
        if self.settings.lock_step:
            layerwise = self.settings.transfer == "layerwise"
            lock_step_groups(cluster, all_reducing=all_reducing, layerwise=layerwise)
        changes, fluctuations = self.settings.changes, self.settings.fluctuations
        for link in [change.link for change in changes] + [fluctuation.link for fluctuation in fluctuations]:
            links_named(cluster, link)
        for policy in policies:
            self.spec_of(policy).build(cluster)
        if self.settings.gateways > 1:
            refuse_features(self.spec, cluster)
            if self.service.predicts:
                what = "limits on the time to the first token and a fair queue are simulated for one gateway only"
                hint = "simulate one gateway, or leave out --refuse-late, `gateway.classes` and `gateway.fair_queue`"
                raise InputError(what, where="gateways", hint=hint)
        self.workload.of_seed(seed)

    def run(self, policy: str, seed: int, log: EventLog | None = None) -> Run:
        """Run one policy on one seed."""
        trace, settings = self.workload.of_seed(seed), self.settings
        tenancy = self.service.tenancy(len(trace.requests)) if settings.gateways == 1 else None
        cluster, spec = served_file(self.cluster).cluster, self.spec_of(policy)
        return simulate(cluster, trace, spec, settings, seed=seed, log=log, tenancy=tenancy)

    def __call__(self, cell: Cell) -> Record:
        run = self.run(cell.policy, cell.seed)
        config: dict[str, Any] = {
            "cluster": self.cluster,
            "workload": msgspec.to_builtins(self.workload),
            "settings": msgspec.to_builtins(self.settings),
            "control": msgspec.to_builtins(self.spec_of(cell.policy)),
            "service": msgspec.to_builtins(self.service),
        }
        return Record(key=cell.key, cell=cell, config=config, summary=run.summary, timeline=run.timeline)


def compare(
    comparison: ComparisonSpec,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    on: str = "local",
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """Run every policy on every seed, with the same requests for every policy of a seed, in the order policies, seeds.

    Raises:
        InputError: before any run, for a wrong cluster, link, trace, policy or constraint.
    """
    comparison.check(policies, seeds[0])
    cells = [
        Cell(
            experiment="simulate",
            reading="",
            profile=comparison.workload.profile,
            settings={},
            policy=policy,
            seed=seed,
        )
        for policy in policies
        for seed in seeds
    ]
    records: dict[str, Record] = {}
    ended = stream(cells, comparison, on, workers)
    progress(0, len(cells))
    for record in ended:
        records[record.key] = record
        progress(len(records), len(cells))
    return [records[cell.key] for cell in cells]
