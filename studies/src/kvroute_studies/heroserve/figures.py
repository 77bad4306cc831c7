"""Figures of HeroServe's evaluation: rates, latencies, all-reduces, packet loss and KV memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvroute.planner.comparison.cells import Record
from kvroute.report.drawing import (
    AXIS_LABELS,
    INK,
    grid,
    legend_above,
    line_style,
    panels,
    percent,
    policy_legend,
    scale_axis,
    style,
)
from kvroute.report.estimate import estimate
from kvroute_studies.heroserve.tables import LEAST_ATTAINMENT, axis_text
from kvroute_studies.shared.cells import Experiment

Filter = Mapping[str, float | str]
_LABELS = {"load": "load, share of the reference rate", "kib": "tensor"}
_LOSS_COLOURS = {0.0: "#0072b2", 0.001: "#c98b00", 0.01: "#d55e00"}


def _some(records: Sequence[Record], wanted: Filter) -> list[Record]:
    """Return the records with these axis values; `profile` is one of the axes."""
    return [
        record
        for record in records
        if all(
            (record.cell.profile if name == "profile" else record.cell.settings[name]) == wanted[name]
            for name in wanted
        )
    ]


def _values(records: Sequence[Record], axis: str) -> list[float]:
    return sorted({record.cell.settings[axis] for record in records})


def _means(records: Sequence[Record], axis: str, figure: str) -> list[tuple[float, float]]:
    found = []
    for value in _values(records, axis):
        mean = estimate(record.figures.get(figure) for record in records if record.cell.settings[axis] == value)
        if mean is not None:
            found.append((value, mean.mean))
    return found


def _lines(panel: Axes, experiment: Experiment, records: Sequence[Record], axis: str, figure: str) -> None:
    for policy in experiment.policies:
        points = _means([record for record in records if record.cell.policy == policy], axis, figure)
        look = line_style(policy)
        panel.plot(
            range(len(points)) if axis == "span" else [at for at, _ in points],
            [mean for _, mean in points],
            color=look.colour,
            marker=look.marker,
            linestyle=look.dashes,
            alpha=0.9,
        )
    if axis == "span":
        panel.set_xticks(
            range(len(_values(records, axis))), [axis_text(axis, value) for value in _values(records, axis)]
        )
    elif records:
        scale_axis(panel, _values(records, axis))
        if axis == "kib":
            panel.xaxis.set_major_formatter(FuncFormatter(_size_text))
    panel.set_xlabel(_LABELS.get(axis, AXIS_LABELS.get(axis, axis)))
    grid(panel)


def _size_text(kib: float, _: object) -> str:
    return f"{kib:g} KiB" if kib < 1024 else f"{kib / 1024:g} MiB"


def scalability_lines(experiment: Experiment, records: Sequence[Record]) -> Figure:
    """Draw the rate per GPU over the span: one panel per profile, elements of half precision in packets."""
    some = _some(records, {"wire": min(_values(records, "wire"))})
    profiles = list(dict.fromkeys(record.cell.profile for record in some))
    profiles.sort(key=lambda name: name.endswith("summaries"))
    columns = min(3, len(profiles))
    with style():
        figure, rows = panels(-(-len(profiles) // columns), columns, width=3.0, height=2.3)
        flat = [panel for row in rows for panel in row]
        for panel, profile in zip(flat, profiles, strict=False):
            _lines(panel, experiment, _some(some, {"profile": profile}), "span", "rate_per_gpu")
            panel.set_title(profile)
            panel.set_ylim(bottom=0)
        for panel in flat[len(profiles) :]:
            panel.set_visible(False)
        for row in rows:
            row[0].set_ylabel("requests/s per GPU")
        policy_legend(figure, experiment.policies)
    return figure


def prediction_lines(experiment: Experiment, records: Sequence[Record]) -> Figure:
    """Draw the share of requests within the SLOs over the load, in the mean over spans: one panel per profile."""
    profiles = list(dict.fromkeys(record.cell.profile for record in records))
    with style():
        figure, (row,) = panels(1, len(profiles), width=7.2 / len(profiles), height=2.6, sharey="row")
        for panel, profile in zip(row, profiles, strict=True):
            _lines(panel, experiment, _some(records, {"profile": profile}), "load", "attainment")
            panel.axhline(LEAST_ATTAINMENT, color=INK, linewidth=1.0)
            panel.set_title(profile)
            panel.set_ylim(0, 1.05)
            panel.set_xlabel("load, share of the predicted rate")
        row[0].set_ylabel("requests within both SLOs")
        percent(row[0].yaxis)
        policy_legend(figure, experiment.policies)
    return figure


def latency_lines(experiment: Experiment, records: Sequence[Record]) -> Figure:
    """Draw mean TTFT and TPOT over the load: one column per span, for the first profile, half precision in packets;
    TTFT with its SLO."""
    first: Filter = {"wire": min(_values(records, "wire")), "profile": records[0].cell.profile}
    some = _some(records, first)
    spans = _values(some, "span")
    with style():
        figure, rows = panels(2, len(spans), width=3.0, height=2.2, sharey="row")
        for column, span in enumerate(spans):
            for row, name in enumerate(("ttft_mean_s", "tpot_mean_ms")):
                _lines(rows[row][column], experiment, _some(some, {"span": span}), "load", name)
            rows[0][column].set_title(f"groups over {span:g} servers")
            rows[0][column].set_yscale("log")
            rows[0][column].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            rows[0][column].axhline(float(some[0].config["ttft_s"]), color=INK, linewidth=1.0)
            rows[1][column].set_ylim(bottom=0)
        rows[0][0].set_ylabel("mean TTFT, s; line: SLO")
        rows[1][0].set_ylabel("mean TPOT, ms")
        policy_legend(figure, experiment.policies)
    return figure


def throughput_lines(experiment: Experiment, records: Sequence[Record]) -> Figure:
    """Draw the bytes that a GPU reduces per second over the size, for the first profile: one column per span, one row
    per number of GPUs of a server."""
    some = _some(records, {"profile": records[0].cell.profile})
    spans, gpus = _values(some, "span"), _values(some, "gpus")
    with style():
        figure, rows = panels(len(gpus), len(spans), width=3.0, height=2.2, sharey="row")
        for row, count in zip(rows, gpus, strict=True):
            for panel, span in zip(row, spans, strict=True):
                _lines(panel, experiment, _some(some, {"span": span, "gpus": count}), "kib", "gb_per_s")
                panel.set_title(f"{span:g} servers of {count:g} GPU{'s' if count > 1 else ''}")
                panel.set_ylim(bottom=0)
            row[0].set_ylabel("GB/s per GPU")
        policy_legend(figure, experiment.policies)
    return figure


def loss_lines(experiment: Experiment, records: Sequence[Record]) -> Figure:
    """Draw the aggregated bytes per second over the slots: one panel per number of workers, one colour per loss."""
    workers = _values(records, "workers")
    dashes = dict(zip(experiment.policies, ("-", "--"), strict=True))
    with style():
        figure, (row,) = panels(1, len(workers), width=3.0, height=2.6, sharey="row")
        for panel, count in zip(row, workers, strict=True):
            some = _some(records, {"workers": count})
            for loss in _values(some, "loss"):
                for policy in experiment.policies:
                    points = _means(
                        [record for record in _some(some, {"loss": loss}) if record.cell.policy == policy],
                        "slots",
                        "gb_per_s",
                    )
                    label = f"loss {100 * loss:g} %, {policy.replace('-', ' ')}"
                    look = {"color": _LOSS_COLOURS.get(loss, INK), "linestyle": dashes[policy], "marker": "o"}
                    panel.plot([at for at, _ in points], [mean for _, mean in points], label=label, **look)  # type: ignore[arg-type]
            model = _means(some, "slots", "model_gb_per_s")
            panel.plot(
                [at for at, _ in model], [mean for _, mean in model], color=INK, linestyle=":", label="model, no loss"
            )
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            scale_axis(panel, _values(some, "slots"))
            panel.set_title(f"{count:g} workers")
            panel.set_xlabel("slots")
            grid(panel)
        row[0].set_ylabel("aggregated, GB/s")
        legend_above(figure, row[0])
    return figure


def memory_lines(experiment: Experiment, records: Sequence[Record]) -> Figure:
    """Draw the share of the KV memory of decode instances in use, in windows of the run: one panel per span, for the
    first profile and seed."""
    first = records[0].cell
    some = [record for record in _some(records, {"profile": first.profile}) if record.cell.seed == first.seed]
    spans = _values(some, "span")
    with style():
        figure, (row,) = panels(1, len(spans), width=2.6, height=2.4, sharey="row")
        for panel, span in zip(row, spans, strict=True):
            for record in _some(some, {"span": span}):
                series, look = record.series["kv_share"], line_style(record.cell.policy)
                begin_s, end_s = series[0][0], series[-1][0]
                at = [(time_s - begin_s) / (end_s - begin_s) for time_s, _ in series]
                panel.plot(
                    at,
                    [100 * share for _, share in series],
                    color=look.colour,
                    linestyle=look.dashes,
                    marker=look.marker,
                    markevery=4,
                    linewidth=1.1,
                )
            panel.set_title("chosen groups" if not span else f"over {span:g} servers")
            panel.set_xlabel("time, share of the run")
            panel.set_ylim(0, 100)
            grid(panel)
        row[0].set_ylabel("KV memory reserved, %")
        policy_legend(figure, experiment.policies)
    return figure


FIGURES: dict[str, Callable[[Experiment, Sequence[Record]], Figure]] = {
    "heroserve-scalability": scalability_lines,
    "heroserve-prediction": prediction_lines,
    "heroserve-latency": latency_lines,
    "heroserve-ina-throughput": throughput_lines,
    "heroserve-ina-loss": loss_lines,
    "heroserve-memory": memory_lines,
}
