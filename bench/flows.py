"""Speed of the flow network: events per second at four cluster sizes, compared with a plain Python definition.

Run `python bench/flows.py`; `--json` prints one JSON document. Both versions get the same flows. An event is a start or
a finish, including the new solution of the rates. All times are CPU time, which other load on the machine affects less.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from kvroute.flows import FlowNetwork, fill_to_the_end, max_min_rates

SHARDS = 4
REPEATS = 3
SIZES = ((16, 5, 3000, 60), (64, 8, 3000, 60), (128, 12, 3000, 60), (1024, 100, 1500, 40), (1024, 400, 800, 40))
"""Instances, transfers in flight, transfers in total, transfers whose completion times the definition checks."""


@dataclass(frozen=True, slots=True)
class Load:
    """A fabric and timed transfers of SHARDS flows each, of which `in_flight` run at the same time."""

    capacities: list[float]
    paths: list[list[int]]
    nbytes: list[float]
    starts_s: list[float]


def load(instances: int, in_flight: int, transfers: int) -> Load:
    """Build racks of 8 instances with 4 NICs of 100 Gbps each; 8 uplinks of 50 Gbps per rack, 100 Gbps per 4 racks."""
    draw, capacities = random.Random(instances), list[float]()

    def links(count: int, gbps: float) -> list[int]:
        capacities.extend([gbps * 1e9 / 8.0] * count)
        return list(range(len(capacities) - count, len(capacities)))

    nics = [(links(SHARDS, 100), links(SHARDS, 100)) for _ in range(instances)]
    racks = [(links(8, 50), links(8, 50)) for _ in range((instances + 7) // 8)]
    pods = [(links(8, 100), links(8, 100)) for _ in range((len(racks) + 3) // 4)]
    made = Load(capacities, [], [], [])
    for transfer in range(transfers):
        source, target = draw.sample(range(instances), 2)
        nbytes = draw.uniform(0.5e9, 2e9)
        for shard in range(SHARDS):
            path = [nics[source][0][shard], nics[target][1][shard]]
            for group, size in ((racks, 8), (pods, 32)):
                if source // size != target // size:
                    path += [draw.choice(group[source // size][0]), draw.choice(group[target // size][1])]
            made.paths.append(path)
            made.nbytes.append(nbytes)
            made.starts_s.append(transfer * 0.25 / in_flight)
    return made


def closed_loop(work: Load, in_flight: int) -> tuple[float, dict[str, list[float]]]:
    """Keep `in_flight` transfers running; return events per second, and seconds of every call by name."""
    net = FlowNetwork(np.array(work.capacities))
    spent_s: dict[str, list[float]] = {"start_many": [], "next_finish": [], "advance": []}
    total, begun, done = len(work.paths), 0, 0
    start_s = time.process_time()
    while done < total:
        while begun < total and begun - done < in_flight * SHARDS:
            at = slice(begun, begun + SHARDS)
            tick_s = time.process_time()
            net.start_many(range(begun, begun + SHARDS), work.paths[at], work.nbytes[at])
            spent_s["start_many"].append(time.process_time() - tick_s)
            begun += SHARDS
        ticks_s = [time.process_time()]
        upcoming = net.next_finish()
        ticks_s.append(time.process_time())
        assert upcoming is not None
        done += len(net.advance(upcoming[0]))
        ticks_s.append(time.process_time())
        for name, (a, b) in zip(("next_finish", "advance"), pairwise(ticks_s), strict=True):
            spent_s[name].append(b - a)
    return 2 * total / (time.process_time() - start_s), spent_s


def ends(work: Load) -> list[float]:
    """Return finish times from the flow network."""
    net, ends_s = FlowNetwork(np.array(work.capacities)), [0.0] * len(work.paths)

    def run(to: float) -> None:
        while (upcoming := net.next_finish()) is not None and upcoming[0] <= to:
            for flow in net.advance(upcoming[0]):
                ends_s[flow] = upcoming[0]

    for flow, (path, nbytes, start_s) in enumerate(zip(work.paths, work.nbytes, work.starts_s, strict=True)):
        run(start_s)
        net.advance(start_s)
        net.start(flow, path, nbytes)
    run(float("inf"))
    return ends_s


def definition_solve_s(work: Load, in_flight: int) -> float:
    """Return the seconds of one solution by the definition with `in_flight` transfers: the least cost of an event."""
    paths, spent_s = work.paths[: in_flight * SHARDS], list[float]()
    while len(spent_s) < REPEATS and sum(spent_s) < 1.0:
        tick_s = time.process_time()
        max_min_rates(paths, [1.0] * len(paths), work.capacities)
        spent_s.append(time.process_time() - tick_s)
    return statistics.median(spent_s)


def worst_error(work: Load) -> float:
    """Return the largest relative difference of a transfer's duration from the definition's."""
    ones = [1.0] * len(work.paths)
    expected_s = fill_to_the_end(work.paths, ones, work.capacities, work.nbytes, work.starts_s)
    pairs = zip(ends(work), expected_s, work.starts_s, strict=True)
    return max(abs(mine - true) / (true - start) for mine, true, start in pairs)


def measure(instances: int, in_flight: int, transfers: int, checked: int) -> dict[str, float]:
    """Return one row of the table: medians of REPEATS runs, but means for a call, whose times have a long tail."""
    work = load(instances, in_flight, transfers)
    runs = [closed_loop(work, in_flight) for _ in range(REPEATS)]
    mine_per_s = statistics.median(run[0] for run in runs)
    definition_s = definition_solve_s(work, in_flight)
    return {
        "instances": instances,
        "links": len(work.capacities),
        "flows": in_flight * SHARDS,
        "events_per_s": mine_per_s,
        "plain_per_s": 1.0 / definition_s,
        "ratio": mine_per_s * definition_s,
        **{
            f"{name}_us": 1e6 * statistics.median(statistics.fmean(run[1][name]) for run in runs) for name in runs[0][1]
        },
        "worst_error": worst_error(load(instances, in_flight, checked)),
    }


def main() -> None:
    """Print the table, or one JSON document."""
    closed_loop(load(16, 2, 20), 2)
    rows = [measure(*size) for size in SIZES]
    if "--json" in sys.argv:
        print(msgspec.json.encode({"flows": rows}).decode())
        return
    print("  ".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>14.4g}" for value in row.values()))


if __name__ == "__main__":
    main()
