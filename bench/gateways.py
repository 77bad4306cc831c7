"""What late or no exchange between gateways costs each policy, simulated: `python -m bench.gateways [--json]`.

`--figure FILE` draws mean TTFT over the delay of the exchange. Arrivals of the generated trace, which come in groups
every 3 s, are spread evenly at random over these 3 s: requests that arrive at the same instant at different gateways
cannot know of each other, whatever the exchange is.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from bench.measurement import ROOT, Row, show

from kvroute.comparison.workload import Workload
from kvroute.control import ControlSpec
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSettings
from kvroute.sim.workload.trace import Trace
from kvroute.topology import load

CLUSTER = ROOT / "examples" / "fat-tree-64gpu.yaml"
POLICIES = ("round-robin", "cla", "netkv", "foresight")
DELAYS_S: tuple[float | None, ...] = (0.0, 0.005, 0.05, 0.5, None)
"""None: no exchange, engines' metrics alone."""
GATEWAYS = {4: DELAYS_S, 100: (0.005, None)}
"""Delays that are simulated with each number of gateways."""
REQUESTS, GROUP_S = 600, 3.0


class Cell(NamedTuple):
    """One simulation."""

    policy: str
    gateways: int
    sync_s: float | None
    seed: int


def spread(trace: Trace, seed: int) -> Trace:
    """The trace with each arrival at a random time of its group."""
    late_s = np.random.default_rng(seed).uniform(0.0, GROUP_S, len(trace.requests)).tolist()
    moved = [
        msgspec.structs.replace(request, at_s=request.at_s + late)
        for request, late in zip(trace.requests, late_s, strict=True)
    ]
    return replace(trace, requests=tuple(sorted(moved, key=lambda request: request.at_s)))


def ttft_s(cell: Cell) -> float:
    """Mean TTFT of one simulation."""
    workload = Workload(generated_requests=REQUESTS, requests=REQUESTS)
    settings = SimSettings(gateways=cell.gateways, sync_s=cell.sync_s)
    trace = spread(workload.of_seed(cell.seed), cell.seed)
    run = simulate(load(CLUSTER), trace, ControlSpec(decode=cell.policy), settings, seed=cell.seed)
    assert run.summary.ttft_s.mean is not None, "some requests have a first token"
    return run.summary.ttft_s.mean


def named(sync_s: float | None) -> str:
    """A delay as text."""
    return "none" if sync_s is None else f"{1e3 * sync_s:g} ms"


def measured(seeds: int, workers: int | None) -> dict[tuple[str, int, float | None], float]:
    """Mean TTFT over the seeds of each policy, number of gateways and delay."""
    kinds: list[tuple[str, int, float | None]] = [(policy, 1, 0.0) for policy in POLICIES]
    kinds += [(policy, count, sync) for policy in POLICIES for count, delays in GATEWAYS.items() for sync in delays]
    cells = [Cell(*kind, seed) for kind in kinds for seed in range(seeds)]
    with ProcessPoolExecutor(max_workers=workers) as pool:
        found = dict(zip(cells, pool.map(ttft_s, cells), strict=True))
    return {kind: statistics.mean(found[Cell(*kind, seed)] for seed in range(seeds)) for kind in kinds}


def draw(path: Path, found: dict[tuple[str, int, float | None], float]) -> None:
    """Draw mean TTFT over the delay, with one panel for each number of gateways."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(GATEWAYS), figsize=(9, 3.6), layout="constrained")
    for panel, (count, delays) in zip(panels, GATEWAYS.items(), strict=True):
        for policy in POLICIES:
            (line,) = panel.plot([found[policy, count, delay] for delay in delays], marker="o", label=policy)
            panel.axhline(found[policy, 1, 0.0], color=line.get_color(), linestyle=":", linewidth=1)
        panel.set_title(f"{count} gateways (dotted: one gateway)", fontsize=10)
        panel.set_xticks(range(len(delays)), [named(delay) for delay in delays])
        panel.set_xlabel("delay of the exchange")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean TTFT [s]")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Simulate, then print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    found = measured(options.seeds, options.workers)
    if options.figure is not None:
        draw(options.figure, found)
    note = f"{REQUESTS} requests, {options.seeds} seeds, {CLUSTER.name}; peer: one gateway"
    rows = [
        Row(
            measure=f"mean TTFT, {policy}, {count} gateways, exchange {named(sync)}",
            unit="s",
            better="lower",
            ours=mean_s,
            peer=found[policy, 1, 0.0],
            peer_name="one gateway",
            note=note,
        )
        for (policy, count, sync), mean_s in found.items()
        if count > 1
    ]
    show(rows, options.json)


if __name__ == "__main__":
    main()
