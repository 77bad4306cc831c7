"""`kvroute timing fit` of benchmark reports: timing, errors and range, and faults in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.cli.cli_rig import Kvroute, document
from tests.measurements.test_benchmark_runs import DECODE, PREFILL, exact
from tests.measurements.test_inferencex import rows
from tests.measurements.test_reports import vllm


def sweep(folder: Path) -> list[str]:
    """Write a report for each of four loads and two lengths; return the files."""
    files = []
    for prompt in (1000, 4000):
        for clients in (1, 2, 8, 32):
            point = exact(prompt, clients, DECODE, PREFILL)
            report = vllm(clients) | {
                "total_input_tokens": 40 * prompt, "request_throughput": point.requests_per_s,
                "median_ttft_ms": 1e3 * point.ttft_s, "median_tpot_ms": 1e3 * point.tpot_s,
            }  # fmt: skip
            files.append(folder / f"{prompt}-{clients}.json")
            files[-1].write_text(json.dumps(report))
    return [str(file) for file in files]


def test_reports_give_a_timing_its_errors_and_its_range(kvroute: Kvroute, tmp_path: Path) -> None:
    files = sweep(tmp_path)
    ended = kvroute("timing", "fit", *files, "--name", "h100")
    timing = yaml.safe_load(ended.out)["timing"]["h100"]
    assert timing["prefill"]["kind"] == "linear"
    assert "prefill: 4 measurements, mean error" in ended.err
    assert "TTFT of 4 of 8 runs, at higher load, is not used" in " ".join(ended.err.split())
    assert "decode: 8 measurements, mean error" in ended.err
    limits = "prompts of 1,000 to 4,000 tokens, batches of 1 to 31 requests with a mean of 1,100 to 4,100 tokens"
    assert f"# fitted on {limits}\n" in ended.out
    assert f"range: {limits}; beyond it the timing is an extrapolation" in " ".join(ended.err.split())
    found = document(kvroute("timing", "fit", *files, "--json"))
    assert found["range"]["batch"] == [1, 31]
    assert found["prefill"]["spec"]["per_token_s"] == pytest.approx(PREFILL.per_token_s, rel=0.02)
    assert found["decode"]["spec"]["base_s"] == pytest.approx(DECODE.base_s, rel=0.02)


def test_a_profile_has_a_range_too(kvroute: Kvroute, tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("tokens,seconds\n100,0.11\n200,0.12\n")
    (tmp_path / "steps.csv").write_text("batch,seconds\n1,0.011\n2,0.012\n")
    files = [str(tmp_path / name) for name in ("prompts.csv", "steps.csv")]
    assert document(kvroute("timing", "fit", *files, "--json"))["range"] == {
        "prompt_tokens": [100, 200],
        "batch": [1, 2],
    }
    ended = kvroute("timing", "fit", files[0])
    assert "# fitted on prompts of 100 to 200 tokens\n" in ended.out
    assert "decode: not measured" in ended.err


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (
            rows({}, {"conc": "8", "hardware": "b200"}),
            (),
            "several values of hardware: b200, h200; choose with --hardware",
        ),
        (rows({}, {"conc": "8"}), ("--where", "precision"), "'precision' is not COLUMN=VALUE"),
        (rows({}, {"conc": "8"}), ("--where", "precision=fp4"), "has no rows with precision fp4; choose one of fp8"),
        (rows({}), ("--hardware", "H200", "--tp", "8"), "one batch size, of about 3.97, does not determine"),
        (json.dumps(vllm()), ("--tp", "8"), "is a report of one engine; remove --tp"),
        (json.dumps(vllm()), (), "one batch size, of about 3.86, does not determine the time per request; give runs"),
        (json.dumps(vllm() | {"median_ttft_ms": 0.1}), (), "shorter than a GPU takes to read a model's weights"),
        ("tokens,seconds\n1,2\n2,3\n", ("--where", "a=b"), "has no rows of InferenceX; remove --where"),
        ("hello\n", (), "has no measurements"),
        ('{"a": [1]}', (), "is JSON of another kind"),
    ],
)
def test_faults_are_one_sentence(
    kvroute: Kvroute, tmp_path: Path, text: str, options: tuple[str, ...], problem: str
) -> None:
    path = tmp_path / "report"
    path.write_text(text)
    ended = kvroute("timing", "fit", str(path), *options)
    assert (ended.code, problem in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err


def test_reports_and_profiles_are_not_mixed(kvroute: Kvroute, tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("tokens,seconds\n100,0.11\n200,0.12\n")
    ended = kvroute("timing", "fit", str(tmp_path / "prompts.csv"), *sweep(tmp_path))
    assert (ended.code, "reports and profiles are given" in ended.err) == (2, True)
