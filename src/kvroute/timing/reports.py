"""Recognises the result files of load generators, which are neither profiles of steps nor traces of requests."""

from __future__ import annotations

HEAD = 65_536
"""Number of characters at the start of a file that are searched."""
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("`vllm bench serve` or SGLang's bench_serving", ('"total_output_tokens"', '"request_throughput"')),
    ("`vllm bench throughput`", ('"elapsed_time"', '"requests_per_second"')),
    ("`vllm bench latency`", ('"avg_latency"', '"percentiles"')),
    ("GuideLLM", ('"guidellm_version"',)),
    ("GuideLLM", ("generative_benchmark",)),
    ("GuideLLM", ("Run Info,",)),
    ("AIPerf", ('"aiperf_version"',)),
    ("AIPerf", ('"benchmark_phase"', '"metrics"')),
    ("AIPerf or GenAI-Perf", ("Metric,avg,",)),
    ("AIPerf or GenAI-Perf", ('"time_to_first_token"', '"unit"')),
    ("GenAI-Perf", ('"experiments"', '"service_kind"')),
    ("LLMPerf", ('"results_ttft_s',)),
    ("inference-perf", ('"load_summary"', '"successes"')),
    ("Locust", ("Request Count,Failure Count",)),
)
"""Name of each load generator, and texts that its files have all of."""


def load_generator_of(text: str) -> str:
    """Return the load generator that has written a file which begins with this text; empty if none is recognised."""
    head = text[:HEAD]
    return next((name for name, marks in _MARKS if all(mark in head for mark in marks)), "")
