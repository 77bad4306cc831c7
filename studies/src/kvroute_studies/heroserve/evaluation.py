"""HeroServe's evaluation: its experiments, and the function that runs a cell of each."""

from __future__ import annotations

from collections.abc import Callable

from kvroute.planner.comparison.cells import Cell, Record
from kvroute_studies.heroserve import (
    run as heroserve,
)
from kvroute_studies.heroserve import (
    serving as heroserve_serving,
)
from kvroute_studies.heroserve import (
    throughput as heroserve_throughput,
)
from kvroute_studies.shared.cells import Experiment

_RUNS: dict[str, tuple[Experiment, Callable[[Cell], Record]]] = {
    one.name: (one, run)
    for one, run in (
        (heroserve_serving.SCALABILITY, heroserve_serving.run_scalability),
        (heroserve_serving.PREDICTION, heroserve_serving.run_prediction),
        (heroserve_serving.LATENCY, heroserve_serving.run_latency),
        (heroserve_throughput.THROUGHPUT, heroserve_throughput.run_throughput),
        (heroserve_throughput.LOSS, heroserve_throughput.run_loss),
        (heroserve_serving.MEMORY, heroserve_serving.run_memory),
        (heroserve.ONLINE, heroserve.run_cell),
    )
}
EXPERIMENTS = {name: one for name, (one, _) in _RUNS.items()}


def run_cell(cell: Cell) -> Record:
    """Run a cell of any of these experiments."""
    return _RUNS[cell.experiment][1](cell)
