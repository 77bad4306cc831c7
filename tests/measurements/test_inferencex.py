"""Rows of InferenceX: one engine, its repeats, and rows that cannot be right."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pytest

from kvroute.measurements import ReportedRuns, fit_runs, is_inferencex, read_inferencex
from kvroute.types import InputError

MEASURED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "measured" / "inferencex.csv"
ROW = {
    "hardware": "h200", "framework": "sglang", "model": "dsr1", "precision": "fp8", "spec_method": "none",
    "disagg": "False", "decode_tp": "8", "decode_ep": "1", "decode_dp_attention": "False", "isl": "1000", "osl": "1000",
    "conc": "4", "median_ttft": "0.1", "median_tpot": "0.01", "median_e2el": "9.09",
}  # fmt: skip


def rows(*changes: dict[str, str]) -> str:
    """Return a file with a row for each change of `ROW`."""
    text = io.StringIO()
    table = csv.DictWriter(text, ROW)
    table.writeheader()
    table.writerows(ROW | change for change in changes)
    return text.getvalue()


def read(text: str, **chosen: str) -> ReportedRuns:
    """Read the file."""
    assert is_inferencex(text)
    return read_inferencex(Path("rows.csv"), text, chosen)


def test_repeats_become_their_median_and_pairs_are_left_out() -> None:
    text = rows({}, {"median_ttft": "0.3"}, {"median_ttft": "0.2"}, {"conc": "8"}, {"disagg": "True"})
    reported = read(text)
    assert [(point.clients, point.ttft_s) for point in reported.runs] == [(4, 0.2), (8, 0.1)]
    assert reported.runs[0].input_tokens == 900
    assert reported.remarks == (
        "1 runs with prefill and decode on different engines are left out: TTFT has the handover",
    )


def test_a_rank_has_its_share_of_the_clients() -> None:
    reported = read(rows({"decode_dp_attention": "True", "conc": "64"}))
    assert reported.runs[0].clients == 8
    assert "one of 8 data-parallel ranks" in reported.remarks[0]
    assert "per token" in read(rows({"spec_method": "mtp"})).remarks[0]


def test_rows_that_contradict_themselves_are_left_out() -> None:
    reported = read(rows({}, {"conc": "8"}, {"conc": "16", "median_e2el": "90.9"}))
    assert [point.clients for point in reported.runs] == [4, 8]
    assert reported.remarks == ("1 rows that contradict themselves are left out (lines 4)",)


@pytest.mark.parametrize(
    ("changes", "chosen", "problem"),
    [
        (({}, {"precision": "fp4"}), {}, "several values of precision: fp4, fp8; choose with --where precision=VALUE"),
        (({}, {"decode_tp": "4"}), {}, "several values of decode_tp: 4, 8; choose with --tp"),
        (({},), {"hardware": "b200"}, "has no rows with hardware b200; choose one of h200"),
        (({},), {"gpu": "b200"}, "the column gpu is missing"),
        (({"disagg": "True"},), {}, "has no run of an engine that prefills and decodes"),
        (({"median_tpot": ""},), {}, "line 2 column median_tpot: '' is not a number"),
        (({"conc": "-1"},), {}, "line 2 column conc: -1 is not valid"),
        (({"median_ttft": "100", "conc": "1"},) * 2, {}, r"TTFT and TPOT make requests .* \(2 of 2 rows are like this"),
        (({"median_tpot": "10", "median_e2el": ""},), {}, "a decode iteration takes 10 s.*milliseconds may be given"),
    ],
)
def test_faults_are_one_sentence(changes: tuple[dict[str, str], ...], chosen: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError, match=problem) as error:
        read(rows(*changes), **chosen)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("hardware", "framework", "precision", "ep", "tpot_error", "ttft_error"),
    [
        ("h200", "sglang", "fp8", "1", 0.06, 0.06),
        ("h200", "trt", "fp8", "8", 0.06, 0.10),
        ("mi300x", "sglang", "fp8", "1", 0.08, 0.10),
        ("mi325x", "sglang", "fp8", "1", 0.08, 0.10),
    ],
)
def test_measured_series_are_fitted(
    hardware: str, framework: str, precision: str, ep: str, tpot_error: float, ttft_error: float
) -> None:
    """DeepSeek-R1 on eight GPUs: 4 to 64 clients, prompts of 1,000 and 8,000 tokens."""
    if not MEASURED.exists():
        assert os.environ.get("KVROUTE_REQUIRE_LIVE") != "1", f"{MEASURED} is missing"
        pytest.skip("inferencex.csv is not here")
    chosen = {"hardware": hardware, "framework": framework, "precision": precision, "decode_ep": ep}
    fixed = {"spec_method": "none", "decode_tp": "8", "decode_dp_attention": "False"}
    found = fit_runs(read(MEASURED.read_text(), **chosen, **fixed).runs)
    assert found.decode.error.n >= 13
    assert found.decode.error.mean_abs_relative < tpot_error
    assert found.prefill.error.mean_abs_relative < ttft_error
    assert found.limits["batch"][1] >= 59
