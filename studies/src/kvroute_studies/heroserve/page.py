"""Pages of HeroServe's placements and all-reduces: findings, ranges over the baselines, one figure, and all cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvroute.planner.comparison.cells import Record
from kvroute.report.page import picture
from kvroute_studies.heroserve.figures import FIGURES
from kvroute_studies.heroserve.tables import cells_grid, heroserve_findings, range_grids
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.page import write_results

_BASELINES = (
    "ring, multi-rail-ring: DistServe (groups stay on a server if the model fits), with one ring or one ring per NIC",
    "switchml, atp-5, atp-25: the same, or flat aggregation where it is faster; 0, 5, 25 % of packets find no slot",
    "hierarchical-ring: any groups, without aggregation; heroserve: any groups and schemes",
)
_NOTES = {
    "heroserve-scalability": (
        *_BASELINES,
        "span: servers of every group, each with an equal part of its GPUs; chosen: the planner chooses the groups",
        "wire: bytes of an element in packets; tensors have 2",
    ),
    "heroserve-prediction": (
        *_BASELINES,
        "span: servers of every group; load: share of the rate at which the planner predicts 90 % within both SLOs",
        "fp16 in packets; requests that find no KV memory are rejected and miss their SLOs",
    ),
    "heroserve-latency": (
        "one prefill and one decode instance on the same GPUs for all policies; switchml and atp always aggregate",
        "heroserve uses the scheme that is fastest for the batch at the simulated rate",
        "load: share of the rate that hierarchical-ring sustains by the planner's formulas",
    ),
    "heroserve-ina-throughput": (
        "profiles: type of the elements in packets, and slots for each NIC",
        "one all-reduce on idle links, by flows; switchml and atp always aggregate, heroserve takes the fastest scheme",
    ),
    "heroserve-ina-loss": (
        "kvroute's worker and switch, packet by packet in virtual time: 100 Gbps, 3 us each way, 1 us in the switch",
        "each data packet and each result is lost independently; a lost one holds its slot until it is sent again",
        "model: rate of the NIC without headers, or slots x packet / round trip; rings under loss are not modelled",
    ),
    "heroserve-memory": (
        *_BASELINES,
        "fp16 in packets; simulated at the rate that the planner predicts for each placement",
        "memory for prompt and output is reserved from the end of the prefill to the last token",
    ),
}


def write_heroserve(experiment: Experiment, records: Sequence[Record], out: Path) -> Path:
    """Write `out`/report.html and the figure; return the path of the page. Raises InputError for an unusable folder."""
    name = experiment.name.removeprefix("heroserve-")
    return write_results(
        experiment,
        records,
        out,
        found=heroserve_findings(experiment, records),
        pictures=[picture(FIGURES[experiment.name](experiment, records), out, name, "Mean over seeds")],
        tables=[*range_grids(experiment, records), cells_grid(experiment, records)],
        notes=_NOTES[experiment.name],
    )
