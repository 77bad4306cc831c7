"""What the pages quote of benches is a figure of their rows."""

from __future__ import annotations

from pathlib import Path

import bench.quoted
import pytest
from bench import all as benches
from bench.measurement import ROOT, Row
from bench.quoted import QUOTED, QuotedFigure, write

from kvroute.types import InputError
from kvroute_studies.shared.result_files import code_digests, read_result

ROWS = [
    Row(measure="from cold until all is known, 5,000 pods", unit="s", better="lower", ours=3.5, peer=12.6),
    Row(measure="CPU per request", unit="us", better="lower", ours=400.0, peer=200.0, peer_name="vllm-router"),
    Row(measure="CPU per request", unit="us", better="lower", ours=400.0, peer=100.0, peer_name="sglang-router"),
    Row(measure="added latency", unit="us", better="lower", ours=None, note="no root"),
]


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (QuotedFigure("from cold", "{:.1f} s"), "3.5 s"),
        (QuotedFigure("from cold", "{:.1f} s", "peer"), "12.6 s"),
        (QuotedFigure("from cold", "{:.1f}", "ratio"), "3.6"),
        (QuotedFigure("CPU", "{:.1f}", "share", "sglang-router"), "4.0"),
    ],
)
def test_a_figure_is_of_the_first_row_with_that_measure_and_peer(figure: QuotedFigure, text: str) -> None:
    assert figure.text(ROWS) == text


def test_a_figure_that_was_not_measured_is_an_error() -> None:
    """Without its peer, for example: the old figure stays in the pages."""
    for figure in (QuotedFigure("added", "{:.1f}"), QuotedFigure("CPU", "{:.1f}", "share", "another")):
        with pytest.raises(InputError, match="was measured"):
            figure.text(ROWS)


def test_a_file_has_figures_command_machine_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.quoted, "FOLDER", tmp_path / "results")
    result = read_result(write("kube.discovery", ROWS))
    assert result.figures == {"in-sync": "3.5 s", "in-sync-peer": "12.6 s"}
    assert result.command == ".venv/bin/python -m bench.all kube.discovery --write"
    assert result.changed() == []
    assert " x " in result.machine


def test_every_file_is_of_a_bench_that_can_be_run_again() -> None:
    files = {path.stem: read_result(path) for path in (ROOT / "bench" / "results").glob("*.json")}
    names = {name.replace(".", "-").replace("_", "-"): name for name in QUOTED}
    assert files.keys() == names.keys()
    for stem, result in files.items():
        assert result.figures.keys() == QUOTED[names[stem]].figures.keys()
        assert f"bench.all {names[stem]} --write" in result.command
    assert QUOTED.keys() <= set(benches.BENCHES)
    assert all(all(code_digests(quoted.code).values()) for quoted in QUOTED.values())


def test_quick_figures_are_not_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench.all", "simulate", "--quick", "--write"])
    with pytest.raises(SystemExit):
        benches.main()
    assert "exclude each other" in capsys.readouterr().err
