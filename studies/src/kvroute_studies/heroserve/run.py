"""`heroserve-online`: choice between rings and in-network aggregation by load, with and without other traffic."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from kvroute.collectives import CollectiveFlow
from kvroute.collectives.policy import CollectiveScheduler
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.groups.all_reduces import (
    AllReduceScheduler,
    AllReduceSimulation,
    PricedOption,
    Reduced,
    SchedulerReplicas,
    TensorTraffic,
)
from kvroute.sim.groups.periodic_table import PeriodicTable
from kvroute.sim.metrics import Spread, Summary
from kvroute.types import FloatArray
from kvroute_studies.heroserve.setup import no_requests
from kvroute_studies.shared.cells import Experiment

SERVERS, TRACKS, GROUPS = 8, 2, 8
"""Servers of the unit, NICs of each server with a switch for each, and tensor-parallel groups."""
NIC_BYTES_PER_S = 22.5e9
SLOTS_BYTES_PER_S = 21e9
"""Rate at which the slots of one switch aggregate."""
END_S = 0.2
REPLICAS, SYNC_EVERY = 8, 32
TABLE_PERIOD_S = 10e-3
"""Period of the policy `periodic-table`: two to three phases of a group, and two bursts."""
STALE, RINGS, AGGREGATION, TABLE = "stale-replicas", "rings-only", "aggregation-only", "periodic-table"

ONLINE = Experiment(
    name="heroserve-online",
    title="Online choice of all-reduce schemes",
    source="HeroServe III-D and V",
    axes={"span": (2.0, 4.0, 8.0), "background": (0.0, 0.5)},
    policies=(
        "static",
        "ecmp",
        "power-of-two",
        "utilisation-table",
        "corrected-table",
        "outstanding",
        TABLE,
        STALE,
        RINGS,
        AGGREGATION,
    ),
    profiles=("unit",),
    expectation="a load-aware choice between rings and in-network aggregation lowers the time of all-reduces",
    versus=("outstanding", "utilisation-table"),
)


@dataclass(frozen=True, slots=True)
class Unit:
    """Servers below one switch for each of their NICs. Links: up and down of every NIC, then the slots of every
    switch."""

    servers: int = SERVERS
    tracks: int = TRACKS

    def up(self, server: int, track: int) -> int:
        """Return the link from a server's NIC to its switch."""
        return 2 * (server * self.tracks + track)

    def down(self, server: int, track: int) -> int:
        """Return the link from the switch to a server's NIC."""
        return self.up(server, track) + 1

    def slots(self, track: int) -> int:
        """Return the link that stands for the slots of a switch."""
        return 2 * self.servers * self.tracks + track

    def capacity_bytes_per_s(self) -> FloatArray:
        """Return the capacity by link."""
        nics = np.full(2 * self.servers * self.tracks, NIC_BYTES_PER_S)
        return np.append(nics, np.full(self.tracks, SLOTS_BYTES_PER_S))

    def ring(self, servers: list[int], track: int) -> PricedOption:
        """Return a hierarchical ring over servers: each sends 2(S - 1) / S of the tensor to the next one."""
        sent = 2.0 * (len(servers) - 1) / len(servers)
        following = [*servers[1:], servers[0]]
        flows = [
            CollectiveFlow((self.up(here, track), self.down(there, track)), sent)
            for here, there in zip(servers, following, strict=True)
        ]
        return PricedOption.of(f"hierarchical-ring {track}", flows)

    def aggregation(self, servers: list[int], track: int) -> PricedOption:
        """Return hierarchical in-network aggregation: each server sends the tensor to the switch and receives it."""
        flows = [
            CollectiveFlow((link,), 1.0)
            for server in servers
            for link in (self.up(server, track), self.down(server, track))
        ]
        return PricedOption.of(f"hierarchical-ina {track}", [*flows, CollectiveFlow((self.slots(track),), 1.0)])


def priced_options_of(unit: Unit, span: int, seed: int) -> list[list[PricedOption]]:
    """Return the options of the groups: a ring and aggregation on each track, over `span` random servers."""
    draw = np.random.default_rng([seed, 77])
    found = []
    for _ in range(GROUPS):
        servers = sorted(draw.choice(unit.servers, span, replace=False).tolist())
        found.append([make(servers, track) for make in (unit.ring, unit.aggregation) for track in range(unit.tracks)])
    return found


def run_cell(cell: Cell, end_s: float = END_S) -> Record:
    """Run a cell: groups of `span` servers, and other traffic in bursts."""
    unit, span = Unit(), int(cell.settings["span"])
    priced_options = priced_options_of(unit, span, cell.seed)
    capacity, traffic = unit.capacity_bytes_per_s(), TensorTraffic(background=cell.settings["background"])
    idle_s = [min(priced.idle_s(capacity) for priced in choices) for choices in priced_options]
    only = {RINGS: "hierarchical-ring", AGGREGATION: "hierarchical-ina"}.get(cell.policy, "")
    priced_options = [
        [priced for priced in choices if priced.option.name.startswith(only)] for choices in priced_options
    ]
    scheduler = _scheduler(cell, priced_options, capacity)
    shared = range(2 * unit.servers * unit.tracks)
    reduced = AllReduceSimulation(priced_options, idle_s, capacity, scheduler, traffic, cell.seed, shared).run(end_s)
    config = {"end_s": end_s, "nic_bytes_per_s": NIC_BYTES_PER_S, "slots_bytes_per_s": SLOTS_BYTES_PER_S}
    return Record(
        key=cell.key,
        cell=cell,
        config=config | {"groups": GROUPS, "traffic": msgspec.to_builtins(traffic)},
        summary=_summary(cell, reduced, end_s),
        figures=figures_of(reduced, end_s),
    )


def _scheduler(cell: Cell, priced_options: list[list[PricedOption]], capacity: FloatArray) -> AllReduceScheduler:
    options = [[priced.option for priced in choices] for choices in priced_options]
    if cell.policy == TABLE:
        return PeriodicTable(options, capacity, TABLE_PERIOD_S)
    policy = cell.policy if cell.policy not in (STALE, RINGS, AGGREGATION) else "outstanding"
    if cell.policy == STALE:
        return SchedulerReplicas([CollectiveScheduler(options, capacity, policy) for _ in range(REPLICAS)], SYNC_EVERY)
    return CollectiveScheduler(options, capacity, policy, cell.seed)


def figures_of(reduced: Reduced, end_s: float) -> dict[str, float]:
    """Return the numbers of a run by name and unit."""
    slowdown = np.array(reduced.slowdown)
    p50, p99 = np.quantile(slowdown, (0.5, 0.99)).tolist()
    aggregated = sum(name.startswith("hierarchical-ina") for name in reduced.options)
    return {
        "slowdown_mean": float(slowdown.mean()),
        "slowdown_p50": p50,
        "slowdown_p99": p99,
        "reduced_gb_per_s": reduced.nbytes / end_s / 1e9,
        "aggregated_share": aggregated / len(slowdown),
        "time_mean_ms": 1e3 * float(np.mean(reduced.seconds)),
    }


def _summary(cell: Cell, reduced: Reduced, end_s: float) -> Summary:
    """Return the general numbers; an all-reduce is not a request, so most are empty."""
    count = len(reduced.seconds)
    return msgspec.structs.replace(
        no_requests(cell),
        measured=count,
        transfer_s=Spread.of(np.array(reduced.seconds)),
        throughput_per_s=count / end_s,
    )
