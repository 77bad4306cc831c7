"""Comparison of several policies over several seeds, on the user's own cluster and trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from kvroute.control import ControlSpec, EventLog
from kvroute.experiments.cells import Cell, Record
from kvroute.experiments.runner import stream
from kvroute.sim.capacity import links_named
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSettings
from kvroute.sim.workload import (
    PROFILES,
    THINK_MAX_S,
    Agents,
    Trace,
    apply_profile,
    generate,
    read_any,
    rescale_if_spread,
    share_prefixes,
    take,
    with_lengths,
)
from kvroute.topology import Cluster, load
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class Workload:
    """Source of the requests, and changes made to them before they arrive."""

    trace: str = ""
    """Path of a trace; empty to generate one, different for every seed."""
    generated_requests: int = 2_000
    generated_rate_per_s: float = 3.4
    skip_bad: bool = False
    profile: str = ""
    rate_per_s: float | None = None
    input_tokens: int | None = None
    p_share: float | None = None
    """Share of groups that share half a prompt; replaces the trace's own prefixes."""
    requests: int | None = None
    """Maximum number of requests, taken from the start."""
    agents: int | None = None
    """Number of concurrent agent sessions, each turn after the previous response; None: open loop."""
    think_max_s: float = THINK_MAX_S
    """Maximum pause of an agent between turns, in seconds; longer pauses are shortened."""

    def of_seed(self, seed: int) -> Trace:
        """Return the requests of one seed.

        Raises:
            InputError: an option does not fit the trace, or a closed loop.
        """
        found = _read(self.trace, self.skip_bad) if self.trace else self._generated(seed)
        if isinstance(found, Agents):
            trace = self._played(found, seed)
        elif self.agents is not None:
            what = "the trace has no sessions of agents"
            raise InputError(what, where=found.name, hint="omit --agents, or give a trace with sessions")
        else:
            trace = self._shaped(found)
        if self.input_tokens is not None:
            trace = with_lengths(trace, input_tokens=self.input_tokens)
        if self.p_share is not None:
            trace = share_prefixes(trace, self.p_share, seed=seed)
        return trace

    def _shaped(self, trace: Trace) -> Trace:
        if self.profile:
            trace = apply_profile(trace, PROFILES[self.profile])
        most = self.requests if self.trace else self.generated_requests
        if most is not None:
            trace = take(trace, most)
        return trace if self.rate_per_s is None else rescale_if_spread(trace, self.rate_per_s)

    def _played(self, agents: Agents, seed: int) -> Trace:
        """Play the sessions in another order and with other start times for every seed."""
        if self.profile:
            what = "a profile would remove single turns from sessions"
            raise InputError(what, where="--profile", hint="omit it for sessions of agents")
        if self.agents is None:
            return agents.open_loop(
                seed=seed, rate_per_s=self.rate_per_s, think_max_s=self.think_max_s, turns=self.requests
            )
        if self.rate_per_s is not None:
            what = "--rate and --agents exclude each other: in a closed loop, responses set the rate"
            raise InputError(what, where="--rate", hint="omit --rate or --agents")
        return agents.closed_loop(self.agents, seed=seed, think_max_s=self.think_max_s, turns=self.requests)

    def remarks(self, seed: int) -> tuple[str, ...]:
        """Return the corrections made while reading and shaping the requests of a seed, as sentences for the user."""
        return self.of_seed(seed).remarks

    def _generated(self, seed: int) -> Trace:
        # A profile keeps only a part of the requests, the smallest more than a fifth; `take` then limits the number.
        wanted = self.generated_requests * (6 if self.profile else 1)
        return _generate(wanted, self.generated_rate_per_s, seed)


@lru_cache(maxsize=2)
def _read(path: str, skip_bad: bool) -> Trace | Agents:
    return read_any(Path(path), skip_bad=skip_bad)


@lru_cache(maxsize=2)
def _generate(requests: int, rate_per_s: float, seed: int) -> Trace:
    return generate(requests, rate_per_s=rate_per_s, seed=seed)


@lru_cache(maxsize=2)
def cluster_of(path: str) -> Cluster:
    """Return the cluster of a cluster file, read once. Raises InputErrors for an invalid file."""
    return load(Path(path))


@dataclass(frozen=True, slots=True)
class Question:
    """The user's input. It is picklable, for worker processes."""

    cluster: str
    workload: Workload
    settings: SimSettings
    spec: ControlSpec
    """The decode policy's name is set for each run; its parameters are passed only to CLA*."""

    def spec_of(self, policy: str) -> ControlSpec:
        """Return the control specification for a run of that policy."""
        parameters = self.spec.parameters if policy == "cla" else {}
        return msgspec.structs.replace(self.spec, decode=policy, parameters=parameters)

    def check(self, policies: Sequence[str], seed: int) -> None:
        """Raise InputError if a run cannot start: a wrong cluster, link, trace, policy or constraint."""
        cluster = cluster_of(self.cluster)
        changes, fluctuations = self.settings.changes, self.settings.fluctuations
        for link in [each.link for each in changes] + [each.link for each in fluctuations]:
            links_named(cluster, link)
        for policy in policies:
            self.spec_of(policy).build(cluster)
        self.workload.of_seed(seed)

    def run(self, policy: str, seed: int, log: EventLog | None = None) -> Run:
        """Run one policy on one seed."""
        trace = self.workload.of_seed(seed)
        return simulate(cluster_of(self.cluster), trace, self.spec_of(policy), self.settings, seed=seed, log=log)

    def __call__(self, cell: Cell) -> Record:
        run = self.run(cell.policy, cell.seed)
        config = {
            "cluster": self.cluster,
            "workload": msgspec.to_builtins(self.workload),
            "settings": msgspec.to_builtins(self.settings),
            "control": msgspec.to_builtins(self.spec_of(cell.policy)),
        }
        return Record(key=cell.key, cell=cell, config=config, summary=run.summary, timeline=run.timeline)


def compare(
    question: Question,
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
    question.check(policies, seeds[0])
    cells = [
        Cell(
            experiment="simulate", reading="", profile=question.workload.profile, settings={}, policy=policy, seed=seed
        )
        for policy in policies
        for seed in seeds
    ]
    records: dict[str, Record] = {}
    ended = stream(cells, question, on, workers)
    progress(0, len(cells))
    for record in ended:
        records[record.key] = record
        progress(len(records), len(cells))
    return [records[cell.key] for cell in cells]
