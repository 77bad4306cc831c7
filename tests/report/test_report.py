"""Tables, figures and pages: their content for hand-made runs, and that they accept every possible run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.report.compare import verdict
from kvroute.report.comparison_page import differences_grid, write_report
from kvroute.report.drawing import line_style, svg
from kvroute.report.estimate import Estimate, estimate
from kvroute.report.figures import (
    ablation_bars,
    heat_map,
    link_utilisation,
    load_sweep,
    sweep_lines,
    thin,
    threshold_over_time,
    ttft_breakdown,
)
from kvroute.report.series import summaries
from kvroute.report.tables import comparison_grid, comparison_table
from kvroute.sim.metrics import RequestCounts, Spread, Summary, Timeline, TtftParts
from kvroute.sim.network.link_load import LinkLoad
from kvroute.sim.settings import Slo
from kvroute.types import InputError
from kvroute_studies.netkv.cases import EXPERIMENTS
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.findings import ExpectationFinding, findings
from kvroute_studies.shared.page import headline, write_experiment, write_index
from kvroute_studies.shared.tables import experiment_grid, experiment_table

BASE_S = {"round-robin": 1.6, "load-aware": 1.5, "cache-aware": 1.42, "cla": 1.3, "netkv-topo": 1.15}
BASE_S |= {"netkv-static": 1.1, "netkv": 1.05}


def summary(policy: str, seed: int, ttft_s: float | None, **changes: Any) -> Summary:
    """Return a run whose parts add up to the given mean TTFT; None: no request got a first token."""
    if ttft_s is None:
        parts, spread = TtftParts(), Spread()
    else:
        parts = TtftParts(
            prefill_wait=0.1 * ttft_s,
            prefill=0.4 * ttft_s,
            transfer=0.35 * ttft_s,
            queue=0.14 * ttft_s,
            first_step=0.01 * ttft_s,
        )
        spread = Spread(mean=ttft_s, p50=0.8 * ttft_s, p95=2.1 * ttft_s, p99=3.3 * ttft_s)
    near = 0.5 if policy.startswith("netkv") else 0.08
    made = Summary(
        policy=policy,
        seed=seed,
        requests=RequestCounts(arrived=1000, finished=990, rejected=6, in_flight=4),
        measured=900,
        ttft_s=spread,
        ttft_parts_s=parts,
        transfer_s=Spread() if ttft_s is None else Spread(mean=0.35 * ttft_s, p50=0.3, p95=0.8, p99=1.2),
        tbt_s=Spread() if ttft_s is None else Spread(mean=0.0142, p50=0.014, p95=0.016, p99=0.017),
        tpot_s=Spread() if ttft_s is None else Spread(mean=0.0156, p50=0.015, p95=0.018, p99=0.019),
        slo_attainment=None if ttft_s is None else float(np.clip(1.25 - 0.2 * ttft_s, 0, 1)),
        goodput_per_s=None if ttft_s is None else 6.1 * float(np.clip(1.25 - 0.2 * ttft_s, 0, 1)),
        throughput_per_s=6.1,
        tier_share={"0": 0.02, "1": near, "2": 0.18, "3": 0.8 - near} if ttft_s else dict.fromkeys("0123", 0.0),
        cache_hit=0.31,
        prefill_cache_hit=0.22,
        kv_bytes=1e12,
        link_load={"1": LinkLoad(mean=0.1, busiest=0.3, busiest_link="rack0->pod0")},
        wall_s=1.0,
        cpu_s=1.0,
    )
    return msgspec.structs.replace(made, **changes)


def timeline(seed: int, samples: int = 1000) -> Timeline:
    """Return bursty traffic on three of five tiers."""
    at_s = np.arange(samples) * 0.1
    draw = np.random.default_rng(seed)
    wave = 0.3 + 0.2 * np.sin(at_s / 7 + seed) + 0.08 * draw.standard_normal(samples)
    tier = {
        str(name): tuple(np.clip(wave * factor, 0, 1).tolist()) for name, factor in enumerate((0, 0.4, 0.8, 1.2, 0))
    }
    return Timeline(at_s=tuple(at_s.tolist()), tier=tier)


def record(policy: str, seed: int, ttft_s: float | None, *, samples: int = 0, **cell: Any) -> Record:
    made = Cell(
        policy=policy, seed=seed, **({"experiment": "simulate", "reading": "", "profile": "", "settings": {}} | cell)
    )
    run = summary(policy, seed, ttft_s)
    lines = timeline(len(policy), samples) if samples else None
    return Record(
        key=made.key, cell=made, config={"reading": {"ecmp": "flow"}, "rate": 6.09}, summary=run, timeline=lines
    )


def comparison(policies: Sequence[str] = ("round-robin", "cla", "netkv"), seeds: int = 5) -> list[Record]:
    draw = np.random.default_rng(1)
    return [
        record(policy, seed, BASE_S.get(policy, 1.7) * (1 + 0.03 * float(draw.standard_normal())), samples=1000)
        for policy in policies
        for seed in range(seeds)
    ]


def sweep(experiment: Experiment, seeds: int = 3, profiles: Sequence[str] = ()) -> list[Record]:
    """Return a plausible sweep: TTFT grows along every axis, and so does netkv's lead."""
    draw = np.random.default_rng(7)
    records = []
    for profile, point in product(profiles or experiment.profiles, product(*experiment.axes.values())):
        place = [
            values.index(value) / (len(values) - 1)
            for values, value in zip(experiment.axes.values(), point, strict=True)
        ]
        level = {"chatbot": 0.4, "rag": 1.0, "long-context": 4.0}[profile] * (1 + 1.5 * sum(place))
        for seed in range(seeds):
            common = 1 + 0.04 * float(draw.standard_normal())
            for policy in experiment.policies:
                lead = 1 - (1.3 - BASE_S[policy]) / 1.3 * (0.1 + 0.9 * float(np.mean(place or [1.0])))
                ttft_s = level * common * lead * (1 + 0.015 * float(draw.standard_normal()))
                settings = dict(zip(experiment.axes, map(float, point), strict=True))
                cell: Any = {
                    "experiment": experiment.name,
                    "reading": "paper",
                    "profile": profile,
                    "settings": settings,
                }
                records.append(record(policy, seed, ttft_s, **cell))
    return records


seconds = st.none() | st.floats(1e-4, 1e5)
names = st.sampled_from([*BASE_S, "mine", "a <b> & $x$ policy"])
runs_of_anything = st.lists(st.builds(summary, names, st.integers(0, 3), seconds), min_size=1, max_size=8)


def printed(table: Any, width: int) -> list[str]:
    console = Console(width=width, record=True, file=StringIO())
    console.print(table)
    return console.export_text().splitlines()


@given(runs_of_anything, st.integers(100, 200))
@settings(max_examples=25, deadline=None)
def test_the_comparison_fits_the_terminal_and_names_every_policy_on_one_line(runs: list[Summary], width: int) -> None:
    lines = printed(comparison_table(runs, width=width), width)
    assert max(map(len, lines)) <= width
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    for run in runs:
        assert any(line.startswith(f" {run.policy} ") for line in lines)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6), st.floats(-1e3, 1e3), st.floats(0.1, 10))
def test_an_estimate_shifts_and_scales_with_its_values(values: list[float], shift: float, scale: float) -> None:
    plain, moved = estimate(values), estimate([scale * value + shift for value in values])
    assert plain is not None
    assert moved is not None
    assert plain.half_width is not None
    assert moved.mean == pytest.approx(scale * plain.mean + shift, abs=1e-6)
    assert moved.half_width == pytest.approx(scale * plain.half_width, rel=1e-6, abs=1e-6)


def test_an_estimate_by_hand() -> None:
    known = estimate([1.0, None, 2.0, 3.0])
    assert known is not None
    assert (known.mean, known.std, known.seeds) == (2.0, 1.0, 3)
    assert known.half_width == pytest.approx(4.302653 / 3**0.5)
    assert estimate([None]) is None
    alone = estimate([5.0])
    assert alone is not None
    assert alone.half_width is None


@given(st.integers(0, 3000), st.integers(1, 400))
def test_thinned_samples_are_few_and_ascending_and_keep_the_mean(count: int, most: int) -> None:
    shares = np.random.default_rng(count).random(count).tolist()
    at_s, means = thin(range(count), shares, most)
    assert len(at_s) == len(means) <= most
    assert at_s == sorted(at_s)
    stride = -(-count // most) if count else 1
    weights = [min(stride, count - stride * number) for number in range(len(means))]
    assert sum(w * m for w, m in zip(weights, means, strict=True)) == pytest.approx(sum(shares))


@pytest.mark.parametrize(("to_s", "columns"), [(530.0, 2), (1000.0, 1)])
def test_a_short_cut_is_enlarged(to_s: float, columns: int) -> None:
    """A cut of 30 s in a run of 1,200 s gets panels of its own, in which it takes a seventh of the width or more."""
    at_s = tuple(float(at) for at in range(0, 1200, 5))
    shares = tuple(0.2 for _ in at_s)
    lines = {
        policy: Timeline(at_s=at_s, tier={"4": shares}, threshold_tokens=tuple(2e4 for _ in at_s))
        for policy in ("cla", "netkv")
    }
    changes = [(500.0, "wan cut"), (to_s, "wan restored")]
    for figure in (link_utilisation(lines, changes), threshold_over_time(lines, changes)):
        axes = figure.axes
        assert len(axes) == columns
        shown = [high - low for low, high in (axis.get_xlim() for axis in axes)]
        assert shown[0] > 1000
        assert (to_s - 500) / shown[-1] > 0.15
        widths = [line.get_linewidth() for line in axes[-1].lines[:2]]
        assert widths[0] > widths[1] + 0.5, "equal lines are both visible"
    assert len(link_utilisation(lines).axes) == 1


def test_every_policy_has_a_distinct_line_style() -> None:
    styles = [line_style(policy) for policy in BASE_S]
    assert len(set(styles)) == len({style.colour for style in styles}) == len(styles)
    assert line_style("somebody-elses") == line_style("somebody-elses")


def test_the_text_of_a_comparison() -> None:
    runs = [summary("cla", 0, 1.2), summary("cla", 1, 1.4), summary("netkv", 0, 1.0), summary("netkv", 1, 1.1)]
    grid = comparison_grid(runs)
    table = {
        row[0].text: {heading.title: entry for heading, entry in zip(grid.headings, row, strict=True)}
        for row in grid.rows
    }
    mean = table["netkv"]["TTFT mean ms"]
    assert (mean.text, mean.detail, mean.best) == ("1,050", "±635", True)  # t(0.975, 1) * 70.7 / sqrt(2)
    assert not table["cla"]["TTFT mean ms"].best
    assert table["netkv"]["tier 0/../3 %"].text == "2/50/18/30"
    assert table["cla"]["SLO met %"].text == "98.5"
    assert table["cla"]["TPOT ms"].text == "15.6"
    assert not table["netkv"]["TPOT ms"].best  # equal for both


def test_missing_values_are_dashes() -> None:
    row = comparison_grid([summary("cla", 0, None)]).rows[0]
    assert [entry.text for entry in row[1:10]] == ["-"] * 9
    assert row[10].text == "-"


def test_columns_dropped_in_a_narrow_terminal_are_named() -> None:
    runs = summaries(comparison(("round-robin", "netkv")))
    outputs = (printed(comparison_table(runs, width=width), width) for width in (120, 72))
    wide, narrow = (" ".join(" ".join(lines).split()) for lines in outputs)
    assert "Too narrow" not in wide
    assert "Bold" not in wide, "nothing is bold where this is no terminal"
    assert "Too narrow for: P50 ms" in narrow
    assert "1,6" in narrow


def test_the_text_of_an_experiment() -> None:
    records = sweep(EXPERIMENTS["netkv-load"], profiles=("rag",))
    grid = experiment_grid(EXPERIMENTS["netkv-load"], records)
    assert [heading.title for heading in grid.headings[:3]] == ["profile", "load", "round-robin"]
    assert [row[1].text for row in grid.rows] == ["0.5", "0.75", "1", "1.25", "1.5", "2", "2.5"]
    assert re.fullmatch(r"-1\d\.\d%", grid.rows[-1][-1].text)
    assert max(map(len, printed(experiment_table(EXPERIMENTS["netkv-load"], records, width=120), 120))) <= 120
    part = experiment_grid(EXPERIMENTS["netkv-load"], records[:1])
    assert part.rows[0][-1].text == "-"


class Page(HTMLParser):
    """Collects tags and IDs of a page and checks that the tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(path: Path) -> str:
    """Check that a page is self-contained: tags nest, nothing is loaded, no script, IDs are unique, and links have
    targets."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.isdisjoint({"script", "img", "link", "iframe"})
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (path.parent / link).exists()
    assert not re.search(r"(?<![a-z])nan(?![a-z])", text)
    return text


def test_a_report_starts_with_the_verdict_and_is_reproducible(tmp_path: Path) -> None:
    title, folders = "mine <script>alert(1)</script>", (tmp_path / "a" / "new", tmp_path / "b" / "new")
    pages = [write_report(comparison(), folder, title) for folder in folders]
    text = check_page(pages[0])
    assert pages[0] == folders[0] / "report.html"
    assert text.index("netkv has the lowest mean TTFT") < text.index("<table>")
    assert "mine &lt;script&gt;" in text
    assert "--policy round-robin --policy cla --policy netkv --seed 0 --seeds 5" in text
    files = {path.relative_to(folders[0]).as_posix() for path in folders[0].rglob("*.*")}
    figures = product(("ttft-breakdown", "tier-split", "link-utilisation"), ("png", "svg"))
    assert files == {"report.html", *(f"figures/{name}.{end}" for name, end in figures)}
    for path in files:
        assert (folders[0] / path).read_bytes() == (folders[1] / path).read_bytes()


MARKUP = '<img src=x onerror=y> $a_b$ & "q"'
EDGES: dict[str, list[Record]] = {
    "nothing measured": [record(policy, 0, None) for policy in ("cla", "netkv")],
    "no first token for one, markup in a name": [record("cla", 0, None), record(MARKUP, 0, 1.0)],
    "one policy, one seed, an idle network": [
        msgspec.structs.replace(record("cla", 0, 1.0), timeline=Timeline(at_s=(0.0, 1.0), tier={"1": (0.0, 0.0)})),
    ],
}


@pytest.mark.parametrize("case", EDGES)
def test_a_report_can_be_written_for_any_results(case: str, tmp_path: Path) -> None:
    text = check_page(write_report(EDGES[case], tmp_path, case))
    assert "How to run this again" in text


def test_an_empty_report_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run"):
        write_report([], tmp_path, "")
    with pytest.raises(InputError, match="no result"):
        write_experiment(EXPERIMENTS["netkv-load"], [], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_report(EDGES["nothing measured"], tmp_path / "file", "")


def test_sentences_for_differences() -> None:
    runs = [summary("a", seed, 1.0 + 0.01 * seed) for seed in range(4)]
    runs += [summary("b", seed, 1.2 + 0.012 * seed) for seed in range(4)]
    runs += [summary("c", seed, 1.0 + 0.1 * (seed % 2)) for seed in range(4)]
    sentences = {row[0].text: row[-1].text for row in differences_grid(runs).rows}
    assert "excludes zero" in sentences["a - b"]
    assert "Noise" in sentences["a - c"]
    assert "one seed" in differences_grid([run for run in runs if run.seed == 0]).rows[0][-1].text.lower()


@pytest.mark.parametrize("name", ["netkv-load", "netkv-topology", "netkv-ablation"])
def test_every_kind_of_experiment_has_a_page(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    page = write_experiment(experiment, sweep(experiment, profiles=("rag",), seeds=2), tmp_path, ["a note <i>"])
    text = check_page(page)
    assert experiment.expectation in text
    assert "a note &lt;i&gt;" in text
    assert f"kvroute experiment {name} --reading paper --profile rag --seeds 2" in text
    assert "reading.ecmp" in text


@pytest.mark.slow
def test_a_page_names_every_option_needed_to_repeat_its_results(tmp_path: Path) -> None:
    """Profiles if not all ran, the first seed, changed assumptions; the command's own parser reads the options."""
    experiment = EXPERIMENTS["netkv-load"]
    records = [
        msgspec.structs.replace(cell, cell=msgspec.structs.replace(cell.cell, seed=cell.cell.seed + 3, reading=reading))
        for reading in ("paper+ecmp=flow",)
        for cell in sweep(experiment, profiles=("chatbot", "rag"), seeds=2)
    ]
    text = check_page(write_experiment(experiment, records, tmp_path))
    whole = "kvroute experiment netkv-load --reading paper --set ecmp=flow --profile chatbot --profile rag"
    assert f"{whole} --seed 3 --seeds 2" in text
    assert "--cell chatbot,0.5,cla --seed 3" in text or "--cell chatbot,0.5,round-robin --seed 3" in text
    everything = check_page(write_experiment(experiment, sweep(experiment, seeds=1), tmp_path / "all"))
    assert "kvroute experiment netkv-load --reading paper --seeds 1" in everything


def test_the_slo_column_names_its_limits() -> None:
    runs = summaries(comparison(("cla", "netkv")))
    titles = [heading.title for heading in comparison_grid(runs, Slo(ttft_s=2.0)).headings]
    assert "TTFT ≤2s %" in titles
    assert "SLO met %" not in titles
    titles = [heading.title for heading in comparison_grid(runs, Slo(ttft_s=2.0, tpot_s=0.05)).headings]
    assert "TTFT ≤2s TPOT ≤50ms %" in titles


def test_seeds_that_change_nothing_have_no_interval() -> None:
    """All seeds give the same numbers if nothing is drawn: an interval of zero would claim a precision."""
    runs = [summary(policy, seed, seconds) for policy, seconds in (("cla", 1.2), ("netkv", 1.0)) for seed in range(3)]
    grid = comparison_grid(runs)
    assert not any(entry.detail for row in grid.rows for entry in row)
    assert grid.caption == "3 seeds, which all give these numbers."
    assert verdict(runs).sentence.endswith("1,000 ms, 200.0 ms (16.7%) below cla on each of 3 seeds.")
    rounded = estimate([0.1 + 0.2, 0.3, 0.3])
    assert rounded is not None
    assert rounded == Estimate(rounded.mean, 0.0, 0.0, 3), "a rounding error"
    mixed = comparison_grid([*runs, summary("load-aware", 0, 1.0), summary("load-aware", 1, 1.1)])
    assert [entry.detail for row in mixed.rows for entry in row[1:2]] == ["", "", "±635"]
    assert mixed.caption == "Mean of 3 seeds, ± 95 % interval of the mean."


def test_the_index_links_to_pages(tmp_path: Path) -> None:
    (tmp_path / "load & more").mkdir()
    (tmp_path / "load & more" / "report.html").write_text("")
    text = write_index({"Load <sweep>": tmp_path / "load & more" / "report.html"}, tmp_path / "index.html").read_text()
    assert 'href="load%20%26%20more/report.html"' in text
    assert "Load &lt;sweep&gt;" in text


def test_figures_of_an_incomplete_or_differently_shaped_sweep() -> None:
    topology = sweep(EXPERIMENTS["netkv-topology"], profiles=("rag",), seeds=2)
    drawn = [
        heat_map(topology[:20]),
        heat_map(sweep(EXPERIMENTS["netkv-load"], profiles=("rag",), seeds=1)),
        sweep_lines(topology, "background", ("netkv", "cla")),
        load_sweep([record("netkv", 0, None, settings={"load": 1.0})], ("netkv", "cla")),
        ablation_bars([record("cla", 0, None), record("netkv", 0, 1.0)]),
        ttft_breakdown([]),
    ]
    assert all(svg(figure).startswith("<?xml") for figure in drawn)


def pair(first_s: Sequence[Sequence[float]], second_s: Sequence[Sequence[float]], axis: str = "load") -> list[Record]:
    """Return netkv and cla at points 1, 2, ..: a list of seeds each."""
    return [
        record(policy, seed, ttft_s, profile="rag", settings={axis: float(point)})
        for policy, points in (("netkv", first_s), ("cla", second_s))
        for point, row in enumerate(points, start=1)
        for seed, ttft_s in enumerate(row)
    ]


def outcome(name: str, records: Sequence[Record], claim: str) -> ExpectationFinding:
    (finding,) = [experiment for experiment in findings(EXPERIMENTS[name], records) if claim in experiment.claim]
    return finding


def test_a_loss_beyond_noise_is_named_with_its_place() -> None:
    finding = outcome(
        "netkv-load", pair([(1.0, 1.1, 1.2), (1.3, 1.41, 1.5)], [(1.2, 1.3, 1.41), (1.0, 1.1, 1.2)]), "netkv below cla"
    )
    assert finding.holds == "holds in part"
    assert "at 1 of 2 points, 1 of them significant" in finding.sentence
    assert re.search(r"Its mean TTFT is higher: \+27\.\d% ±\d\.\d% at load=2\.$", finding.sentence)


@given(st.lists(st.lists(st.floats(0.5, 2), min_size=3, max_size=3), min_size=1, max_size=3), st.floats(1.05, 3))
@settings(max_examples=30, deadline=None)
def test_a_constant_lead_holds_and_a_constant_deficit_does_not(points: list[list[float]], factor: float) -> None:
    slower = [[value * factor for value in row] for row in points]
    lead = outcome("netkv-load", pair(points, slower), "netkv below cla")
    lag = outcome("netkv-load", pair(slower, points), "netkv below cla")
    assert lead.holds in ("holds", "unclear")
    assert lag.holds in ("does not hold", "unclear")
    assert (lead.holds == "unclear") == (lag.holds == "unclear")


def test_one_seed_is_never_conclusive() -> None:
    records = sweep(EXPERIMENTS["netkv-topology"], seeds=1)
    assert {experiment.holds for experiment in findings(EXPERIMENTS["netkv-topology"], records)} == {"unclear"}


@pytest.mark.parametrize(
    ("last_s", "axis", "name", "holds"),
    [
        ((0.5, 0.51, 0.52), "tokens", "netkv-context", "holds"),
        ((1.3, 1.31, 1.32), "tokens", "netkv-context", "does not hold"),
        ((0.6, 0.9, 1.2), "tokens", "netkv-context", "unclear"),
        ((0.901, 0.899, 0.9), "gpus", "netkv-scale", "holds"),
        ((0.7, 0.71, 0.72), "gpus", "netkv-scale", "does not hold"),
        ((0.7, 0.9, 1.1), "gpus", "netkv-scale", "unclear"),
    ],
)
def test_trends_of_the_gain(last_s: tuple[float, ...], axis: str, name: str, holds: str) -> None:
    records = pair([(0.9, 0.9, 0.9), last_s], [(1.0, 1.0, 1.0)] * 2, axis)
    assert outcome(name, records, "the gain").holds == holds


def test_staleness_is_judged_by_the_change_of_netkv_itself() -> None:
    still = pair([(0.9, 1.0, 1.1), (0.9, 1.0, 1.1)], [(1.0, 1.1, 1.2), (2.0, 2.1, 2.2)], "refresh_s")
    assert outcome("netkv-staleness", still, "does not change").holds == "holds"
    worse = pair([(0.9, 1.0, 1.1), (1.1, 1.22, 1.33)], [(1.0, 1.1, 1.2)] * 2, "refresh_s")
    assert outcome("netkv-staleness", worse, "does not change").holds == "does not hold"


def test_the_ladder_reports_the_share_of_the_first_step() -> None:
    times = {"cla": 1.0, "netkv-topo": 0.8, "netkv-static": 0.75, "netkv": 0.7}
    records = [
        record(policy, seed, value * (1 + 0.1 * seed), profile="rag")
        for policy, value in times.items()
        for seed in range(3)
    ]
    finding = outcome("netkv-ablation", records, "the first step")
    assert finding.holds == "holds"
    assert "The first step gives 67% of the total gain" in finding.sentence


def test_the_headline_groups_profiles() -> None:
    some = [
        ExpectationFinding(name, "a below b", holds, "")  # type: ignore[arg-type]
        for name, holds in (("x", "holds"), ("y", "unclear"), ("z", "holds"))
    ]
    assert headline(some) == "a below b: holds for x and z, unclear for y."
    assert headline(some[::2]) == "a below b: holds everywhere."
