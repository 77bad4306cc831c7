"""Test rig for the `gateway` section: cluster files to start from, and the errors of a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.config.preflight import deployment_of, settings_of
from kvroute.topology import FileError
from kvroute.types import InputErrors

ROOT = Path(__file__).resolve().parents[3]
FULL = f"""\
gateway:
  listen: {{host: 0.0.0.0, port: 8443}}
  admin: {{host: "::1", port: 9999, push_token: 0123456789abcdefg, hosts: [gateway.example]}}
  policy: cla
  parameters: {{cache_weight: 2, load_weight: 0.5}}
  prefill: least-loaded
  constraint: pod:preferred:0.5
  reserve: 2 GB
  reserve_output_tokens: 1024
  models: {{llama: llama-3-70b}}
  session_affinity: {{header: X-Chat, bonus: 2 s}}
  adapters: {{sql: {{model: llama-3-70b, load: 250 ms}}}}
  oracle:
    source: prometheus
    self_measured: false
    separates_own_traffic: false
    stale_after: 1 min
    prediction: trend
    prometheus: {{url: "https://prom:9090/base", per_link: {{query: up, label: cable}}, timeout: 100 ms}}
  prompt: {{block_tokens: 64, bytes_per_token: 3, without_tokenizer: engine}}
  prefix: approximate
  limits: {{body: 1 MiB, headers: 8 KB, connections: 10, in_flight: 5, queue: 0, queue_wait: 1 s, per_key: 2}}
  timeouts: {{connect: 1 ms, prefill: 24 h, first_token: 1 s, between_tokens: 1 s, drain: 1 s}}
  retries: {{share: 0, floor_per_s: 0.5, attempts: 1}}
  breaker: {{failures: 1, window: 1 s, share: 1, open: 1 s}}
  health: {{path: /healthz, interval: 1 s, timeout: 1 s, failures: 1, slow_start: 0 s}}
  scrape: {{path: "/metrics?all=1", interval: 1 s}}
  keys: {{known: {{alice: "{hash_text("a")}"}}, concurrency: {{alice: 3}}}}
  upstream_key_env: ENGINE_KEY
  tracing: {{otlp: "http://otel:4318/v1/traces", share: 0.1}}
  log: {{level: debug, format: json, access: true}}
  measure: engine
  offload:
    threshold: 19.4K tokens
    stay_factor: 3
    check_interval: 500 ms
    short_term: {{enabled: false, utilisation_high: 0.9, queue_low: 0 s, step: 1.5, dwell: 1 s, threshold_max: 2M}}
    long_term: {{review: 5 s, window: 1 min, requests_min: 7, gain_min: 0.1, at_once: 2, prefill_min: 0}}
    wan_path: {{failures: 9, open: 1 s}}
    role_switch: {{url: "http://hook:8000/role", drain: 1 s, timeout: 2 s, back_off: 3 s}}
"""
ENVIRON = {"ENGINE_KEY": "x", "WITH_NEWLINE": "x\n"}
MACHINES = """\
name: live
nodes: [{name: node0}]
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 10 ms}}}
defaults: {model: llama-3-70b, kv_capacity: 80 GB}
"""
FIRST = '  - {name: prefill0, role: prefill, gpus: "node0:0", endpoint: {url: "http://a:1"}}\n'
SECOND = '  - {name: decode0, role: decode, gpus: "node0:1", endpoint: {url: "http://b:1"}}\n'
LIVE = MACHINES + "instances:\n" + FIRST + SECOND


def section_errors(text: str, environ: dict[str, str] | None = None) -> list[FileError]:
    """Return the errors of a section."""
    with pytest.raises(InputErrors) as caught:
        settings_of(text, "f", ENVIRON if environ is None else environ)
    problems = caught.value.problems
    assert [str(problem) for problem in problems] == list(dict.fromkeys(str(problem) for problem in problems))
    return [problem for problem in problems if isinstance(problem, FileError)]


def file_errors(text: str, *, embedded: bool = False) -> list[FileError]:
    """Return the errors of a whole file."""
    with pytest.raises(InputErrors) as caught:
        deployment_of(text, "f", embedded=embedded, environ={})
    return [problem for problem in caught.value.problems if isinstance(problem, FileError)]


def section(text: str) -> str:
    return f"gateway:\n  {text}\n"
