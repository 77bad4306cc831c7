"""`kvroute plan dualpath`: the published default, what changes the answer, and wrong files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.commands import kvroute_command

from kvroute.planner.dualpath.plan import DualPathPlan, over_ratios, plan_dualpath
from kvroute.planner.dualpath.problem import read_dualpath
from kvroute.types import InputError, InputErrors

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dualpath-660b.yaml"
GFLOP = "{gflop_per_token: 141, gpu_tflops: 989,"
PREFILL, DECODE = "prefill: {nodes: 2, ", "decode: {nodes: 4, "


def write_changed(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the example with some texts replaced; return its path."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def changed(folder: Path, *changes: tuple[str, str]) -> DualPathPlan:
    """Plan for the example with some texts replaced."""
    return plan_dualpath(read_dualpath(write_changed(folder, *changes)))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kvroute plan dualpath`."""
    command = kvroute_command("plan", "dualpath", *arguments)
    return subprocess.run(command, capture_output=True, text=True)


def test_the_default_of_the_publication() -> None:
    """Ratios from 1/7 to 7/2. Six storage NICs read instead of two."""
    result = run(str(EXAMPLE), "--json")
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["pd_interval"] == pytest.approx({"low": 1 / 7, "high": 7 / 2})
    assert document["rate_bytes_per_s"] == pytest.approx({"pooled": 300e9, "prefill_only": 100e9})
    assert document["utilisation"][document["binding"]] == pytest.approx(1.0)
    assert document["utilisation"][document["binding"]] == pytest.approx(max(document["utilisation"].values()))
    turns = document["turns_per_s"]
    assert turns["storage"] == pytest.approx(300e9 / (32_271 * 48_068))
    assert turns["compute"] == pytest.approx(2 * 8 * 989e12 * 0.2 / (429 * 141e9))
    assert document["bound"] == "compute"


def test_the_text_names_the_limit_and_the_gain_of_pooling(tmp_path: Path) -> None:
    """With five times the compute, storage is the bottleneck, and reading through both sides triples the turns."""
    result = run(
        str(write_changed(tmp_path, ("mfu: 0.2", "mfu: 1.0"), ("nodes: 2,", "nodes: 1,"), ("nodes: 4,", "nodes: 2,")))
    )
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "Storage limits this workload: it delivers the KV of 96.7 turns/s" in text
    assert "150 GB/s instead of 50 GB/s" in text
    assert "+200.0% turns/s" in text
    assert "0.143 to 3.5 prefill nodes per decode node" in text
    assert "25.6 GB of KV to read per PFLOP" in text


def test_the_rates_over_the_ratio_agree_with_the_plan_and_its_interval() -> None:
    """All storage NICs read at full rate within the interval and only there. At the file's own ratio the rates are
    those of the plan. Prefill nodes alone never read more than both sides."""
    problem = read_dualpath(EXAMPLE)
    plan, points = plan_dualpath(problem), over_ratios(problem)
    assert plan.pd_interval is not None
    assert plan.pd_interval.high is not None
    for point in points:
        inside = plan.pd_interval.low - 1e-9 <= point.ratio <= plan.pd_interval.high + 1e-9
        assert (point.rate_bytes_per_s.pooled == pytest.approx(6 * 50e9)) == inside
        assert point.rate_bytes_per_s.prefill_only <= point.rate_bytes_per_s.pooled * (1 + 1e-9)
    own = next(point for point in points if point.ratio == 0.5)
    assert own.rate_bytes_per_s.pooled == pytest.approx(plan.rate_bytes_per_s.pooled)
    assert own.rate_bytes_per_s.prefill_only == pytest.approx(plan.rate_bytes_per_s.prefill_only)
    assert own.compute_turns_per_s == pytest.approx(plan.turns_per_s.compute)


@pytest.mark.slow
def test_out_writes_a_page_with_its_figures_and_all_numbers(tmp_path: Path) -> None:
    """With and without a range of ratios."""
    nothing = write_changed(tmp_path, (PREFILL, f"{PREFILL}tp: 8, "), (DECODE, f"{DECODE}tp: 8, "))
    for number, file in enumerate((EXAMPLE, nothing)):
        out = tmp_path / str(number)
        result = run(str(file), "--out", str(out), "--json")
        assert result.returncode == 0, result.stderr
        assert f"Report: {out}/report.html" in result.stderr.replace("\n", "")
        page = (out / "report.html").read_text(encoding="utf-8")
        assert f"kvroute plan dualpath {file} --out {out}" in page
        assert page.count("<svg") == 2
        for name in ("rates", "utilisation"):
            assert (out / "figures" / f"{name}.png").stat().st_size > 10_000
        numbers = json.loads((out / "plan.json").read_text(encoding="utf-8"))
        assert {key: numbers[key] for key in numbers if key != "over_ratios"} == json.loads(result.stdout)
        assert len(numbers["over_ratios"]) > 50


@pytest.mark.parametrize("tp", [4, 8])
def test_replicated_kv_leaves_no_ratio_unless_it_is_broadcast(tp: int, tmp_path: Path) -> None:
    """MLA on four or eight ranks: the tool names the compute NICs. Broadcast over NVLink restores the range."""
    ranks = ((PREFILL, f"{PREFILL}tp: {tp}, "), (DECODE, f"{DECODE}tp: {tp}, "))
    plan = changed(tmp_path, *ranks)
    assert plan.pd_interval is None
    assert "compute NIC" in " ".join(plan.obstacles)
    result = run(str(write_changed(tmp_path, *ranks)))
    assert plan.obstacles[0] in " ".join(result.stdout.split())
    broadcast = changed(tmp_path, *((old, f"{new}broadcast: true, ") for old, new in ranks))
    assert broadcast.pd_interval is not None
    assert (broadcast.pd_interval.low, broadcast.pd_interval.high) == pytest.approx((1 / 7, 7 / 2))


def test_kv_heads_are_sharded_and_then_replicated(tmp_path: Path) -> None:
    """Eight KV heads on eight ranks are sharded; on sixteen ranks each head is on two."""
    given = "kv: {kind: given, per_token: 48068 B, layers: 61, replicated: true}"
    for tp, copies in ((8, "prefill 1,"), (16, "prefill 2,")):
        plan = changed(tmp_path, (given, "kv: {kind: model, model: llama-3.3-70b}"), (PREFILL, f"{PREFILL}tp: {tp}, "))
        assert any(copies in choice for choice in plan.choices)


@pytest.mark.parametrize("from_kv", [True, False])
def test_operations_can_be_computed_from_the_model(from_kv: bool, tmp_path: Path) -> None:
    """From `compute: {model}`, or from the model of `kv`: 140.4 GFLOP per token of DeepSeek-V3.2, 0.4 % below the value
    of the example."""
    given = changed(tmp_path)
    if from_kv:
        kv = "kv: {kind: given, per_token: 48068 B, layers: 61, replicated: true}"
        changes = [(kv, "kv: {kind: model, model: deepseek-v3.2}"), (GFLOP, "{gpu_tflops: 989,")]
    else:
        changes = [(GFLOP, "{model: deepseek-v3.2, gpu_tflops: 989,")]
    computed = changed(tmp_path, *changes)
    assert computed.turns_per_s.compute == pytest.approx(given.turns_per_s.compute, rel=0.005)
    assert "compute: 140.4 GFLOP per appended token of deepseek-v3.2 at the mean context of 32,486 tokens" in (
        computed.choices
    )


def test_all_traffic_narrows_the_range(tmp_path: Path) -> None:
    """Appended and generated tokens load the decode nodes, whose DRAM then limits the ratio: per byte of cached KV it
    carries 1 + 3 miss + 2 generated, and the bytes that arrive, in units of a tenth of its bandwidth."""
    plan = changed(tmp_path, ("counts: cached", "counts: all"))
    assert plan.pd_interval is not None
    assert plan.pd_interval.high is not None
    per_cached = 1 + (3 * 429 + 2 * 176) / 32_271
    assert plan.pd_interval.high == pytest.approx((8 - per_cached) / (1 + per_cached))
    assert plan.utilisation["decode storage write"] > 0.0


def test_posts_and_expert_traffic_take_from_the_compute_nics(tmp_path: Path) -> None:
    """A copy of 50 KB per microsecond just keeps up with 400 Gbps; six microseconds do not. Expert-parallel traffic is
    subtracted."""
    base = changed(tmp_path).utilisation["prefill compute NIC read"]
    fast = changed(tmp_path, ("name: dualpath-660b", "name: dualpath-660b\npost: 1 us"))
    assert fast.utilisation["prefill compute NIC read"] == pytest.approx(base)
    slow = changed(tmp_path, ("name: dualpath-660b", "name: dualpath-660b\npost: 6 us"))
    assert slow.pd_interval is None or slow.pd_interval.low > 1.0
    experts = changed(tmp_path, (PREFILL, f"{PREFILL}expert_traffic: 25 GB/s, "))
    assert experts.utilisation["prefill compute NIC read"] == pytest.approx(2 * base)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("dram: 500 GB/s}", "dram: 500 GB}", "unit of bandwidth"),
        ("storage_read: 400 Gbps, ", "", "`storage_read` is missing"),
        ("cached_tokens: 32271", "cached_tokens: -1", "cached_tokens"),
        ("mfu: 0.2", "mfu: 1.5", "mfu"),
        ("counts: cached", "counts: none", "counts"),
        (PREFILL, f"{PREFILL}expert_traffic: 60 GB/s, ", "leaves nothing of a compute NIC"),
        (GFLOP, "{gpu_tflops: 989,", "operations per appended token are missing"),
        (GFLOP, "{gflop_per_token: 141, model: deepseek-v3, gpu_tflops: 989,", "both `gflop_per_token` and `model`"),
        (GFLOP, "{model: no-such-model, gpu_tflops: 989,", "no-such-model"),
        (GFLOP, "{model: kimi-linear-48b, gpu_tflops: 989,", "not known.*give `gflop_per_token`"),
        (
            "kv: {kind: given, per_token: 48068 B, layers: 61, replicated: true}",
            "kv: {kind: model, model: no-such-model}",
            "no-such-model",
        ),
        (
            "kv: {kind: given, per_token: 48068 B, layers: 61, replicated: true}",
            "kv: {kind: model, model: gpt-oss-20b}",
            "does not cover",
        ),
    ],
)
def test_wrong_files_give_one_sentence_with_the_line(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    """The error names file and line."""
    path = write_changed(tmp_path, (old, new))
    with pytest.raises((InputError, InputErrors), match=rf"{path}:\d+: .*{sentence}"):
        read_dualpath(path)
