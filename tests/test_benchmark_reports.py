"""Result files of load generators are recognised by the commands that read profiles and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.sim.workload import generate, read, write
from kvroute.timing import read_profile
from kvroute.types import InputError

VLLM = {
    "date": "20260101-000000", "endpoint_type": "openai", "model_id": "m", "num_prompts": 2, "request_rate": 1.0,
    "duration": 2.0, "completed": 2, "total_input_tokens": 20, "total_output_tokens": 20, "request_throughput": 1.0,
    "mean_ttft_ms": 100.0, "input_lens": [10, 10], "output_lens": [10, 10], "ttfts": [0.1, 0.1],
}  # fmt: skip
AIPERF = {
    "metadata": {"session_num": 0, "request_start_ns": 1, "benchmark_phase": "profiling"},
    "metrics": {"time_to_first_token": {"value": 1.0, "unit": "ms"}},
}
REPORTS: dict[str, tuple[str, str]] = {
    "vLLM": (json.dumps(VLLM), "vllm bench serve"),
    "vLLM indented": (json.dumps(VLLM, indent=2), "vllm bench serve"),
    "vLLM appended": (2 * (json.dumps(VLLM) + "\n"), "vllm bench serve"),
    "vLLM throughput": (json.dumps({"elapsed_time": 1.0, "requests_per_second": 2.0}), "vllm bench throughput"),
    "vLLM latency": (json.dumps({"avg_latency": 1.0, "latencies": [], "percentiles": {}}), "vllm bench latency"),
    "GuideLLM": (
        json.dumps({"metadata": {"version": 1, "guidellm_version": "0.5"}, "benchmarks": []}, indent=2), "GuideLLM",
    ),
    "GuideLLM YAML": ("benchmarks:\n- type_: generative_benchmark\n", "GuideLLM"),
    "GuideLLM CSV": ("Run Info,Run Info,Timings\nModel,Backend,Start\n", "GuideLLM"),
    "AIPerf": (json.dumps({"schema_version": "1.0", "aiperf_version": "0.3"}, indent=2), "AIPerf"),
    "AIPerf records": (3 * (json.dumps(AIPERF) + "\n"), "AIPerf"),
    "AIPerf CSV": ("Metric,avg,min,max\nTime to First Token (ms),1,1,1\n", "AIPerf"),
    "GenAI-Perf": (json.dumps({"experiments": [], "version": "", "service_kind": "openai"}), "GenAI-Perf"),
    "LLMPerf": (json.dumps({"model": "m", "results_ttft_s_mean": 0.1}), "LLMPerf"),
    "inference-perf": (json.dumps({"load_summary": {}, "successes": {}, "failures": {}}), "inference-perf"),
    "Locust": ("Type,Name,Request Count,Failure Count\nPOST,/,1,0\n", "Locust"),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_is_named_and_the_advice_leads_on(tmp_path: Path, report: str) -> None:
    """One sentence for each command, and none of them advises an option that cannot help."""
    text, generator = REPORTS[report]
    path = tmp_path / "report"
    path.write_text(text)
    with pytest.raises(InputError) as profile:
        read_profile(path)
    with pytest.raises(InputError) as trace:
        read(path)
    for error, advice in ((profile.value, "kvroute timing measure"), (trace.value, "the trace that was played")):
        assert generator in error.what
        assert advice in error.hint
        assert "\n" not in str(error)
        assert "--model" not in str(error)
        assert "--skip-bad" not in str(error)


def test_other_json_is_no_profile_with_several_models(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"a": 1, "b": [2]}))
    with pytest.raises(InputError, match="is JSON of another kind: its models are not objects"):
        read_profile(path)


def test_a_trace_in_one_json_object_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}, indent=2))
    result = CliRunner().invoke(app, ["trace", "show", str(path)])
    assert "the first line begins a JSON object over several lines" in str(result.exception)


def test_a_trace_with_a_wrong_first_line_is_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(generate(20, seed=0), path)
    path.write_text("{}\n" + path.read_text())
    assert len(read(path, skip_bad=True).requests) == 20
    with pytest.raises(InputError, match=r"trace.jsonl:1: field timestamp: it is missing"):
        read(path)
