"""Figure of a placement: the GPUs of every server, by rack, coloured by phase, with the groups as lines around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kvroute.planner.placement.plan import Planned
from kvroute.report.drawing import FAINT, INK, style
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.tree import uplinks_text

_COLOURS = {
    "prefill": ("#0072b2", "#56b4e9", "#9fc9e8", "#2f5d8a"),
    "decode": ("#d55e00", "#e69f00", "#f2c14e", "#a8480a"),
}
"""Shades of the instances of a phase, in turn."""
_LIGHT = {"#f2c14e", "#9fc9e8", "#e69f00", "#56b4e9"}
"""Colours on which text is dark."""
_USED, _FREE = "#8796a5", "#ffffff"
_SERVERS_MAX = 96
"""Servers that are drawn; of larger clusters the first racks."""
_COLUMNS = 4
"""Racks side by side."""


@dataclass(frozen=True, slots=True)
class _Cell:
    colour: str
    label: str


def placement_figure(planned: Planned) -> Figure:
    """Draw the servers of the first racks, one square per GPU, with the number of its instance."""
    cluster, cells = planned.problem.cluster, _cells(planned)
    racks: dict[int, list[int]] = {}
    for node in range(len(cluster.places.nodes)):
        racks.setdefault(cluster.places.domains[node][1], []).append(node)
    shown, count = list[list[int]](), 0
    for nodes in racks.values():
        if shown and count + len(nodes) > _SERVERS_MAX:
            break
        shown.append(nodes)
        count += len(nodes)
    width = max(cluster.places.nodes[node].gpus for nodes in shown for node in nodes) + 3.2
    rows = [shown[first : first + _COLUMNS] for first in range(0, len(shown), _COLUMNS)]
    height = sum(max(map(len, row)) + 1.6 for row in rows)
    columns = min(len(shown), _COLUMNS)
    with style():
        scale = min(0.34, 11.0 / (width * columns))
        figure = Figure(figsize=(max(width * columns * scale, 5.2), height * scale + 0.9))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set_aspect("equal")
        axes.axis("off")
        top = 0.0
        for row in rows:
            for column, nodes in enumerate(row):
                _draw_rack(axes, planned, nodes, cells, column * width, top, scale)
            top -= max(map(len, row)) + 1.6
        _legend(axes, planned, len(racks) - len(shown), top)
        axes.set_xlim(-0.3, max(width * columns, 5.2 / scale))
        axes.set_ylim(top - 1.4, 1.2)
    return figure


def _cells(planned: Planned) -> dict[Gpu, _Cell]:
    """Return the colour of every GPU that is in use, and its instance with the stage, such as `p0.3`."""
    found = {gpu: _Cell(_USED, "") for shards in planned.problem.cluster.shards for gpu in shards}
    counts = {"prefill": 0, "decode": 0}
    for instance in planned.instances:
        phase = instance.instance.phase
        number, shades = counts[phase], _COLOURS[phase]
        counts[phase] += 1
        for stage, gpus in enumerate(instance.instance.stages):
            label = f"{phase[0]}{number}" + (f".{stage}" if len(instance.instance.stages) > 1 else "")
            found.update((gpu, _Cell(shades[number % len(shades)], label)) for gpu in gpus)
    return found


def _draw_rack(
    axes: Axes, planned: Planned, nodes: Sequence[int], cells: dict[Gpu, _Cell], left: float, top: float, scale: float
) -> None:
    places = planned.problem.cluster.places
    rack, size = places.racks[nodes[0]], max(4.0, 24.0 * scale)
    if rack is not None:
        uplinks = f", uplinks {uplinks_text(rack.uplinks)}" if rack.uplinks else ""
        axes.text(left, top + 0.15, f"{rack.name}{uplinks}", fontsize=size, color=INK, va="bottom")
    for row, node in enumerate(nodes):
        bottom = top - row - 0.95
        axes.text(left, bottom + 0.42, places.nodes[node].name, fontsize=size * 0.8, color=INK, va="center")
        for gpu in range(places.nodes[node].gpus):
            cell = cells.get((node, gpu), _Cell(_FREE, ""))
            x = left + 2.4 + gpu
            axes.add_patch(Rectangle((x, bottom), 0.86, 0.84, facecolor=cell.colour, edgecolor=FAINT, linewidth=0.6))
            if cell.label:
                colour = INK if cell.colour in _LIGHT else "white"
                points = size * (0.95 if len(cell.label) < 4 else 0.7)
                axes.text(x + 0.43, bottom + 0.41, cell.label, fontsize=points, color=colour, ha="center", va="center")


def _legend(axes: Axes, planned: Planned, hidden_racks: int, bottom: float) -> None:
    patches = [
        Patch(color=_COLOURS[phase][0], label=f"{phase}: TP {plan.tp} x PP {plan.pp}, {_scheme(plan.schemes)}")
        for phase, plan in planned.report.phases.items()
    ]
    if planned.problem.cluster.shards:
        patches.append(Patch(color=_USED, label="in use by the file's instances"))
    patches.append(Patch(facecolor=_FREE, edgecolor=FAINT, label="free"))
    axes.legend(handles=patches, loc="lower left", ncols=2, frameon=False, fontsize=8)
    if hidden_racks:
        axes.text(0, bottom + 0.4, f"{hidden_racks:,} more racks are not drawn", fontsize=8, color=INK)


def _scheme(schemes: Sequence[str]) -> str:
    names = list(dict.fromkeys(schemes))
    return ", ".join(names[:2]) + (" and others" if len(names) > 2 else "")
