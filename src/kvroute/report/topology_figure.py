"""Draws a cluster: nested boxes for datacenters, pods, racks and nodes, instances by role, uplinks with capacities."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from kvroute.topology import Cluster, duration_text
from kvroute.topology.schema import Uplinks
from kvroute.topology.tree import ROLE_COLOURS, Domain, domain_tree, tier_rows, uplinks_text
from kvroute.types import TIER_COUNT, InputError, Instance
from kvroute_engine.files.units import about_bandwidth

_FILL = {"datacenter": "#ffffff", "pod": "#eef2f6", "rack": "#dfe6ed", "node": "#ffffff"}
_EDGE = {"datacenter": "#8796a5", "pod": "#a9b6c3", "rack": "#a9b6c3", "node": "#b9c4cf"}
_INK, _WIRE = "#26323d", "#5b6b7a"
_LABELLED_MOST = 64
"""Maximum number of instances for which cells show names."""
_CELL = (1.5, 0.62)
_SMALL_CELL = (0.55, 0.42)
_GAP, _HEAD, _WIRES = 0.22, 0.5, 0.95
_STOPS = (0.0, 3.0, 5.2, 6.9)
"""Column positions of the table below the picture."""
_MOST = 20_000


@dataclass(frozen=True, slots=True)
class _Box:
    """A domain with its size and its children's offsets from its lower left corner, in drawing units."""

    domain: Domain
    width: float
    height: float
    children: tuple[tuple[float, float, _Box], ...] = ()
    rails: tuple[float, ...] = ()
    """Heights of the bars where the children's uplinks end, one per row of children."""


def draw_topology(cluster: Cluster, path: Path | str) -> None:
    """Write the picture to `path`; the extension (.png, .svg, .pdf) selects the format.

    Raises:
        InputError: the extension is not supported, the path cannot be written, or there are too many instances to draw.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(
            f"{path.suffix or 'no ending'!r} is not a picture format", where=str(path), hint="use .png or .svg"
        )
    figure = topology_figure(cluster)
    try:
        figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.15)
    except OSError as error:
        raise InputError(
            f"the picture cannot be written: {error.strerror}", where=str(path), hint="check the path"
        ) from error


def topology_figure(cluster: Cluster) -> Figure:
    """Draw a cluster; raises InputError above 20000 instances."""
    count = len(cluster.instances)
    if count > _MOST:
        raise InputError(
            f"{count} instances are too many to draw", hint="use `kvroute topology show FILE` without a picture"
        )
    labelled = count <= _LABELLED_MOST
    sites = [_layout(child, labelled) for child in domain_tree(cluster).children]
    width = sum(site.width for site in sites) + _site_gap(cluster) * (len(sites) - 1)
    height = max(site.height for site in sites)
    foot = 0.42 * TIER_COUNT + 1.5
    scale = min(0.62, 44 / max(width, height + foot))
    figure = Figure(figsize=(max(width * scale, 6.4), (height + foot) * scale + 0.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_aspect("equal")
    axes.axis("off")
    size = max(5.0, 15.5 * scale)
    left = 0.0
    for site in sites:
        _draw(axes, site, left, height - site.height, labelled, size)
        left += site.width + _site_gap(cluster)
    _draw_wan(axes, cluster, sites, height, size)
    wide = max(width, 6.4 / scale)
    _draw_foot(axes, cluster, size)
    axes.text(0, height + 0.35, cluster.name, fontsize=size * 1.35, weight="bold", color=_INK, va="bottom")
    axes.set_xlim(-0.3, wide + 0.3)
    axes.set_ylim(-foot, height + 1.2)
    return figure


def _site_gap(cluster: Cluster) -> float:
    return 3.4 if cluster.file.wan else 1.0


def _layout(domain: Domain, labelled: bool) -> _Box:
    if domain.kind == "node":
        return _node_box(domain, labelled)
    boxes = [_layout(child, labelled) for child in domain.children]
    if not domain.name and len(boxes) == 1:
        return boxes[0]
    wired = any(child.uplinks for child in _exits(domain))
    columns = _columns(domain, boxes)
    rows = [boxes[first : first + columns] for first in range(0, len(boxes), columns)]
    inset = _GAP + (0.35 if len(rows) > 1 and wired else 0.0)
    width = max(sum(box.width + _GAP for box in row) for row in rows) + inset
    height = _HEAD + sum(max(box.height for box in row) + _GAP + (_WIRES if wired else 0) for row in rows)
    height += 0.15 if wired else 0.0
    placed, rails, top = [], [], height - _HEAD
    for row in rows:
        if wired:
            rails.append(top - 0.1)
            top -= _WIRES
        left, tallest = inset, max(box.height for box in row)
        for box in row:
            placed.append((left, top - box.height, box))
            left += box.width + _GAP
        top -= tallest + _GAP
    spare = max(0.0, _least_width(domain) - width) / 2
    centred = tuple((left + spare, bottom, box) for left, bottom, box in placed)
    return _Box(domain, width + 2 * spare, height, centred, tuple(rails))


def _least_width(domain: Domain) -> float:
    """Return the width needed for the name, and for the text of the uplinks to the right of the middle."""
    lines = _wire_text(domain.uplinks, 0.0).split("\n") if domain.uplinks else [""]
    return max(0.17 * len(domain.name) + 0.5, 2 * max(map(_text_width, lines)))


def _text_width(text: str) -> float:
    return 0.125 * len(text) + 0.1


def _wire_text(uplinks: Uplinks, room: float) -> str:
    """Return the uplinks on one line if `room` is enough, otherwise on two."""
    text = uplinks_text(uplinks)
    return text if _text_width(text) <= room else text.replace("\N{MULTIPLICATION SIGN} ", "\N{MULTIPLICATION SIGN}\n")


def _exits(domain: Domain) -> list[Domain]:
    """Return the domains below the domain's switch: its children, or theirs if a level is left out."""
    return [exit_ for child in domain.children for exit_ in ([child] if child.name else _exits(child))]


def _columns(domain: Domain, boxes: list[_Box]) -> int:
    """Return the number of columns: nodes fill columns, racks and pods rows, so a domain is about as wide as a page."""
    if len(boxes) <= (4 if domain.kind == "rack" else 2):
        return 1 if domain.kind == "rack" else len(boxes)
    widest, tallest = max(box.width for box in boxes), max(box.height for box in boxes)
    aspect = {"rack": 0.45, "pod": 1.7}.get(domain.kind, 1.8)

    def ugliness(columns: int) -> float:
        rows = -(-len(boxes) // columns)
        empty = rows * columns / len(boxes) - 1
        return 3 * empty + abs(math.log(columns * (widest + _GAP) / (rows * (tallest + _GAP)) / aspect))

    return min(range(1, len(boxes) + 1), key=ugliness)


def _node_box(node: Domain, labelled: bool) -> _Box:
    wide, high = _CELL if labelled else _SMALL_CELL
    count = max(len(node.instances), 1)
    columns = min(count, 2 if labelled else 4)
    rows = -(-count // columns)
    head = _HEAD if labelled else 0.12
    width = columns * (wide + 0.1) + 0.2
    return _Box(node, width, head + rows * (high + 0.1) + 0.06)


def _draw(axes: Axes, box: _Box, left: float, bottom: float, labelled: bool, size: float) -> None:
    domain = box.domain
    if domain.name:
        _frame(axes, left, bottom, box.width, box.height, _FILL[domain.kind], _EDGE[domain.kind])
    if domain.kind == "node":
        _draw_node(axes, box, left, bottom, labelled, size)
        return
    if domain.name:
        grade = {"datacenter": 1.0, "pod": 0.95, "rack": 0.85}[domain.kind]
        axes.text(
            left + 0.16,
            bottom + box.height - 0.12,
            domain.name,
            fontsize=size * grade,
            color=_INK,
            va="top",
            weight="bold",
        )
    _draw_rails(axes, box, left, bottom, size)
    for x, y, child in box.children:
        _draw(axes, child, left + x, bottom + y, labelled, size)


def _frame(axes: Axes, left: float, bottom: float, width: float, height: float, fill: str, edge: str) -> None:
    rounded = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=rounded, fc=fill, ec=edge, lw=0.8))


def _draw_rails(axes: Axes, box: _Box, left: float, bottom: float, size: float) -> None:
    """Draw the switch of a domain as connected bars above the rows, each with the uplinks of the row's children."""
    for rail in box.rails:
        rising = [(x, y, child) for x, y, child in box.children if y < rail and y + child.height > rail - _WIRES - 0.05]
        ends = [x + child.width / 2 for x, _, child in rising]
        start = 0.3 if len(box.rails) > 1 else min(ends) - 0.4
        axes.plot(
            [left + start, left + max(ends) + 0.4], [bottom + rail] * 2, color=_WIRE, lw=2.4, solid_capstyle="round"
        )
        for x, y, child in rising:
            middle, top = left + x + child.width / 2, bottom + y + child.height
            axes.plot([middle, middle], [top, bottom + rail], color=_WIRE, lw=1.3)
            if child.domain.uplinks:
                text, half = _wire_text(child.domain.uplinks, child.width / 2), (top + bottom + rail) / 2
                axes.text(middle + 0.1, half, text, fontsize=size * 0.75, color=_WIRE, va="center", linespacing=1.1)
    if len(box.rails) > 1:
        axes.plot([left + 0.3] * 2, [bottom + box.rails[0], bottom + box.rails[-1]], color=_WIRE, lw=2.4)


def _draw_node(axes: Axes, box: _Box, left: float, bottom: float, labelled: bool, size: float) -> None:
    wide, high = _CELL if labelled else _SMALL_CELL
    columns = max(1, round((box.width - 0.2) / (wide + 0.1)))
    top = bottom + box.height - 0.06
    if labelled:
        axes.text(left + 0.14, top - 0.06, box.domain.name, fontsize=size * 0.75, color=_INK, va="top")
        top -= _HEAD - 0.06
    for position, instance in enumerate(box.domain.instances):
        x = left + 0.15 + (position % columns) * (wide + 0.1)
        y = top - 0.05 - (position // columns) * (high + 0.1) - high
        _draw_instance(axes, instance, x, y, (wide, high), size * 0.72 if labelled else 0)


def _draw_instance(axes: Axes, instance: Instance, x: float, y: float, cell: tuple[float, float], size: float) -> None:
    colour = ROLE_COLOURS[instance.role]
    _frame(axes, x, y, *cell, fill=colour, edge=colour)
    if size:
        fit = min(1.0, 11.5 / max(len(instance.name), 1))
        middle = (x + cell[0] / 2, y + cell[1] / 2)
        axes.text(*middle, instance.name, fontsize=size * fit, color="white", ha="center", va="center")


def _draw_wan(axes: Axes, cluster: Cluster, sites: list[_Box], height: float, size: float) -> None:
    """Draw links between datacenters at the height of their names, one below the other."""
    lefts = np.cumsum([0.0] + [site.width + _site_gap(cluster) for site in sites])
    position = {site.domain.name: number for number, site in enumerate(sites)}
    for row, wan in enumerate(cluster.file.wan):
        if wan.source not in position or wan.target not in position:
            continue
        first, last = sorted((position[wan.source], position[wan.target]))
        start, end, y = lefts[first] + sites[first].width, lefts[last], height - 0.9 - 1.1 * row
        axes.annotate(
            "",
            (end, y),
            (start, y),
            arrowprops={"arrowstyle": "<->", "color": _INK, "lw": 1.6, "shrinkA": 0, "shrinkB": 0},
        )
        text = f"{uplinks_text(Uplinks(count=wan.count, bytes_per_s=wan.bytes_per_s))}\n{duration_text(wan.latency_s)}"
        middle = lefts[last] - _site_gap(cluster) / 2
        axes.text(middle, y + 0.1, text, fontsize=size * 0.8, color=_INK, ha="center", va="bottom")


def _draw_foot(axes: Axes, cluster: Cluster, size: float) -> None:
    """Draw the roles, and the bandwidth of each tier between prefill and decode."""
    roles = Counter(instance.role for instance in cluster.instances)
    left = 0.0
    for role, colour in ROLE_COLOURS.items():
        if roles[role]:
            _frame(axes, left, -0.6, 0.6, 0.3, colour, colour)
            text = f"{roles[role]} {role}"
            axes.text(left + 0.75, -0.45, text, fontsize=size * 0.85, color=_INK, va="center")
            left += 1.3 + 0.19 * len(text)
    heads = ("prefill to decode", "bandwidth", "latency", "pairs")
    for x, text in zip(_STOPS, heads, strict=True):
        axes.text(x, -0.95, text, fontsize=size * 0.75, color=_WIRE, va="top", weight="bold")
    for row, (name, pairs, bytes_per_s, latency_s) in enumerate(tier_rows(cluster)):
        y = -1.4 - 0.42 * row
        cells = (name, about_bandwidth(bytes_per_s), duration_text(latency_s), str(pairs))
        for x, text in zip(_STOPS, cells, strict=True):
            axes.text(x, y, text, fontsize=size * 0.75, color=_INK if pairs else "#9aa6b1", va="top")
