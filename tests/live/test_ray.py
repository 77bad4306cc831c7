"""Cells on a local Ray give the same results as on processes; skipped without Ray, a failure where Ray is required."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvroute.planner.comparison.cells import Record
from kvroute_studies.netkv.cases import EXPERIMENTS
from kvroute_studies.netkv.readings import reading
from kvroute_studies.netkv.setup import Study, run_cell
from kvroute_studies.shared.cells import cells
from kvroute_studies.shared.runner import run_cells

if not os.environ.get("KVROUTE_REQUIRE_LIVE"):
    pytest.importorskip("ray", reason="Ray is not installed: uv pip install -r requirements/live.txt")


def _without_clock(record: Record) -> bytes:
    summary = msgspec.structs.replace(record.summary, decision_s=None, wall_s=0.0, cpu_s=0.0)
    return msgspec.json.encode(msgspec.structs.replace(record, summary=summary))


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # Ray's own imports cause warnings
def test_ray_and_processes_give_equal_records(tmp_path: Path) -> None:
    """For the ablation ladder, Ray and local processes give equal records in the order of the cells."""
    sweep = cells(EXPERIMENTS["netkv-ablation"], "paper", ("chatbot",), (0,))
    run = partial(run_cell, Study(reading("paper")))
    here = run_cells(sweep, run, tmp_path / "local.jsonl", workers=1)
    there = run_cells(sweep, run, tmp_path / "ray.jsonl", on="ray")
    assert [record.key for record in there] == [cell.key for cell in sweep]
    assert [_without_clock(record) for record in there] == [_without_clock(record) for record in here]
