"""Reports of load generators become runs, whatever their units and names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvroute.measurements import is_report, read_report
from kvroute.types import InputError

Change = Callable[[Any], None]


def vllm(load: int = 4) -> dict[str, Any]:
    """Return the report of a run of 1,000 + 200 tokens, TTFT 100 ms, TPOT 10 ms."""
    return {
        "date": "20260101-000000", "endpoint_type": "openai", "model_id": "m", "num_prompts": 40,
        "request_rate": "inf", "max_concurrency": load, "duration": 20.0, "completed": 40,
        "total_input_tokens": 40_000, "total_output_tokens": 8_000, "request_throughput": load / 2.09,
        "mean_ttft_ms": 120.0, "median_ttft_ms": 100.0, "median_tpot_ms": 10.0,
    }  # fmt: skip


def aiperf(load: int = 4) -> dict[str, Any]:
    """Return AIPerf's report of the same run."""
    lengths = {"input_sequence_length": 1000, "output_sequence_length": 200}
    times = {"time_to_first_token": (100.0, "ms"), "inter_token_latency": (0.01, "s"), "request_latency": (2090, "ms")}
    return {
        "schema_version": "1.0", "aiperf_version": "0.3", "input_config": {"loadgen": {"concurrency": load}},
        "request_throughput": {"avg": load / 2.09, "unit": "requests/sec"},
        **{name: {"avg": tokens, "p50": tokens, "unit": "tokens"} for name, tokens in lengths.items()},
        **{name: {"avg": 2 * time, "p50": time, "unit": unit} for name, (time, unit) in times.items()},
    }  # fmt: skip


def guidellm(load: int = 4, strategy: str = "concurrent") -> dict[str, Any]:
    """Return GuideLLM's report of the same run, and of one that sends all requests at once."""
    values = {
        "requests_per_second": load / 2.09, "request_concurrency": load, "prompt_token_count": 1000,
        "output_token_count": 200, "time_to_first_token_ms": 100.0, "inter_token_latency_ms": 10.0,
        "request_latency": 2.09,
    }  # fmt: skip
    metrics = {name: {"successful": {"mean": value, "median": value}} for name, value in values.items()}
    runs = [{"config": {"strategy": {"type_": of}}, "metrics": metrics} for of in (strategy, "throughput")]
    return {"metadata": {"version": 1, "guidellm_version": "0.5"}, "benchmarks": runs}


def inference_perf(load: int = 4) -> dict[str, Any]:
    """Return inference-perf's report of a stage of the same run; its time per output token is half of the real one."""
    latencies = {"request_latency": 2.09, "time_to_first_token": 0.1, "time_per_output_token": 0.005}
    return {
        "load_summary": {"count": 40, "requested_rate": 2.0, "achieved_rate": load / 2.09},
        "successes": {
            "count": 40,
            "latency": {name: {"mean": value, "median": value} for name, value in latencies.items()},
            "throughput": {"requests_per_sec": load / 2.09},
            "prompt_len": {"mean": 1000.0},
            "output_len": {"mean": 200.0},
        },
        "failures": {"count": 0},
    }  # fmt: skip


MADE: dict[str, Callable[..., dict[str, Any]]] = {
    "vllm": vllm, "aiperf": aiperf, "guidellm": guidellm, "inference-perf": inference_perf,
}  # fmt: skip
CLOSED = ("vllm", "aiperf", "guidellm")
"""Those that say how many requests are in progress."""


def written(folder: Path, *documents: Any) -> Path:
    """Return a file with the documents, one in each line."""
    path = folder / "report.json"
    path.write_text("\n".join(json.dumps(document) for document in documents))
    assert is_report(path.read_text()[:65_536])
    return path


def fault(path: Path) -> InputError:
    """Return the error of a file."""
    with pytest.raises(InputError) as error:
        read_report(path, path.read_text())
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize("name", MADE)
def test_one_run_is_one_point_in_every_form(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, MADE[name]())
    reported = read_report(path, path.read_text())
    (point,) = reported.runs
    found = (point.input_tokens, point.output_tokens, point.ttft_s, point.tpot_s, point.requests_per_s)
    assert found == pytest.approx((1000, 200, 0.1, 0.01, 4 / 2.09))
    assert point.clients == (4 if name in CLOSED else None)
    assert point.batch == pytest.approx(1 + (3 if name in CLOSED else 4) * 1.99 / 2.09)
    assert [remark[:32] for remark in reported.remarks] == ["1 runs that send all requests at"] * (name == "guidellm")


def test_a_file_of_several_runs_has_several_points(tmp_path: Path) -> None:
    path = written(tmp_path, vllm(1), vllm(8))
    assert [point.clients for point in read_report(path, path.read_text()).runs] == [1, 8]


def test_a_rate_makes_an_open_loop(tmp_path: Path) -> None:
    path = written(tmp_path, vllm() | {"request_rate": 2.0})
    assert read_report(path, path.read_text()).runs[0].clients is None
    path = written(tmp_path, guidellm(strategy="poisson"))
    assert read_report(path, path.read_text()).runs[0].clients is None


def without(*keys: str | int) -> Change:
    """Return a change that removes a field."""

    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


def scaled(factor: float, *keys: str | int) -> Change:
    """Return a change that multiplies a field."""

    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] *= factor

    return change


STAGE = ("successes", "latency")
FAULTS: Sequence[tuple[str, tuple[Change, ...], str]] = (
    ("vllm", (without("median_ttft_ms"),), "without what a fit needs (Object missing required field `median_ttft_ms`)"),
    ("vllm", (without("max_concurrency"),), "all requests were sent at once"),
    ("vllm", (scaled(0, "completed"),), "no request was completed"),
    ("vllm", (scaled(0, "median_tpot_ms"),), "tpot_s is 0"),
    ("aiperf", (scaled(0, "request_latency", "p50"),), "latency_s is 0"),
    ("vllm", (scaled(0, "max_concurrency"),), "clients is 0"),
    ("vllm", (scaled(1e-3, "median_ttft_ms"), scaled(1e-3, "median_tpot_ms")), "seconds may be given as milliseconds"),
    ("vllm", (scaled(1e3, "median_ttft_ms"), scaled(1e3, "median_tpot_ms")), "milliseconds may be given as seconds"),
    ("vllm", (scaled(1e3, "median_ttft_ms"),), "at a time, not 4; TTFT or TPOT may have another unit"),
    ("vllm", (scaled(1e-3, "median_ttft_ms"),), "a TTFT of 100 us is shorter than a GPU takes to read"),
    ("vllm", (scaled(1e2, "median_tpot_ms"),), "much shorter than the TPOT of 1 s; they may have different units"),
    ("aiperf", (without("inter_token_latency"),), "missing required field `inter_token_latency`"),
    ("aiperf", (without("time_to_first_token", "unit"),), "time_to_first_token has the unit ''"),
    ("aiperf", (scaled(10, "inter_token_latency", "p50"),), "take 2.09 s; the values may have different units"),
    ("guidellm", (without("benchmarks", 0, "metrics", "prompt_token_count"),), "field `prompt_token_count` - at"),
    ("guidellm", (without("benchmarks", 0),), "has no runs"),
    ("inference-perf", (without("load_summary", "achieved_rate"),), "missing required field `achieved_rate`"),
    ("inference-perf", (without("successes", "prompt_len", "mean"),), "input_tokens is nan"),
    ("inference-perf", tuple(scaled(1e3, *STAGE, of, "mean") for of in ("request_latency", "time_to_first_token")),
     "a decode iteration takes 10 s"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "problem"), FAULTS)
def test_a_report_that_cannot_be_right_is_one_sentence(
    tmp_path: Path, name: str, changes: tuple[Change, ...], problem: str
) -> None:
    document = MADE[name]()
    for change in changes:
        change(document)
    assert problem in str(fault(written(tmp_path, document)))


def test_other_forms_of_a_report_name_the_form_that_is_read(tmp_path: Path) -> None:
    records = {"metadata": {"benchmark_phase": "profiling"}, "metrics": {}}
    assert "give profile_export_aiperf.json of this run" in str(fault(written(tmp_path, records, records)))
    path = tmp_path / "report.csv"
    path.write_text("Metric,avg,min,max\nTime to First Token (ms),1,1,1\n")
    assert "AIPerf or GenAI-Perf, but not JSON" in str(fault(path))
