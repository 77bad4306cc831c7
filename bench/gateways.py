"""What late or no exchange between gateways costs each policy, simulated: `python -m bench.gateways [--json]`.

`--figure FILE` draws mean TTFT over the delay of the exchange. Arrivals of the generated trace, which come in groups
every 3 s, are spread evenly at random over these 3 s: requests that arrive at the same instant at different gateways
cannot know of each other, whatever the exchange is.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from bench.measurement import ROOT, Row, show

from kvroute.control import ControlSpec
from kvroute.planner.comparison.requests import Workload
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
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
    settings = SimSpec(gateways=cell.gateways, sync_s=cell.sync_s)
    trace = spread(workload.of_seed(cell.seed), cell.seed)
    run = simulate(load(CLUSTER), trace, ControlSpec(decode=cell.policy), settings, seed=cell.seed)
    assert run.summary.ttft_s.mean is not None, "some requests have a first token"
    return run.summary.ttft_s.mean


def named(sync_s: float | None) -> str:
    """A delay as text."""
    return "none" if sync_s is None else f"{1e3 * sync_s:g} ms"


Kind = tuple[str, int, float | None]
"""Policy, number of gateways, delay of the exchange in seconds."""


def measured(
    policies: Sequence[str], seeds: int, delays_s: Sequence[float | None] | None, workers: int | None
) -> dict[Kind, list[float]]:
    """Mean TTFT by seed of each policy, number of gateways and delay. Args: `delays_s`: only these; None: all."""
    kinds: list[Kind] = [(policy, 1, 0.0) for policy in policies]
    kinds += [
        (policy, count, sync)
        for policy in policies
        for count, delays in GATEWAYS.items()
        for sync in delays
        if delays_s is None or sync in delays_s
    ]
    cells = [Cell(*kind, seed) for kind in kinds for seed in range(seeds)]
    with ProcessPoolExecutor(max_workers=workers) as pool:
        found = dict(zip(cells, pool.map(ttft_s, cells), strict=True))
    return {kind: [found[Cell(*kind, seed)] for seed in range(seeds)] for kind in kinds}


def difference(several: Sequence[float], one: Sequence[float]) -> str:
    """Difference of several gateways from one as text: mean over the seeds of the ratio, and its standard error."""
    ratios = [ours / peer for ours, peer in zip(several, one, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return f"{100 * (statistics.mean(ratios) - 1):+.1f} % (standard error {100 * error:.1f})"


def draw(path: Path, found: dict[Kind, float]) -> None:
    """Draw mean TTFT over the delay, with one panel for each number of gateways."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(GATEWAYS), figsize=(9, 3.6), layout="constrained")
    for panel, (count, delays) in zip(panels, GATEWAYS.items(), strict=True):
        for policy in dict.fromkeys(kind[0] for kind in found):
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
    parser.add_argument("--policy", action="append", choices=POLICIES, help="only this one; repeat for several")
    parser.add_argument("--sync-ms", action="append", type=float, help="only this delay; repeat for several")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    if options.sync_ms is not None and options.figure is not None:
        parser.error("the figure needs all delays: leave out --sync-ms or --figure")
    known = [named(delay) for delays in GATEWAYS.values() for delay in delays]
    if unknown := [delay for delay in options.sync_ms or () if named(1e-3 * delay) not in known]:
        parser.error(f"no number of gateways is simulated with --sync-ms {unknown[0]:g}: use 0, 5, 50 or 500")
    delays_s = None if options.sync_ms is None else [1e-3 * delay for delay in options.sync_ms]
    by_seed = measured(options.policy or POLICIES, options.seeds, delays_s, options.workers)
    found = {kind: statistics.mean(ratios) for kind, ratios in by_seed.items()}
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
    several = [kind for kind in by_seed if kind[1] > 1]
    differences = [
        f"{policy}, {count} gateways, exchange {named(sync)}: "
        + difference(by_seed[policy, count, sync], by_seed[policy, 1, 0.0])
        for policy, count, sync in several
    ]
    show(rows, options.json, {"Difference from one gateway, by seed": "\n".join(differences)})


if __name__ == "__main__":
    main()
