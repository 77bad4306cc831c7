"""HeroServe's placements and all-reduces: cells that run again alike, directions that the models must have, tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.planner.placement.output import cluster_file, named
from kvroute.sim.metrics import Outcomes
from kvroute.topology import build
from kvroute_studies.heroserve.command import EXPERIMENTS, run_cell
from kvroute_studies.heroserve.page import write_heroserve
from kvroute_studies.heroserve.serving import LATENCY, MEMORY, PREDICTION, SCALABILITY, kv_shares
from kvroute_studies.heroserve.setup import best_placement, fixed_placement, problem_of
from kvroute_studies.heroserve.tables import (
    VIEWS,
    cells_grid,
    gains,
    heroserve_findings,
    overloaded,
    range_grids,
)
from kvroute_studies.heroserve.throughput import LOSS, THROUGHPUT, model_bytes_per_s
from kvroute_studies.shared.cells import Experiment, cells
from kvroute_studies.shared.heroserve_baselines import BASELINES, HERO, WITHOUT

CHAT = "opt-66b-chat"


def cell(one: Experiment, profile: str, policy: str, *point: float, seed: int = 0) -> Cell:
    settings = dict(zip(one.axes, point, strict=True))
    return Cell(experiment=one.name, reading="paper", profile=profile, settings=settings, policy=policy, seed=seed)


def reduced(profile: str, policy: str, span: float, gpus: float, kib: float) -> Record:
    return run_cell(cell(THROUGHPUT, profile, policy, span, gpus, kib))


points = st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([1, 4]), st.floats(16, 65_536))


@given(st.sampled_from(THROUGHPUT.profiles), points)
def test_heroserve_is_never_slower_than_a_scheme_that_it_may_use(profile: str, point: tuple[int, int, float]) -> None:
    own = reduced(profile, HERO, *point).figures["time_us"]
    for name, baseline in BASELINES.items():
        if not baseline.fallback_share:
            assert own <= reduced(profile, name, *point).figures["time_us"] * (1 + 1e-9)


@given(st.sampled_from(THROUGHPUT.profiles), st.sampled_from([1, 4]), st.floats(16, 65_536))
def test_over_two_servers_aggregation_gains_at_most_its_latency(profile: str, gpus: int, kib: float) -> None:
    """A ring over two servers sends as many bytes as aggregation at best."""
    own, without = (reduced(profile, name, 2, gpus, kib).figures["time_us"] for name in (HERO, WITHOUT))
    latency_us = reduced(profile, WITHOUT, 2, gpus, 1e-6).figures["time_us"]
    assert 0.0 <= without - own <= latency_us + 1e-6


def test_a_fallback_helps_where_slots_limit_and_costs_where_links_limit() -> None:
    """32 MiB over four servers of one GPU: 32 slots allow 4.7 GB/s, a NIC 12.5 GB/s."""
    few, many = (
        {name: reduced(profile, name, 4, 1, 32_768).figures["time_us"] for name in ("switchml", "atp-25")}
        for profile in ("fp16-32", "fp16-512")
    )
    assert few["atp-25"] < few["switchml"]
    assert many["atp-25"] == pytest.approx(1.5 * many["switchml"], rel=0.01)


@pytest.mark.parametrize("profile", [CHAT, "llama-3.3-70b-chat"])
@pytest.mark.parametrize(("span", "wire"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_groups_span_the_servers_and_all_schemes_sustain_most(profile: str, span: int, wire: int) -> None:
    """With int32 over four servers, aggregation is faster at the batch at which groups are compared, and the ring at
    the batch of Llama's rate."""
    rates = {}
    for name in (HERO, WITHOUT, "ring"):
        problem = problem_of(profile, span, wire, BASELINES[name])
        for make in (best_placement, fixed_placement):
            placed = make(problem, span, BASELINES[name])
            assert {instance.servers for instance in (*placed.prefill, *placed.decode)} == {span}
            rates[make, name] = placed.rate_per_s
    for make in (best_placement, fixed_placement):
        assert rates[make, HERO] >= rates[make, WITHOUT] * 0.999
        assert rates[make, WITHOUT] >= rates[make, "ring"] * 0.999
        if span == 2:
            assert rates[make, HERO] == pytest.approx(rates[make, WITHOUT], rel=1e-3)


def test_distserve_keeps_groups_on_a_server_where_the_planner_may_choose() -> None:
    """With the same schemes HeroServe spreads its decode instance over two servers."""
    staying = replace(BASELINES[HERO], stays=True)
    free, placed = (
        best_placement(problem_of(CHAT, 0, 4, baseline), 0, baseline) for baseline in (BASELINES[HERO], staying)
    )
    assert free.decode[0].servers == 2
    for instance in (*placed.prefill, *placed.decode):
        assert all(len({node for node, _ in stage}) == 1 for stage in instance.stages)
        assert instance.split.tp <= 4


def test_a_fallback_reaches_the_problem() -> None:
    aggregation = problem_of(CHAT, 4, 4, BASELINES["atp-25"]).aggregation
    assert aggregation is not None
    assert aggregation.fallback_share == 0.25


SMALL = [
    cell(SCALABILITY, CHAT, HERO, 4, 2),
    cell(PREDICTION, CHAT, HERO, 4, 1.1),
    cell(LATENCY, CHAT, HERO, 4, 2, 0.5),
    cell(MEMORY, CHAT, WITHOUT, 4),
    cell(THROUGHPUT, "fp16-512", HERO, 4, 4, 4096),
    cell(LOSS, "int32-100g", "retry-100us", 2, 32, 0.01, seed=3),
]
_SLOW = {experiment.name for experiment in (SCALABILITY, PREDICTION, LATENCY, MEMORY)}


@pytest.mark.parametrize(
    "one",
    [pytest.param(small, marks=pytest.mark.slow) if small.experiment in _SLOW else small for small in SMALL],
    ids=[small.experiment for small in SMALL],
)
def test_a_cell_runs_again_alike(one: Cell) -> None:
    first, second = run_cell(one), run_cell(one)
    assert first.figures == second.figures
    assert first.series == second.series
    assert first.config == second.config


def test_another_seed_draws_other_requests() -> None:
    one, other = (run_cell(cell(LATENCY, CHAT, HERO, 4, 2, 0.5, seed=seed)) for seed in (0, 1))
    assert one.figures["ttft_mean_s"] != other.figures["ttft_mean_s"]


@pytest.mark.slow
def test_higher_rates_do_not_lower_ttft_and_tpot() -> None:
    found = [run_cell(cell(LATENCY, CHAT, WITHOUT, 4, 2, load)).figures for load in (0.25, 1.0)]
    for name in ("ttft_mean_s", "tpot_mean_ms"):
        assert found[0][name] < found[1][name]


@pytest.mark.slow
def test_the_predicted_rate_is_at_most_a_third_too_low() -> None:
    found = [run_cell(cell(PREDICTION, CHAT, HERO, 4, load)).figures for load in (1.0, 1.3)]
    assert found[0]["attainment"] >= 0.9 > found[1]["attainment"]
    assert found[1]["rate_per_s"] == pytest.approx(1.3 * found[0]["predicted_per_s"])
    assert found[0]["predicted_per_s"] == run_cell(cell(SCALABILITY, CHAT, HERO, 4, 2)).figures["rate_per_s"]


@pytest.mark.slow
def test_at_low_load_heroserve_uses_the_scheme_of_small_tensors() -> None:
    """With int32 over eight servers the ring sustains more, and aggregation is faster at a quarter of the load."""
    found = {
        name: run_cell(cell(LATENCY, CHAT, name, 8, 4, 0.25)).figures["tpot_mean_ms"]
        for name in ("switchml", WITHOUT, HERO)
    }
    assert found[HERO] == pytest.approx(found["switchml"], rel=0.001)
    assert found[HERO] < 0.9 * found[WITHOUT]


def test_without_loss_the_protocol_has_the_rate_of_the_model() -> None:
    """Apart from the serialisation of a window's packets, which the model's round trip lacks, and the first and last
    window."""
    for workers in (2, 4):
        for slots in (32, 128):
            run = run_cell(cell(LOSS, "int32-100g", "retry-1ms", workers, slots, 0.0)).figures
            assert run["gb_per_s"] == pytest.approx(model_bytes_per_s(slots) / 1e9, rel=0.05)
            assert run["gb_per_s"] <= run["model_gb_per_s"] * (1 + 1e-9)
            assert run["sent_again_share"] == 0.0


def test_loss_and_a_longer_wait_cost_throughput() -> None:
    """A wait costs where the packets of a window that are left cannot show that one is lost."""
    clean, lossy, slow = (
        run_cell(cell(LOSS, "int32-100g", policy, 4, 32, loss)).figures["gb_per_s"]
        for policy, loss in (("retry-100us", 0.0), ("retry-100us", 0.01), ("retry-1ms", 0.01))
    )
    assert clean > lossy > slow


def test_kv_memory_is_counted_from_the_end_of_the_prefill_to_the_last_token() -> None:
    """Two requests of 300 tokens with 10 and 20 s in memory of 11 s; a third one never got a decode instance."""
    problem = problem_of(CHAT, 4, 2, BASELINES[WITHOUT])
    placed = fixed_placement(problem, 4, BASELINES[WITHOUT])
    cluster = build(cluster_file(problem, named(problem, placed.prefill, placed.decode)))
    decode = next(number for number, instance in enumerate(cluster.instances) if instance.role == "decode")
    rows = Outcomes.empty(3)
    rows.arrived_s[:] = [0.0, 0.0, 11.0]
    rows.prefill_finished_s[:] = [1.0, 1.0, np.nan]
    rows.finished_s[:] = [6.0, 11.0, np.nan]
    rows.input_tokens[:], rows.output_tokens[:] = 200, 100
    rows.target[:] = [decode, decode, -1]
    at_s, shares = kv_shares(cluster, rows, 0.0)
    capacity = cluster.instances[decode].kv_capacity_bytes / problem.model.kv_bytes_per_token
    assert shares.shape == (1, len(at_s))
    for time_s, tokens in ((0.5, 0), (3.0, 600), (8.0, 300)):
        place = int(np.abs(at_s - time_s).argmin())
        assert shares[0, place] * capacity == pytest.approx(tokens)


def test_the_memory_is_measured_when_the_batch_has_settled() -> None:
    """Near the highest rate a batch settles in several times the time of a request."""
    shares = np.array(run_cell(cell(MEMORY, CHAT, HERO, 4)).series["kv_share"])[:, 1]
    third = len(shares) // 3
    assert shares[:third].mean() > 0.85 * shares[-third:].mean()


class Records(dict[str, list[Record]]):
    """The records of each experiment, whose cells run when they are needed."""

    def __init__(self, chosen: dict[str, list[Cell]]) -> None:
        super().__init__()
        self._chosen = chosen

    def __missing__(self, name: str) -> list[Record]:
        self[name] = [run_cell(cell) for cell in self._chosen[name]]
        return self[name]


@pytest.fixture(scope="module")
def records() -> Records:
    """A few cells of every experiment."""
    some = ("ring", WITHOUT, HERO)
    chosen = {
        SCALABILITY.name: [cell(SCALABILITY, CHAT, policy, span, 2) for policy in some for span in (2, 4)],
        PREDICTION.name: [cell(PREDICTION, CHAT, policy, 4, load) for policy in (WITHOUT, HERO) for load in (1.0, 1.3)],
        LATENCY.name: [cell(LATENCY, CHAT, policy, 4, 2, load) for policy in some for load in (0.25, 1)],
        THROUGHPUT.name: [
            cell(THROUGHPUT, "fp16-512", policy, span, 4, 4096) for policy in BASELINES for span in (2, 4)
        ],
        LOSS.name: [
            cell(LOSS, "int32-100g", policy, 2, slots, 0.001) for policy in LOSS.policies for slots in (32, 128)
        ],
        MEMORY.name: [cell(MEMORY, CHAT, policy, 4) for policy in (WITHOUT, HERO)],
    }
    return Records(chosen)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in VIEWS]
)
def test_every_page_has_its_figure_and_every_cell(name: str, records: Records, tmp_path: Path) -> None:
    one, some = EXPERIMENTS[name], records[name]
    text = write_heroserve(one, some, tmp_path).read_text()
    assert len(cells_grid(one, some).rows) == len({record.key.rpartition("/")[0] for record in some})
    assert (tmp_path / "figures" / f"{name.removeprefix('heroserve-')}.png").is_file()
    for finding in heroserve_findings(one, some):
        assert finding.claim in text


def test_ranges_are_the_lowest_and_highest_gain(records: Records) -> None:
    some = records[THROUGHPUT.name]
    (metric,) = VIEWS[THROUGHPUT.name].metrics
    found = gains(some, metric, WITHOUT)
    times = {(record.cell.policy, record.cell.settings["span"]): record.figures["time_us"] for record in some}
    assert sorted(found.values()) == pytest.approx(sorted(times[WITHOUT, span] / times[HERO, span] for span in (2, 4)))
    (grid,) = range_grids(THROUGHPUT, some)
    last = [heading.title for heading in grid.headings].index(f"over {WITHOUT}")
    assert [row[last].text for row in grid.rows] == [f"{found[key]:.2f}" for key in found]


@pytest.mark.slow
def test_ranges_of_latency_leave_out_overload(records: Records) -> None:
    """Over four servers the ring is overloaded at the rate that the hierarchical ring sustains."""
    some = records[LATENCY.name]
    metric = VIEWS[LATENCY.name].metrics[0]
    assert overloaded(some, "ring") == {(CHAT, (4, 2, 1))}
    assert not overloaded(some, HERO)
    assert {point for _, point in gains(some, metric, "ring")} == {(4, 2, 0.25)}
    assert {point for _, point in gains(some, metric, WITHOUT)} == {(4, 2, 0.25), (4, 2, 1)}
    grid = range_grids(LATENCY, some)[0]
    titles = [heading.title for heading in grid.headings]
    (row,) = grid.rows
    (gain,) = gains(some, metric, "ring").values()
    assert row[titles.index("over ring")].text == f"{gain:.2f} (1)"
    assert "(" not in row[titles.index(f"over {WITHOUT}")].text


def test_findings_say_where_aggregation_brings_nothing(records: Records) -> None:
    found = {finding.claim: finding for finding in heroserve_findings(THROUGHPUT, records[THROUGHPUT.name])}
    sentence = found[f"time: {HERO} is better than {WITHOUT}"].sentence
    assert "Aggregation brings nothing at 1 points: span 2: 1 of 1, 4: 0 of 1" in sentence


def test_all_cells_have_names() -> None:
    for experiment in EXPERIMENTS.values():
        found = cells(experiment, "paper", experiment.profiles, (0, 1))
        assert len({cell.key for cell in found}) == len(found)


def test_one_cell_runs_from_the_command_line(tmp_path: Path) -> None:
    chosen = ["--cell", "fp16-512,4,4,4096,heroserve", "--out", str(tmp_path), "--seeds", "1"]
    result = CliRunner().invoke(app, ["experiment", "heroserve-ina-throughput", *chosen])
    assert result.exit_code == 0, result.output
    assert "heroserve" in result.output
