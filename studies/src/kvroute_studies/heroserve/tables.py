"""Tables and findings of HeroServe's placements and all-reduces: every cell, and ranges of gains over the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvroute.planner.comparison.cells import Record
from kvroute.report.estimate import estimate, estimate_entry
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.findings import ExpectationFinding, Holds
from kvroute_studies.shared.heroserve_baselines import BASELINES, HERO, WITHOUT

SAME = 0.02
"""A gain by this share or less counts as none."""
LEAST_ATTAINMENT = 0.9
"""Share of requests within the SLOs below which a policy is overloaded: its latency then grows with the length of a
run."""
_CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class GainMetric:
    """What is compared between HeroServe and the baselines."""

    figure: str
    """Name in `Record.figures`."""
    title: str
    higher_wins: bool = False
    under_load: bool = False
    """Whether points at which one of both policies is overloaded do not count."""


@dataclass(frozen=True, slots=True)
class View:
    """How the results of an experiment are shown."""

    rows: tuple[str, ...]
    """Axes (`profile` among them) that a table of ranges has as rows; ranges are over all others."""
    metrics: tuple[GainMetric, ...]
    columns: tuple[tuple[str, str, int], ...]
    """Figure, title and digits of the columns of the table of all cells."""


VIEWS = {
    "heroserve-scalability": View(
        ("span", "wire"),
        (GainMetric("rate_per_gpu", "rate per GPU", higher_wins=True),),
        (
            ("rate_per_gpu", "req/s per GPU", 4),
            ("decode_all_reduce_share", "all-reduces of decode", 2),
            ("aggregated_share", "aggregated", 2),
            ("attainment", "simulated attainment", 3),
            ("tpot_mean_ms", "TPOT ms", 1),
            ("ttft_mean_s", "TTFT s", 2),
        ),
    ),
    "heroserve-prediction": View(
        (),
        (),
        (
            ("attainment", "attainment", 3),
            ("predicted_per_s", "predicted req/s", 2),
            ("tpot_mean_ms", "TPOT ms", 1),
            ("ttft_mean_s", "TTFT s", 2),
        ),
    ),
    "heroserve-latency": View(
        ("span", "wire"),
        (
            GainMetric("ttft_mean_s", "mean TTFT", under_load=True),
            GainMetric("tpot_mean_ms", "mean TPOT", under_load=True),
        ),
        (
            ("ttft_mean_s", "TTFT s", 3),
            ("ttft_p99_s", "TTFT p99 s", 2),
            ("tpot_mean_ms", "TPOT ms", 1),
            ("attainment", "attainment", 3),
            ("rate_per_s", "req/s", 2),
        ),
    ),
    "heroserve-ina-throughput": View(
        ("profile", "gpus", "span"),
        (GainMetric("time_us", "time"),),
        (("time_us", "us", 1), ("gb_per_s", "GB/s per GPU", 2), ("aggregated_share", "aggregated", 0)),
    ),
    "heroserve-ina-loss": View(
        (),
        (),
        (
            ("gb_per_s", "GB/s", 3),
            ("model_gb_per_s", "model GB/s", 2),
            ("sent_again_share", "sent again", 3),
        ),
    ),
    "heroserve-memory": View(
        (),
        (),
        (
            ("rate_per_gpu", "req/s per GPU", 4),
            ("kv_gb_per_gpu", "KV GB per GPU", 2),
            ("kv_mean_gb_per_gpu", "mean GB", 2),
            ("kv_mean_share", "mean share", 2),
            ("kv_peak_share", "peak share", 2),
            ("attainment", "attainment", 3),
        ),
    ),
}


def cells_grid(experiment: Experiment, records: Sequence[Record]) -> Grid:
    """Return every cell: means over seeds with 95 % intervals."""
    view, axes = VIEWS[experiment.name], tuple(experiment.axes)
    headings = (Heading("profile"), *(Heading(axis) for axis in axes), Heading("policy"))
    headings += tuple(
        Heading(title, drop=len(view.columns) - place) for place, (_, title, _) in enumerate(view.columns)
    )
    rows = []
    for profile, point in points_of(records):
        for policy in experiment.policies:
            if runs := at(records, profile, point, policy):
                labels = (profile, *(axis_text(axis, value) for axis, value in zip(axes, point, strict=True)), policy)
                numbers = (
                    estimate_entry(estimate(run.figures.get(figure) for run in runs), digits)
                    for figure, _, digits in view.columns
                )
                rows.append((*map(GridEntry, labels), *numbers))
    return Grid(experiment.title, headings, tuple(rows), labels=2 + len(axes))


def axis_text(axis: str, value: float) -> str:
    """Return a value of an axis as text; a span of 0 is chosen by the planner."""
    return _CHOSEN if axis == "span" and not value else f"{value:g}"


def points_of(records: Sequence[Record]) -> list[tuple[str, tuple[float, ...]]]:
    """Return the profiles and axis values in the order of the cells."""
    return list(dict.fromkeys((record.cell.profile, tuple(record.cell.settings.values())) for record in records))


def at(records: Sequence[Record], profile: str, point: tuple[float, ...], policy: str) -> list[Record]:
    """Return the runs of a policy at a point, by seed."""
    return [
        record
        for record in records
        if (record.cell.profile, record.cell.policy, tuple(record.cell.settings.values())) == (profile, policy, point)
    ]


def gains(records: Sequence[Record], metric: GainMetric, baseline: str) -> dict[tuple[str, tuple[float, ...]], float]:
    """Return by point how many times better HeroServe is than a baseline, on the mean over common seeds; points without
    both are left out, and those at which one of both is overloaded if the metric says so."""
    skipped = overloaded(records, baseline) | overloaded(records, HERO) if metric.under_load else set()
    values: dict[tuple[str, tuple[float, ...]], dict[tuple[str, int], float]] = {}
    for record in records:
        if metric.figure in record.figures:
            point = record.cell.profile, tuple(record.cell.settings.values())
            values.setdefault(point, {})[record.cell.policy, record.cell.seed] = record.figures[metric.figure]
    found = {}
    for point, runs in values.items():
        if point in skipped:
            continue
        seeds = [seed for policy, seed in runs if policy == HERO and (baseline, seed) in runs]
        pairs = [(runs[HERO, seed], runs[baseline, seed]) for seed in seeds]
        ratios = [(own / other) if metric.higher_wins else (other / own) for own, other in pairs if own and other]
        if ratios:
            found[point] = sum(ratios) / len(ratios)
    return found


def overloaded(records: Sequence[Record], policy: str) -> set[tuple[str, tuple[float, ...]]]:
    """Return the points at which fewer than 90 % of the requests of a policy meet the SLOs, in the mean over seeds."""
    found: dict[tuple[str, tuple[float, ...]], list[float]] = {}
    for record in records:
        if record.cell.policy == policy and "attainment" in record.figures:
            point = record.cell.profile, tuple(record.cell.settings.values())
            found.setdefault(point, []).append(record.figures["attainment"])
    return {point for point, shares in found.items() if sum(shares) < LEAST_ATTAINMENT * len(shares)}


def range_grids(experiment: Experiment, records: Sequence[Record]) -> list[Grid]:
    """Return one table for each metric: lowest and highest gain of HeroServe over each baseline, by row."""
    view = VIEWS[experiment.name]
    return [_range_grid(experiment, records, metric, view.rows) for metric in view.metrics]


def _range_grid(experiment: Experiment, records: Sequence[Record], metric: GainMetric, rows: tuple[str, ...]) -> Grid:
    baselines = [name for name in BASELINES if name != HERO]
    axes = ("profile", *experiment.axes)
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    missing: dict[tuple[tuple[str, ...], str], int] = {}

    def row_of(profile: str, point: tuple[float, ...]) -> tuple[str, ...]:
        texts = (profile, *(axis_text(axis, value) for axis, value in zip(axes[1:], point, strict=True)))
        return tuple(text for axis, text in zip(axes, texts, strict=True) if axis in rows)

    for baseline in baselines:
        for point, gain in gains(records, metric, baseline).items():
            found.setdefault(row_of(*point), {}).setdefault(baseline, []).append(gain)
        for point in overloaded(records, baseline) if metric.under_load else ():
            place = row_of(*point), baseline
            missing[place] = missing.get(place, 0) + 1
    headings = (*(Heading(axis) for axis in axes if axis in rows), *(Heading(f"over {name}") for name in baselines))
    entries = [
        (
            *map(GridEntry, row),
            *(GridEntry(_range(by_baseline.get(name, []), missing.get((row, name), 0))) for name in baselines),
        )
        for row, by_baseline in found.items()
    ]
    others = ", ".join(axis for axis in axes if axis not in rows)
    caption = f"How many times better {HERO} is: lowest to highest over {others}."
    if metric.under_load:
        caption += " In brackets: points that are left out because the baseline is overloaded."
    return Grid(f"{experiment.title}: {metric.title}", headings, tuple(entries), caption, len(rows))


def _range(values: Sequence[float], missing: int) -> str:
    left_out = f" ({missing})" if missing else ""
    if not values:
        return UNKNOWN + left_out
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return (low if low == high else f"{low} to {high}") + left_out


def heroserve_findings(experiment: Experiment, records: Sequence[Record]) -> list[ExpectationFinding]:
    """Return for each metric and baseline whether HeroServe is at least as good everywhere, and where aggregation
    brings nothing."""
    found = []
    for metric in VIEWS[experiment.name].metrics:
        for baseline in BASELINES:
            ratios = gains(records, metric, baseline)
            if baseline != HERO and ratios:
                found.append(_finding(experiment, metric, baseline, ratios))
    return found


def _finding(
    experiment: Experiment, metric: GainMetric, baseline: str, ratios: dict[tuple[str, tuple[float, ...]], float]
) -> ExpectationFinding:
    better = sum(gain > 1 + SAME for gain in ratios.values())
    worse = sum(gain < 1 - SAME for gain in ratios.values())
    holds: Holds = "does not hold" if worse > better else "unclear" if worse or not better else "holds"
    low, high = min(ratios.values()), max(ratios.values())
    sentence = (
        f"Better by more than 2 % at {better} of {len(ratios)} points, worse at {worse}; {low:.2f} to {high:.2f}."
    )
    if baseline == WITHOUT:
        sentence += (
            f" Aggregation brings nothing at {len(ratios) - better - worse} points: {_nothing(experiment, ratios)}."
        )
    return ExpectationFinding("all", f"{metric.title}: {HERO} is better than {baseline}", holds, sentence)


def _nothing(experiment: Experiment, ratios: dict[tuple[str, tuple[float, ...]], float]) -> str:
    """Return how many of the points with each value of each axis show no gain."""
    same: Callable[[float], bool] = lambda gain: abs(gain - 1) <= SAME  # noqa: E731
    texts = []
    for place, axis in enumerate(experiment.axes):
        values = dict.fromkeys(point[place] for _, point in ratios)
        counts = []
        for value in values:
            some = [gain for (_, point), gain in ratios.items() if point[place] == value]
            counts.append(f"{axis_text(axis, value)}: {sum(map(same, some))} of {len(some)}")
        texts.append(f"{axis} {', '.join(counts)}")
    return "; ".join(texts)
