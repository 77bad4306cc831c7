"""docs/vllm.md: its cluster file loads and matches its commands, and its script writes profiles that can be fitted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvroute.timing import fit_profile, read_profile
from kvroute.topology import load
from kvroute.types import DecodeSpec, LinearPrefill

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "vllm-tp8.yaml"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_example_whole() -> None:
    """The page and the example file have the same text."""
    assert _blocks("yaml") == [EXAMPLE.read_text(encoding="utf-8")]


def test_the_addresses_of_the_file_are_those_of_the_commands() -> None:
    """Each engine has a server in the text, and the ports of its role's command."""
    commands = {role: block for block in _blocks("sh") for role in _nixl_role(block)}
    for instance in load(EXAMPLE).instances:
        assert instance.endpoint is not None
        command = commands[instance.role]
        url, events, replay = map(
            urlsplit, (instance.endpoint.url, instance.endpoint.kv_events, instance.endpoint.kv_replay)
        )
        assert {url.hostname} == {events.hostname, replay.hostname}
        [servers] = re.findall(rf"On the {instance.role} servers (.*):", PAGE)
        assert url.hostname in servers.split(" and ")
        assert f"--port {url.port} " in command
        assert f'"endpoint": "tcp://*:{events.port}"' in command
        assert f'"replay_endpoint": "tcp://*:{replay.port}"' in command
        assert f"--tensor-parallel-size {instance.tp} " in command
        assert f"vllm serve {instance.model} " in command


def _nixl_role(block: str) -> list[str]:
    """Return the role of the engine that a block starts with NIXL; empty for other blocks."""
    roles = {"kv_producer": "prefill", "kv_consumer": "decode"}
    return [roles[role] for role in re.findall(r'"NixlConnector", "kv_role": "(\w+)"', block)]


def test_the_script_turns_vllms_results_into_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of an engine with known times give these times back."""
    prefill, decode = LinearPrefill(per_token_s=4e-5, base_s=0.02), DecodeSpec(base_s=6e-3, per_request_s=2e-4)
    [benchmark] = [block for block in _blocks("sh") if "vllm bench latency" in block]
    assert "prefill-$tokens.json" in benchmark
    assert "decode-$batch-$output.json" in benchmark
    lengths, batches, outputs = (
        [int(number) for number in re.findall(rf"for {name} in ([\d ]+);", benchmark)[0].split()]
        for name in ("tokens", "batch", "output")
    )
    for tokens in lengths:
        _result(tmp_path / f"prefill-{tokens}.json", prefill.base_s + tokens * prefill.per_token_s)
    for batch in batches:
        step_s = decode.base_s + batch * decode.per_request_s
        for output in outputs:
            _result(tmp_path / f"decode-{batch}-{output}.json", 0.1 * batch + (output - 1) * step_s)
    monkeypatch.chdir(tmp_path)
    [script] = _blocks("python")
    exec(script, {})
    prompt_fit, _ = fit_profile(read_profile(Path("prefill.csv")))
    _, step_fit = fit_profile(read_profile(Path("decode.csv")))
    assert prompt_fit is not None
    assert step_fit is not None
    assert isinstance(prompt_fit.spec, LinearPrefill)
    assert prompt_fit.spec.per_token_s == pytest.approx(prefill.per_token_s)
    assert prompt_fit.spec.base_s == pytest.approx(prefill.base_s)
    assert step_fit.spec.base_s == pytest.approx(decode.base_s)
    assert step_fit.spec.per_request_s == pytest.approx(decode.per_request_s)
    assert read_profile(Path("decode.csv")).context_tokens.tolist() == [batch * 1088 for batch in batches]  # type: ignore[union-attr]


def _result(path: Path, avg_latency_s: float) -> None:
    """Write a result as `vllm bench latency --output-json` does."""
    path.write_text(json.dumps({"avg_latency": avg_latency_s, "latencies": [avg_latency_s], "percentiles": {}}))
