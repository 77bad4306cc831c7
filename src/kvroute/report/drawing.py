"""Style of all figures: colours by policy name, type sizes, scales, and files that are byte-identical on every run."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import hsv_to_rgb, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from kvroute.files.compressed_lines import written_whole
from kvroute.types import InputError

INK, PAPER, FAINT, GRID = "#26323d", "#ffffff", "#7b8894", "#d5dce2"
TIER_COLOURS = ("#1a4a7a", "#3b86b8", "#86bcd8", "#f0a860", "#b5472f")
"""Blue is near, red is far. Lightness increases towards the middle, so neighbours also differ in grey print."""
PART_COLOURS = ("#c9cfd5", "#5b7fa6", "#d55e00", "#f2c14e", "#3f9c7a")
_AXIS_TEXT_PT = 27
"""Height of tick labels and axis label below a panel, in points."""
_HANDLE_IN, _LETTER_IN = 0.62, 0.068
"""Width of a legend's line with its gaps, and of a letter of its label, in inches."""
NO_TOKEN = "no request got a first token"
_HINT = "choose another folder"
AXIS_LABELS = {
    "load": "load, share of capacity",
    "tokens": "prompt length, tokens",
    "oversubscription": "oversubscription, B1 : B3",
    "background": "background traffic, share of capacity",
    "refresh_s": "oracle refresh interval, s",
    "p_share": "share of requests with a shared prefix",
    "gpus": "cluster size, GPUs",
    "agents": "agents",
    "length": "maximum context, thousand tokens",
    "prefill": "prefill nodes",
    "decode": "decode nodes",
    "append": "appended tokens, multiple of the trace's",
    "generate": "generated tokens, multiple of the trace's",
    "window": "window, s",
    "mfu": "MFU of a prefill",
    "buffer": "buffer of a node, GB",
    "storage": "share of the storage NIC's line rate",
    "quota": "compute quota, s",
    "think": "think time, s",
    "kib": "tensor, KiB",
    "slots": "slots",
    "span": "servers of a group",
}
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.hashsalt": "kvroute",
    "svg.fonttype": "path",
    "path.simplify": False,
}


@dataclass(frozen=True, slots=True)
class LineStyle:
    """Style of a policy in all figures: a colour-blind-safe colour, and marker and dashes for grey print."""

    colour: str
    marker: str = "o"
    dashes: Literal["-", "--", "-.", ":"] = "-"


_LINE_STYLES = {
    "round-robin": LineStyle("#8a8a8a", "x", ":"),
    "load-aware": LineStyle("#b8629a", "v", "--"),
    "cache-aware": LineStyle("#c98b00", "^", "--"),
    "cla": LineStyle("#0072b2", "s", "-"),
    "dualpath": LineStyle("#4f7d7a", "d", ":"),
    "netkv-topo": LineStyle("#56b4e9", "D", "-."),
    "netkv-static": LineStyle("#009e73", "P", "-."),
    "netkv": LineStyle("#d55e00", "o", "-"),
    "netkv-queued": LineStyle("#8c4a1d", "X", "--"),
    "foresight": LineStyle("#6a3db8", "*", "-"),
    "foresight-closed": LineStyle("#a98bd0", "h", "--"),
    "foresight-joint": LineStyle("#3d1466", "p", "-."),
    "basic": LineStyle("#8a8a8a", "x", ":"),
    "layerwise": LineStyle("#b8629a", "v", "--"),
    "dual-path": LineStyle("#c98b00", "^", "--"),
    "scheduling": LineStyle("#0072b2", "s", "-"),
    "split-reads": LineStyle("#d55e00", "o", "-"),
    "oracle": LineStyle("#26323d", "*", "-."),
    "ring": LineStyle("#8a8a8a", "x", ":"),
    "multi-rail-ring": LineStyle("#b8629a", "v", "--"),
    "switchml": LineStyle("#c98b00", "^", "--"),
    "atp-5": LineStyle("#009e73", "P", "-."),
    "atp-25": LineStyle("#56b4e9", "D", ":"),
    "hierarchical-ring": LineStyle("#0072b2", "s", "-"),
    "heroserve": LineStyle("#d55e00", "o", "-"),
}


def line_style(policy: str) -> LineStyle:
    """Return the style fixed by the name; an unknown policy gets a colour from a checksum of its name."""
    if policy in _LINE_STYLES:
        return _LINE_STYLES[policy]
    sum32 = crc32(policy.encode())
    colour = to_hex(tuple(hsv_to_rgb((sum32 % 360 / 360, 0.65, 0.45 + 0.2 * (sum32 // 360 % 2))).tolist()))
    return LineStyle(colour, "<>ph*"[sum32 // 720 % 5], "--")


def style() -> AbstractContextManager[None]:
    """Return the context in which figures are created and written."""
    return mpl.rc_context(_STYLE)


def panels(
    rows: int, columns: int, *, width: float, height: float, sharey: bool | str = False
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of rows x columns axes; sizes in inches per panel."""
    figure = Figure(figsize=(width * columns, height * rows + 0.35), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)  # type: ignore[arg-type]  # stubs want a literal
    return figure, [list(row) for row in axes]


def grid(axes: Axes, direction: str = "y") -> None:
    """Draw faint grid lines for one direction."""
    axes.grid(True, axis=direction)  # type: ignore[arg-type]  # "x" or "y"


def policy_legend(figure: Figure, policies: Sequence[str], *, plain_lines: bool = False) -> None:
    """Add one legend above all panels; with `plain_lines` it has neither markers nor dashes."""
    styles = [line_style(policy) for policy in policies]
    handles = [
        Line2D([], [], color=style.colour, linewidth=2.5)
        if plain_lines
        else Line2D([], [], color=style.colour, marker=style.marker, linestyle=style.dashes)
        for style in styles
    ]
    labels = [plain(name) for name in policies]
    figure.legend(handles, labels, loc="outside upper center", ncols=_per_row(labels, figure.get_size_inches()[0]))


def legend_above(figure: Figure, axes: Axes) -> None:
    """Add one legend above all panels with the labels of one of them, in as many rows as fit the figure's width."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=_per_row(labels, figure.get_size_inches()[0]))


def legend_below(axes: Axes, width_in: float) -> None:
    """Add a legend below the axis label, where no curve can cross it. Args: `width_in`: width of the panel, inches."""
    _, labels = axes.get_legend_handles_labels()
    figure = axes.figure
    below = axes.transAxes + ScaledTranslation(0, -_AXIS_TEXT_PT / 72, figure.dpi_scale_trans)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, ncols=_per_row(labels, width_in))


def _per_row(labels: Sequence[str], width_in: float) -> int:
    """Return how many entries of a legend fit side by side; all columns are as wide as the longest label."""
    widest_in = _HANDLE_IN + _LETTER_IN * max(map(len, labels), default=0)
    most = max(1, min(len(labels), int(width_in / widest_in)))
    return -(-len(labels) // -(-len(labels) // most)) if labels else 1  # rows of about equal length


def readable(text: Text) -> None:
    """Surround a text within a panel with the colour of the paper, so that curves behind it do not cross it."""
    text.set_path_effects([withStroke(linewidth=2.5, foreground=PAPER)])
    text.set_zorder(20)


def plain(text: str) -> str:
    """Return the text with `$` escaped, which would start a formula."""
    return text.replace("$", r"\$")


def scale_axis(axes: Axes, values: Sequence[float]) -> None:
    """Set ticks at the swept values; the axis is logarithmic if they span a decade or more."""
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low >= 10
    if logarithmic:
        axes.set_xscale("log")
        margin = (high / low) ** 0.06
        axes.set_xlim(low / margin, high * margin)
    elif high > low:
        axes.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    axes.xaxis.set_major_locator(FixedLocator(list(_apart(values, logarithmic))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))


def _apart(values: Sequence[float], logarithmic: bool) -> list[float]:
    """Return the values whose labels do not touch; the last one is always kept."""
    place = np.log(values) if logarithmic else np.asarray(values, dtype=float)
    span = float(place.max() - place.min()) or 1.0
    kept = [len(values) - 1]
    for index in range(len(values) - 2, -1, -1):
        if (place[kept[-1]] - place[index]) / span >= 0.09:
            kept.append(index)
    return [values[index] for index in reversed(kept)]


def tick_text(value: float) -> str:
    """Format a tick briefly: 65536 is "64k", 0.5 is "0.5"."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:,g}"


def thousands(axis: Axis) -> None:
    """Format numbers as 1,200."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}".replace("-", "−")))


def percent(axis: Axis) -> None:
    """Format shares as percentages, without unneeded decimals."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.6g}%".replace("-", "−")))


def policy_rows(axes: Axes, policies: Sequence[str]) -> None:
    """Label the rows of horizontal bars with policies, the first on top."""
    axes.set_yticks(range(len(policies)), [plain(policy) for policy in policies])
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    thousands(axes.xaxis)
    grid(axes, "x")


def log_if_wide(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic y axis if the values (above 0) span 1.5 decades, otherwise a linear one that starts at 0."""
    if not values:
        return
    if min(values) > 0 and max(values) / min(values) >= 30:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, max(values) * 1.08 or 1)
    thousands(axes.yaxis)


def nothing(figure: Figure, text: str) -> Figure:
    """Write in an empty figure why it is empty."""
    figure.text(0.5, 0.5, text, ha="center", va="center", color=FAINT)
    return figure


def svg(figure: Figure) -> str:
    """Return the figure as SVG text, byte-identical for the same figure."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return buffer.getvalue().decode()


def inline(text: str, name: str, label: str) -> str:
    """Adapt SVG text to a page: ids made unique by `name`, colours from the page's theme, `label` for screen readers.

    `name` consists of letters, digits and hyphens; `label` is already HTML-escaped.
    """
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<svg (.*?)width="([\d.]+)pt" height="[\d.]+pt"', _wide, body, count=1, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in ((INK, "--ink"), (PAPER, "--paper"), (GRID, "--line"), (FAINT, "--faint")):
        body = body.replace(f": {colour}", f": var({variable})")
    return body.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _wide(match: re.Match[str]) -> str:
    """Set the SVG's width to 1.35 times that on paper, limited to the width of the page."""
    return f'<svg {match[1]}style="width: min(100%, {float(match[2]) * 1.35:.0f}pt)"'


def save(figure: Figure, folder: Path, name: str) -> str:
    """Write `name`.svg and `name`.png (200 dots per inch) into the folder, each atomically; return the SVG text.

    Raises:
        InputError: the folder or a file in it cannot be written.
    """
    text = svg(figure)
    figure.set_layout_engine("none")  # keep the layout of the SVG; another pass changes nothing
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", where=str(folder), hint=_HINT) from error
    with written_whole(folder / f"{name}.svg", _HINT) as part:
        part.write_text(text, encoding="utf-8")
    with written_whole(folder / f"{name}.png", _HINT) as part, style():
        figure.savefig(part, format="png", dpi=200, metadata={"Software": None})
    return text
