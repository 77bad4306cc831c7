"""`kvroute explain LOG --calibration` on the log of a live gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.serve.rig import rig
from tests.serve.stub_engines import run
from typer.testing import CliRunner

from kvroute.cli.app import app


def recorded(path: Path, section: str) -> Path:
    """Record the log of a gateway that serves some streams, one after the other and all at once."""

    async def scenario() -> None:
        async with rig(f"{section}  log: {{events: {path}}}\n") as gate:
            for number in range(6):
                assert (await gate.ask([number] * (100 + number), stream=True)).status == 200
            await asyncio.gather(*(gate.ask([number] * 500, stream=True) for number in range(6)))
            if section:
                rows = gate.gateway.state.tick(gate.gateway.now()).calibration
                assert sum(row.requests for row in rows) == 12
                page = await gate.metrics()
                assert "kvroute_ttft_prediction_ratio_count 12" in page
                assert 'kvroute_class_ttft_seconds_count{class="default"} 12' in page

    run(scenario())
    return path


def test_predictions_are_compared_with_what_came(tmp_path: Path) -> None:
    """Ten deciles with all streams of the log, as a table and as JSON."""
    log = recorded(tmp_path / "events.log", "  classes: {default: {}}\n")
    shown = CliRunner().invoke(app, ["explain", str(log), "--calibration"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "deciles of the prediction" in shown.output
    assert "12 requests" in shown.output
    plain = CliRunner().invoke(app, ["explain", str(log), "--calibration", "--json"])
    found = json.loads(plain.output)
    assert found["requests"] == 12
    assert sum(row["requests"] for row in found["deciles"]) == 12
    assert all(row["predicted_s"] > 0 and row["actual_s"] > 0 for row in found["deciles"])


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--calibration"], "classes"),
        (["0", "--calibration"], "leave out 0"),
        ([], "no request is named"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(more: list[str], what: str, tmp_path: Path) -> None:
    """A log without predictions, an argument too many, and one too few."""
    log = recorded(tmp_path / "events.log", "")
    shown = CliRunner().invoke(app, ["explain", str(log), *more], env={"COLUMNS": "200"})
    assert shown.exit_code != 0
    assert what in shown.output + str(shown.exception)
