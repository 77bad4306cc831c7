"""A new family of experiments: its data and a function that runs a cell are enough for results, table and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts
from kvroute.types import InputError
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import plain_family, run_family
from kvroute_studies.shared.sweeps import RunOptions

MODEL = Experiment(
    name="guess",
    title="A guess",
    source="a test",
    axes={"load": (0.5, 1.0)},
    policies=("fast", "slow"),
    profiles=("small", "large"),
    expectation="fast is faster than slow",
    versus=("fast", "slow"),
)


def run_cell(cell: Cell) -> Record:
    """Return a record in which `fast` takes half as long as `slow`."""
    summary = Summary(
        policy=cell.policy,
        seed=cell.seed,
        requests=RequestCounts(arrived=1, finished=1, rejected=0, in_flight=0),
        measured=1,
        ttft_s=Spread(mean=(cell.settings["load"] + 0.01 * cell.seed) * (1 if cell.policy == "fast" else 2)),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(),
        tbt_s=Spread(),
        tpot_s=Spread(),
        slo_attainment=1.0,
        goodput_per_s=1.0,
        throughput_per_s=1.0,
        tier_share={},
        cache_hit=0.0,
        prefill_cache_hit=0.0,
        kv_bytes=0.0,
        link_load={},
        wall_s=0.0,
        cpu_s=0.0,
    )
    return Record(key=cell.key, cell=cell, config={}, summary=summary)


GUESSES = plain_family("guesses", {MODEL.name: MODEL}, run_cell)


def options_for(
    out: Path, *, cell: str | None = None, as_json: bool = False, changes: tuple[str, ...] = ()
) -> RunOptions:
    return RunOptions(
        reading="paper", changes=changes, profiles=("small",), trace=None, cell=cell, seeds=(0, 1), on="local",
        workers=1, out=out, as_json=as_json,
    )  # fmt: skip


def test_a_family_needs_only_data_and_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The general table and page show the selected profile; a second call runs no cell and prints the same table."""
    run_family(GUESSES, [MODEL], options_for(tmp_path))
    first = capsys.readouterr()
    folder = tmp_path / "paper" / "generated"
    assert len((folder / "guess.jsonl").read_text().splitlines()) == 2 * 2 * 2
    assert "fast is faster than slow" in (folder / "guess" / "report.html").read_text()
    assert "small" in first.out
    assert "large" not in first.out
    stored = (folder / "guess.jsonl").read_bytes()
    run_family(GUESSES, [MODEL], options_for(tmp_path))
    assert (capsys.readouterr().out, (folder / "guess.jsonl").read_bytes()) == (first.out, stored)


def test_a_single_cell_gets_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints its records for every seed."""
    run_family(GUESSES, [MODEL], options_for(tmp_path, cell="small,1,slow", as_json=True))
    records = json.loads(capsys.readouterr().out)["records"]
    assert [record["summary"]["ttft_s"]["mean"] for record in records] == [2.0, 2.02]
    assert [path.name for path in (tmp_path / "paper" / "generated").iterdir()] == ["guess.jsonl"]


def test_options_of_other_families_are_rejected_before_any_run(tmp_path: Path) -> None:
    """The message names the family, and no folder is created."""
    with pytest.raises(InputError, match="guesses does not support --reading, --set and --trace"):
        run_family(GUESSES, [MODEL], options_for(tmp_path / "new", changes=("ecmp=flow",)))
    assert not (tmp_path / "new").exists()
