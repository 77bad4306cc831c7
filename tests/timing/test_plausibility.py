"""Implausible values: a factor of a thousand from a wrong unit gives a warning when it is read, usual values never
do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import CLUSTERS, EXAMPLES
from typer.testing import CliRunner

from kvroute import plausibility
from kvroute.cli.app import app
from kvroute.llm import MODELS
from kvroute.sim.workload import generate, read
from kvroute.topology import load, parse

SMALL = (EXAMPLES / "small.yaml").read_text(encoding="utf-8")
FREE_GB = st.floats(20, 250)
"""Memory of one GPU beside the model's weights."""


@given(FREE_GB, st.integers(1, 72), st.sampled_from(sorted(MODELS)))
def test_memory_of_real_gpus_causes_no_warning_and_a_wrong_unit_does(free_gb: float, gpus: int, name: str) -> None:
    token_bytes = MODELS[name].kv_bytes_per_token
    assert plausibility.of_kv_memory(free_gb * 1e9 * gpus, gpus, token_bytes) is None
    much = plausibility.of_kv_memory(free_gb * 1e12 * gpus, gpus, token_bytes)
    assert much is not None
    assert "too large" in much.cause


@given(st.floats(1e-6, 0.02), st.floats(1e-3, 0.3), st.integers(1, 9))
def test_times_of_real_engines_cause_no_warning_and_milliseconds_as_seconds_do(
    token_s: float, step_s: float, points: int
) -> None:
    """The range is from a small model on the fastest GPUs to engines on CPUs."""
    prompts = [(512.0 * k, 512.0 * k * token_s) for k in range(1, points + 1)]
    assert plausibility.of_prefill(prompts) is None
    assert plausibility.of_decode([step_s] * points) is None
    slow = plausibility.of_prefill([(tokens, second * 1e3) for tokens, second in prompts])
    assert (slow is not None) == (token_s * 1e3 > plausibility.TOKEN_S_MAX)
    slow = plausibility.of_decode([step_s * 1e3] * points)
    assert (slow is not None) == (step_s * 1e3 > plausibility.STEP_S_MAX)


@given(st.floats(1.0, 50.0), st.integers(20, 10**6))
def test_rates_of_published_traces_cause_no_warning_and_seconds_as_milliseconds_do(rate: float, requests: int) -> None:
    assert plausibility.of_arrivals(requests, min(requests / rate, 7 * 86400.0)) is None
    fast = plausibility.of_arrivals(requests, requests / rate / 1e3)
    assert fast is not None
    assert "use seconds" in fast.cause


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_examples_cause_no_warning(path: Path) -> None:
    assert load(path).remarks == ()


def test_generated_traces_cause_no_warning(tmp_path: Path) -> None:
    assert generate(2000, seed=1).remarks == ()
    CliRunner().invoke(app, ["trace", "generate", str(tmp_path / "a.jsonl"), "--requests", "400"])
    assert read(tmp_path / "a.jsonl").remarks == ()


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("180 GB", "440 TB", "16: defaults.kv_capacity: 440 TB of KV memory on 4 GPUs are 110 TB per GPU"),
        ("180 GB", "120 MB", "16: defaults.kv_capacity: 120 MB of KV memory hold 366 tokens of this model"),
        ("90 us", "40 ms", None),
        ("90 us", "90 ms", "13: timing.default.prefill: prefill takes 90.02 ms per prompt token"),
        ("12.5 ms", "50 s", "14: timing.default.decode: a decode iteration takes 50 s, and so does each token"),
    ],
)
def test_warnings_about_a_cluster_file_name_line_and_field(
    tmp_path: Path, old: str, new: str, warning: str | None
) -> None:
    """There is one warning for all instances; the file is read nevertheless."""
    path = tmp_path / "a.yaml"
    path.write_text(SMALL.replace(old, new), encoding="utf-8")
    result = CliRunner().invoke(app, ["topology", "check", str(path)])
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert len(lines) == (warning is not None)
    assert not lines or lines[0].startswith(f"{path}:{warning}")


def test_a_warning_about_an_instances_memory_names_the_instance() -> None:
    text = SMALL.replace('gpus: "node1:0-3"}', 'gpus: "node1:0-3", kv_capacity: 40 TB}')
    (remark,) = parse(text, "f").remarks
    assert remark.startswith("f:21: instances[2].kv_capacity: 40 TB of KV memory on 4 GPUs are 10 TB per GPU")


def test_a_trace_in_seconds_causes_a_warning(tmp_path: Path) -> None:
    """8,144 requests per second, because the timestamps are in seconds instead of milliseconds."""
    path = tmp_path / "seconds.jsonl"
    rows = [{"timestamp": k // 8, "input_length": 100, "output_length": 10} for k in range(4000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = CliRunner().invoke(app, ["trace", "show", str(path)])
    assert result.exit_code == 0
    warning = (
        f"{path}: field timestamp: 4,000 requests in 0.499 s are 8,016 per second; timestamps must be in milliseconds"
    )
    assert result.stderr.startswith(warning)


def test_a_profile_in_milliseconds_causes_a_warning(tmp_path: Path) -> None:
    prompts, steps = tmp_path / "prompts.csv", tmp_path / "steps.csv"
    prompts.write_text("tokens,seconds\n512,120\n1024,230\n2048,450\n", encoding="utf-8")
    steps.write_text("batch,seconds\n1,50\n8,52\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["timing", "fit", str(prompts), str(steps)])
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"{prompts}: column seconds: prefill takes 224.6 ms per prompt token; ")
    assert lines[1].startswith(f"{steps}: column seconds: a decode iteration takes 51 s")
