"""What the pages quote of benches is a figure of their rows."""

from __future__ import annotations

from pathlib import Path

import bench.quoted
import pytest
from bench import all as benches
from bench.measurement import Row
from bench.quoted import QUOTED, QuotedBench, QuotedFigure, write

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
        (QuotedFigure("from cold", "{:.0f} %", "below"), "72 %"),
    ],
)
def test_a_figure_is_of_the_first_row_with_that_measure_and_peer(figure: QuotedFigure, text: str) -> None:
    assert figure.text(ROWS) == text


def test_a_figure_that_was_not_measured_is_an_error() -> None:
    """Without its peer, for example: the old figure stays in the pages."""
    for figure in (QuotedFigure("added", "{:.1f}"), QuotedFigure("CPU", "{:.1f}", "share", "another")):
        with pytest.raises(InputError, match="was measured"):
            figure.text(ROWS)


def test_a_file_has_figures_rows_command_machine_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.quoted, "FOLDER", tmp_path / "results")
    quoted = QuotedBench(("kvroute/kube",), QUOTED["kube.discovery"].figures, ("from cold",))
    monkeypatch.setattr(bench.quoted, "QUOTED", {"kube.discovery": quoted})
    result = read_result(write("kube.discovery", ROWS))
    assert result.figures == {"in-sync": "3.5 s", "in-sync-peer": "12.6 s"}
    assert result.tables["rows"].rows == [
        ["from cold until all is known, 5,000 pods", "3.5 s", ": 12.6 (3.6 times)", ""]
    ]
    assert result.command == ".venv/bin/python -m bench.all kube.discovery --write"
    assert result.changed() == []
    assert " x " in result.machine
    assert bench.quoted.results().keys() == {"bench-kube-discovery"}


def test_a_table_has_target_and_remark_of_the_chosen_rows() -> None:
    error = Row(measure="a, b: error", unit="%", better="lower", ours=12.0, target=10.0, note="a, b: of 3 points")
    quoted = QuotedBench((), rows=("a, b",), remarks=True)
    assert quoted.tables([*ROWS, error])["rows"].rows == [
        ["a, b: error", "12 %", "", "≤ 10, **missed**", "of 3 points"]
    ]
    for measure in ("added", "another"):
        with pytest.raises(InputError, match="was measured"):
            QuotedBench((), rows=(measure,)).tables(ROWS)


def test_every_file_is_of_a_bench_that_can_be_run_again() -> None:
    files = bench.quoted.results()
    names = {"-".join(("bench", *name.replace("_", "-").split("."))): name for name in QUOTED}
    assert files.keys() == names.keys()
    for stem, result in files.items():
        quoted = QUOTED[names[stem]]
        assert result.figures.keys() == quoted.figures.keys()
        assert bool(result.tables) == bool(quoted.rows)
        assert f"bench.all {names[stem]} --write" in result.command
    assert QUOTED.keys() <= set(benches.BENCHES)
    assert all(all(code_digests(quoted.code).values()) for quoted in QUOTED.values())


def test_quick_figures_are_not_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench.all", "simulate", "--quick", "--write"])
    with pytest.raises(SystemExit):
        benches.main()
    assert "exclude each other" in capsys.readouterr().err
