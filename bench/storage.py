"""Speed of the storage simulation and how its cost grows with the cluster: `python -m bench.storage [--json]`.

Agents of DualPath's 64K traces, 1,000 for each prefill node, run on 2 prefill and 4 decode nodes and on 48 and 96. A
time counts from the trajectories to the result, without the compilation of the kernels. Memory is that of the whole
process.
"""

from __future__ import annotations

import argparse
import json
import time

from bench.measurement import Row, fresh, median, process_figures, show

SMALL, LARGE = 2, 48
"""Prefill nodes; there are twice as many decode nodes."""
MODES_AGENTS = 256
WALL_MAX_S, RSS_MAX_MB = 180.0, 2_000.0


def run_once(prefill: int) -> dict[str, float]:
    """Return the figures of one run in this process, after a short one that loads compiled code."""
    from kvroute.planner.comparison.cells import Cell
    from kvroute.sim.storage.run import run_agents
    from kvroute_studies.dualpath.run import run_of

    def cell(**settings: float) -> Cell:
        return Cell(
            experiment="dualpath-scale",
            reading="paper",
            profile="ds-660b",
            settings=settings,
            policy="scheduling",
            seed=0,
        )

    run_agents(run_of(cell(prefill=SMALL, agents=8)))
    started = time.perf_counter()
    result = run_agents(run_of(cell(prefill=prefill)))
    wall_s = time.perf_counter() - started
    return {
        "wall_s": wall_s,
        "events": result.events,
        "events_per_s": result.events / wall_s,
        "agents": result.agents,
        "turns": result.turns,
        **process_figures(),
    }


def compare_modes(agents: int) -> dict[str, float]:
    """Return time and job completion time of both modes for 27B agents on one prefill and one decode node."""
    from tests.sim.storage_max_min import run_max_min

    from kvroute.planner.comparison.cells import Cell
    from kvroute.sim.storage.run import run_agents
    from kvroute_studies.dualpath.run import run_of

    def cell(count: int) -> Cell:
        settings = {"length": 32.0, "agents": float(count)}
        return Cell(
            experiment="dualpath-offline",
            reading="paper",
            profile="ds-27b",
            settings=settings,
            policy="scheduling",
            seed=0,
        )

    small, run = run_of(cell(8)), run_of(cell(agents))
    run_agents(small)
    run_max_min(small)
    began = time.perf_counter()
    fast = run_agents(run)
    fast_s = time.perf_counter() - began
    began = time.perf_counter()
    slow = run_max_min(run)
    return {
        "fast_s": fast_s,
        "max_min_s": time.perf_counter() - began,
        "difference": abs(fast.end_s / slow.end_s - 1),
    }


def rows(repeats: int) -> list[Row]:
    """Return medians of both clusters, measured in turn, each in a fresh process."""
    small, large, modes = [], [], []
    for _ in range(repeats):
        modes.append(fresh("bench.storage", "--modes", MODES_AGENTS))
        small.append(fresh("bench.storage", "--one", SMALL))
        large.append(fresh("bench.storage", "--one", LARGE))
    where = f"{LARGE}P{2 * LARGE}D, {large[0]['agents']:,.0f} agents"
    note = f"{where}: {large[0]['turns']:,.0f} turns, {large[0]['events']:,.0f} events"
    small_name = f"{SMALL}P{2 * SMALL}D"
    return [
        Row(
            measure=f"time of a storage simulation, {where}",
            unit="s",
            better="lower",
            ours=median(large, "wall_s"),
            target=WALL_MAX_S,
            note=note,
        ),
        Row(
            measure=f"events per second, {where}",
            unit="1/s",
            better="higher",
            ours=median(large, "events_per_s"),
            peer=median(small, "events_per_s"),
            peer_name=small_name,
            note=f"{small_name} has the same kernels and 1/{LARGE // SMALL} of the nodes and agents",
        ),
        Row(
            measure=f"peak memory of that run, {where}",
            unit="MB",
            better="lower",
            ours=median(large, "rss_mb"),
            peer=median(small, "rss_mb"),
            peer_name=small_name,
            target=RSS_MAX_MB,
        ),
        Row(
            measure=f"time of {MODES_AGENTS} agents on 1P1D",
            unit="s",
            better="lower",
            ours=median(modes, "fast_s"),
            peer=median(modes, "max_min_s"),
            peer_name="max-min mode",
        ),
        Row(
            measure="job completion time of that run against the max-min mode's",
            unit="difference",
            better="lower",
            ours=median(modes, "difference"),
            target=0.05,
        ),
    ]


def main() -> None:
    """Print the rows, or the figures of one run for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--modes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_once(given.one)))
    elif given.modes:
        print(json.dumps(compare_modes(given.modes)))
    else:
        show(rows(given.repeats), given.json)


if __name__ == "__main__":
    main()
