"""Tests of DualPath's experiments and their pages."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvroute.cli.app import main
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.storage.spec import AgentRun
from kvroute_studies.dualpath.run import EXPERIMENTS, capacity, run_cell, run_of, sessions_run
from kvroute_studies.dualpath.setup import (
    DUALPATH_PROFILES,
    DualPathAssumptions,
    served_model,
    storage_cluster,
)
from kvroute_studies.dualpath.tables import (
    dualpath_findings,
    dualpath_grid,
    dualpath_lines,
    write_dualpath,
)

ABLATION = EXPERIMENTS["dualpath-ablation"]
AGENTS = 96


def cell(experiment: str, policy: str, profile: str = "ds-660b", seed: int = 0, **settings: float) -> Cell:
    return Cell(experiment=experiment, reading="paper", profile=profile, settings=settings, policy=policy, seed=seed)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `kvroute experiment`; it returns exit code, stdout and stderr."""

    def started(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvroute", "experiment", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return started


@pytest.fixture(scope="module")
def ablation() -> list[Record]:
    return [
        run_cell("", cell("dualpath-ablation", policy, seed=seed, agents=AGENTS))
        for policy in ABLATION.policies
        for seed in (0, 1)
    ]


@pytest.mark.parametrize(("profile", "gflop"), [("ds-660b", 141), ("ds-27b", 13.8), ("qwen-32b", 108)])
def test_models_take_the_published_operations_at_the_mean_context(profile: str, gflop: float) -> None:
    """GFLOP for one token with 32.7K tokens of context."""
    assumed = DualPathAssumptions()
    one = DUALPATH_PROFILES[profile]
    model = served_model(one, assumed)
    operations = model.prefill_s(32_700, 1) * assumed.gpu_flops * one.mfu
    assert operations / 1e9 == pytest.approx(gflop, rel=0.03)


def test_kv_sizes_are_those_of_the_publication() -> None:
    assert {name: profile.kv_bytes for name, profile in DUALPATH_PROFILES.items()} == {
        "ds-660b": 48_068,
        "ds-27b": 21_720,
        "qwen-32b": 262_144,
    }


def test_groups_have_their_published_sizes() -> None:
    """2P4D has one group of each side; with other ratios every node is a group; a model without expert parallelism has
    groups of one GPU."""
    assumed = DualPathAssumptions()
    large = DUALPATH_PROFILES["ds-660b"]
    groups = [storage_cluster(large, assumed, *nodes) for nodes in ((2, 4), (48, 96), (1, 3))]
    assert [(group.prefill_group, group.decode_group) for group in groups] == [(16, 32), (16, 32), (8, 8)]
    assert storage_cluster(DUALPATH_PROFILES["qwen-32b"], assumed, 1, 2).prefill_group == 1


@pytest.mark.slow
def test_every_system_of_the_ablation_runs_the_same_turns(ablation: list[Record]) -> None:
    by_seed = {seed: [record for record in ablation if record.cell.seed == seed] for seed in (0, 1)}
    for records in by_seed.values():
        assert len({record.figures["turns"] for record in records}) == 1
        assert {record.figures["agents"] for record in records} == {AGENTS}
        reads = {record.cell.policy: record.summary.kv_bytes for record in records}
        assert reads.pop("oracle") == 0
        assert max(reads.values()) == pytest.approx(min(reads.values()))


@pytest.mark.slow
def test_both_sides_are_faster_than_prefill_nodes_alone(ablation: list[Record]) -> None:
    time_s = {record.cell.policy: record.figures["end_s"] for record in ablation if record.cell.seed == 0}
    assert time_s["scheduling"] < time_s["basic"]
    assert time_s["oracle"] == min(time_s.values())


@pytest.mark.slow
def test_table_findings_and_page(ablation: list[Record], tmp_path: Path) -> None:
    grid = dualpath_grid(ABLATION, ablation)
    assert [row[2].text for row in grid.rows] == list(ABLATION.policies)
    assert [heading.title for heading in grid.headings][:5] == ["model", "agents", "system", "JCT s", "gain"]
    assert grid.rows[0][4].text == "1.00"
    claims = [found.claim for found in dualpath_findings(ABLATION, ablation)]
    assert claims[0] == "layerwise is faster than basic"
    assert len(claims) == len(ABLATION.policies) - 1
    page = write_dualpath(ABLATION, ablation, tmp_path).read_text()
    assert "kvroute experiment dualpath-ablation --seeds 2" in page
    assert (tmp_path / "figures" / "dualpath.png").stat().st_size > 10_000


def test_every_line_of_the_figure_is_inside_its_panel() -> None:
    """Panels share the scale of the highest one, and eight of them take two rows."""
    base = run_cell("", cell("dualpath-ablation", "basic", agents=8))
    experiment, records = EXPERIMENTS["dualpath-assumptions"], []
    for buffer in range(1, 9):
        for quota in (0.1, 1.0):
            settings = cell("dualpath-assumptions", "basic", mfu=0.1, buffer=buffer, storage=0.5, quota=quota)
            records.append(msgspec.structs.replace(base, cell=settings, figures={"end_s": 1000.0 * buffer}))
    figure = dualpath_lines(experiment, records)
    drawn = [panel for panel in figure.axes if panel.get_visible()]
    assert len(drawn) == 8
    assert len({panel.get_position().y0 for panel in drawn}) == 2
    for panel in drawn:
        assert panel.get_ylim()[0] == 0.0
        assert panel.dataLim.y1 < panel.get_ylim()[1]


def test_a_gain_of_capacity_is_the_inverse_of_a_gain_of_time() -> None:
    """A higher capacity is better, a longer time is worse."""

    def record(experiment: str, policy: str, **figures: float) -> Record:
        base = run_cell("", cell("dualpath-ablation", "basic", agents=8))
        return msgspec.structs.replace(base, cell=cell(experiment, policy, length=64), figures=base.figures | figures)

    online = EXPERIMENTS["dualpath-online"]
    rates = [record(online.name, "basic", capacity_per_s=0.2), record(online.name, "scheduling", capacity_per_s=0.5)]
    grid = dualpath_grid(online, rates)
    assert [row[4].text for row in grid.rows] == ["1.00", "2.50"]


def test_the_capacity_is_the_highest_rate_within_the_limits() -> None:
    one = cell("dualpath-online", "basic", length=32)
    rate, tried = capacity(one)
    meets = {at: point["ttft_s"] <= 4.0 and point["tpot_s"] <= 0.05 for at, point in tried}
    assert rate == max(at for at, met in meets.items() if met)
    too_high = min(at for at, met in meets.items() if not met)
    assert rate < too_high <= rate / 0.98 + 1e-9


def test_agents_arrive_at_the_given_rate() -> None:
    run = run_of(cell("dualpath-online", "basic", length=32), agents_per_s=0.5)
    assert len(run.start_s[run.start_s < run.end_s]) == pytest.approx(0.5 * run.end_s, rel=0.1)
    assert math.isfinite(run.end_s)


def test_a_cell_runs_from_the_command_line(tmp_path: Path, run: Run) -> None:
    options = ("dualpath-ratio", "--seed", "3", "--out", str(tmp_path), "--json", "--cell")
    code, _, err = run(*options, "ds-27b,1,1,64,basic")
    assert code == 2
    assert "dualpath-ratio has no cell 'ds-27b,1,1,64,basic'" in err
    code, out, err = run(*options, "ds-27b,1,1,1024,basic")
    assert code == 0, err
    (record,) = json.loads(out)["records"]
    assert record["figures"]["prefill_read_share"] == 1.0
    assert record["figures"]["agents"] == 1024


def test_assumptions_change_what_they_name() -> None:
    def varied(policy: str) -> AgentRun:
        return run_of(cell("dualpath-assumptions", policy, mfu=0.4, buffer=40, storage=0.5, quota=0.1))

    run, usual = varied("scheduling"), run_of(cell("dualpath-ablation", "scheduling", agents=2000))
    assert run.cluster.buffer_bytes == 40e9
    assert run.cluster.storage_bytes_per_s == pytest.approx(usual.cluster.storage_bytes_per_s * 0.5 / 0.9)
    assert run.model.dense_token_s == pytest.approx(usual.model.dense_token_s / 2)
    assert run.policy.quota_s == 0.1
    assert varied("basic").policy.quota_s is None


def session_line(name: str, turns: list[tuple[int, int, list[int], float]]) -> str:
    """Return a recorded session: prompt, output, block ids and pause of each turn."""
    requests = [
        {"t": 10.0 * number, "in": prompt, "out": output, "hash_ids": ids, "think_time": think, "type": "n"}
        for number, (prompt, output, ids, think) in enumerate(turns)
    ]
    return json.dumps({"id": name, "block_size": 64, "requests": requests}) + "\n"


@pytest.fixture
def sessions(tmp_path: Path) -> str:
    path = tmp_path / "sessions.jsonl"
    first = session_line("a", [(200, 30, [1, 2, 3], 0.0), (300, 20, [1, 2, 3, 4], 5.0)])
    path.write_text(first + session_line("b", [(150, 10, [7, 8], 0.0)]))
    return str(path)


def test_recorded_sessions_become_trajectories(sessions: str) -> None:
    trajectories = sessions_run(sessions, cell("dualpath-agents", "basic", agents=4, think=2)).trajectories
    assert trajectories.prompt.tolist() == [200, 300, 150]
    assert trajectories.cached.tolist() == [0, 192, 0]
    assert trajectories.generated.tolist() == [30, 20, 10]
    assert trajectories.think_s.tolist() == [0.0, 2.0, 0.0]
    assert trajectories.start.tolist() == [0, 2, 3]


def test_the_record_of_a_session_run_names_its_file(sessions: str) -> None:
    record = run_cell(sessions, cell("dualpath-agents", "scheduling", agents=4, think=0))
    assert record.config["sessions"].startswith("sessions.jsonl, XXH64 ")
    assert record.figures["agents"] == 4


@pytest.mark.parametrize(
    ("names", "trace", "message"),
    [
        (("dualpath-agents",), None, "--trace: dualpath-agents needs recorded sessions of agents"),
        (("dualpath-ratio",), "sessions", "--trace: only dualpath-agents reads a trace"),
        (("dualpath-agents",), "requests", "the file has requests without sessions"),
        (("dualpath-ratio", "--set", "x=1"), None, "dualpath does not support --reading and --set"),
    ],
)
def test_a_wrong_trace_is_rejected(
    sessions: str, tmp_path: Path, run: Run, names: tuple[str, ...], trace: str | None, message: str
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n')
    paths = {"sessions": sessions, "requests": str(requests)}
    given = ("--trace", paths[trace]) if trace else ()
    code, _, err = run(*names, *given, "--out", str(tmp_path / "out"))
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()
