"""`autoscaling`: its requests, its ways, and the text about its runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.workload import generate
from kvroute.sim.workload.diurnal import DIURNAL
from kvroute_studies.autoscaling.page import (
    autoscaling_findings,
    autoscaling_grid,
    cheapest,
    saving,
    write_autoscaling,
)
from kvroute_studies.autoscaling.run import (
    AUTOSCALING,
    DECODE,
    KVROUTE,
    LEVELS,
    PREFILL,
    QUEUE,
    STATIC,
    cluster,
    requests_of,
    run_cell,
)
from kvroute_studies.shared.cells import cells

HOUR_S = 5.0
"""A day of two minutes."""


def cell(policy: str, level: int = 0, seed: int = 0) -> Cell:
    """Return a cell of the sweep."""
    settings = {"level": float(level)}
    return Cell(
        experiment="autoscaling", reading="paper", profile="generated", settings=settings, policy=policy, seed=seed
    )


def test_every_way_has_a_setting_for_every_level() -> None:
    assert all(len(LEVELS[policy]) == len(AUTOSCALING.axes["level"]) for policy in AUTOSCALING.policies)
    assert len(cells(AUTOSCALING, "paper", AUTOSCALING.profiles, (0, 1))) == 2 * 3 * len(AUTOSCALING.axes["level"])
    roles = [instance.role for instance in cluster().instances]
    assert (roles.count("prefill"), roles.count("decode")) == (PREFILL, DECODE)


def test_a_day_follows_the_profile_and_is_the_same_for_a_seed() -> None:
    trace = requests_of(3, hour_s=60.0)
    counts = [sum(k * 60.0 <= r.at_s < (k + 1) * 60.0 for r in trace.requests) for k in range(24)]
    assert counts[14] > 2.5 * counts[3]
    assert sum(counts) == pytest.approx(sum(DIURNAL) * 2.0 * 60.0, rel=0.1)
    assert requests_of(3, hour_s=60.0) == trace


def test_a_short_trace_is_repeated_with_new_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": round(r.at_s * 1e3), "input_length": r.input_tokens, "output_length": max(r.output_tokens, 1),
         "hash_ids": list(r.blocks)}
        for r in generate(400, seed=0).requests
    ]  # fmt: skip
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    trace = requests_of(0, str(path), 20.0)
    assert len(trace.requests) > 800
    first, again = trace.requests[0], trace.requests[400]
    assert first.input_tokens == again.input_tokens
    assert not set(first.blocks) & set(again.blocks)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [run_cell(cell(policy, 1, seed), hour_s=HOUR_S) for policy in (STATIC, QUEUE, KVROUTE) for seed in (0, 1)]


def test_a_run_reports_gpu_hours_of_a_whole_day(records: list[Record]) -> None:
    for record in records:
        assert 0.0 < record.figures["gpu_hours"] <= 24 * 4 * (PREFILL + DECODE)
        assert 0.0 <= record.figures["attainment"] <= 1.0
        assert record.series["prefill instances"]
    static = next(record for record in records if record.cell.policy == STATIC)
    assert static.figures["gpu_hours"] == pytest.approx(24 * 4 * sum(LEVELS[STATIC][1]), rel=0.01)


def test_the_cheapest_setting_that_attains_enough_is_compared(records: list[Record], tmp_path: Path) -> None:
    attained = {STATIC: 0.95, QUEUE: 0.92, KVROUTE: 0.91}
    hours = {STATIC: 1000.0, QUEUE: 900.0, KVROUTE: 800.0}
    made = [
        msgspec.structs.replace(
            record,
            figures={
                "attainment": attained[record.cell.policy],
                "gpu_hours": hours[record.cell.policy] + record.cell.seed,
            },
        )
        for record in records
    ]
    assert cheapest(made, KVROUTE) == 1
    saved = saving(made, STATIC)
    assert saved is not None
    assert saved.mean == pytest.approx(0.2, abs=0.001)
    assert [finding.holds for finding in autoscaling_findings(made)] == ["holds", "holds"]
    assert "800" in autoscaling_grid(made).rows[-1][2].text
    assert "GPU-hours" in write_autoscaling(AUTOSCALING, made, tmp_path).read_text()
    low = [msgspec.structs.replace(record, figures={**record.figures, "attainment": 0.5}) for record in made]
    assert cheapest(low, KVROUTE) is None
    assert saving(low, STATIC) is None
