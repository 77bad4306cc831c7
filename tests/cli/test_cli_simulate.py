"""`kvroute simulate`: one document on stdout, reports, logs, and options without effect."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.cli.cli_rig import CLUSTER, EXAMPLES, Ended, Kvroute, document
from tests.commands import kvroute_command


def test_simulate_prints_one_document_of_runs(kvroute: Kvroute, trace: str) -> None:
    """Two policies and two seeds give one run each in this order, with every documented key, and a verdict."""
    ended = kvroute(
        "simulate", CLUSTER, "--trace", trace, "--policy", "round-robin", "--policy", "netkv",
        "--seeds", "2", "--workers", "1", "--json",
    )  # fmt: skip
    output = document(ended)
    runs = output["runs"]
    assert [(run["policy"], run["seed"]) for run in runs] == [
        ("round-robin", 0), ("round-robin", 1), ("netkv", 0), ("netkv", 1),
    ]  # fmt: skip
    for run in runs:
        assert run["requests"] == {"arrived": 20, "finished": 20, "rejected": 0, "in_flight": 0}
        assert set(run["ttft_s"]) == {"mean", "p50", "p95", "p99"}
        assert 0 < run["ttft_s"]["p50"] <= run["ttft_s"]["p95"] <= run["ttft_s"]["p99"]
        assert run["transfer_s"]["mean"] > 0
        assert {"mean", "p95"} <= set(run["tbt_s"])
        assert (run["slo_attainment"], run["tier_share"]) == (1.0, {"0": 0.0, "1": 1.0, "2": 0.0, "3": 0.0})
        assert all(run[name] > 0 for name in ("goodput_per_s", "wall_s", "cpu_s"))
    assert output["verdict"]["winner"] in ("round-robin", "netkv")


def test_reads_from_a_store_are_in_the_results(kvroute: Kvroute) -> None:
    arguments = ["simulate", str(EXAMPLES / "dualpath.yaml"), "--requests", "200", "--policy", "netkv", "--seeds", "1"]
    (run,) = document(kvroute(*arguments, "--json"))["runs"]
    assert run["store"]["reads"] > 0
    assert run["store"]["written_bytes"] > 0
    assert 1.0 <= run["store"]["balance"] <= 3.0
    assert "NIC" in kvroute(*arguments).out


@pytest.mark.parametrize(("policy", "reported"), [("foresight-joint", True), ("foresight", False)])
def test_a_prefill_policy_that_is_not_used_is_reported(kvroute: Kvroute, policy: str, reported: bool) -> None:
    options = ("--policy", policy, "--seeds", "1", "--requests", "20", "--workers", "1")
    ended = kvroute("simulate", CLUSTER, *options, "--prefill-policy", "round-robin")
    assert ended.code == 0
    assert ("the prefill policy round-robin is used only for engines" in ended.err) is reported


def test_in_lock_step_the_joint_policy_chooses_pairs_only(kvroute: Kvroute, tmp_path: Path) -> None:
    """A log says so in its first line, and no decode instance is the source of its own request."""
    wide, log = str(EXAMPLES / "wide-ep.yaml"), tmp_path / "run.log"
    options = ("--policy", "foresight-joint", "--seeds", "1", "--requests", "50", "--log", str(log))
    ended = kvroute("simulate", wide, *options, "--lock-step")
    assert ended.code == 0
    header, *records = map(json.loads, log.read_text().splitlines())
    assert header["spec"]["parameters"] == {"aggregated": 0.0}
    decisions = [decision for record in records for decision in record["decisions"]]
    decodes = [decision for decision in decisions if decision["type"] == "decode"]
    assert len(decodes) == 50
    assert all(decode["source"] != decode["target"] for decode in decodes)


def test_ranks_in_lock_step_wait_for_the_slowest(kvroute: Kvroute) -> None:
    """The same requests have a later first token; without data-parallel ranks the option is an error."""
    arguments = (
        "--requests",
        "300",
        "--rate",
        "20/s",
        "--policy",
        "round-robin",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--json",
    )
    wide = str(EXAMPLES / "wide-ep.yaml")
    (apart,) = document(kvroute("simulate", wide, *arguments))["runs"]
    (together,) = document(kvroute("simulate", wide, *arguments, "--lock-step"))["runs"]
    assert together["requests"] == apart["requests"]
    assert together["ttft_s"]["mean"] > apart["ttft_s"]["mean"]
    ended = kvroute("simulate", CLUSTER, "--lock-step")
    assert ended.code == 2
    assert "has data-parallel ranks; add `dp: 8` to instances, or simulate without lock-step" in ended.err


def test_stdout_contains_only_the_document(trace: str) -> None:
    """By default five policies run, compared over one seed here. If stderr is no terminal, it has one line and no
    progress bar, after the remark on the trace."""
    command = kvroute_command("simulate", CLUSTER, "--trace", trace, "--seeds", "1")
    out = subprocess.run([*command, "--workers", "1", "--json"], capture_output=True, text=True)
    runs = document(Ended(out.returncode, out.stdout, out.stderr))["runs"]
    assert [run["policy"] for run in runs] == ["round-robin", "cla", "netkv", "foresight", "foresight-joint"]
    assert out.stderr.splitlines()[1:] == ["Simulating: 5 runs"]


def test_a_log_replaces_only_an_older_log(kvroute: Kvroute, trace: str) -> None:
    """A trace or another file named as the log by mistake is kept; an older log is replaced."""
    simulate = ("simulate", CLUSTER, "--trace", trace, "--policy", "netkv", "--seeds", "1", "--workers", "1", "--log")
    before = Path(trace).read_bytes()
    Path("notes").write_text("mine")
    for place, problem in ((trace, "would overwrite the trace"), ("notes", "is not a kvroute log")):
        ended = kvroute(*simulate, place)
        assert (ended.code, Path(trace).read_bytes(), Path("notes").read_text()) == (2, before, "mine")
        assert problem in ended.err
    assert [kvroute(*simulate, "run.log").code for _ in range(2)] == [0, 0]
    again = kvroute(*simulate, "run.log", "--trace", "run.log")
    assert (again.code, "would overwrite the trace" in again.err) == (2, True)


def test_an_invalid_trace_leaves_no_results_folder(kvroute: Kvroute) -> None:
    """The trace is read before the folder is created."""
    Path("bad.jsonl").write_text("{}\n")
    ended = kvroute("simulate", CLUSTER, "--trace", "bad.jsonl", "--out", "new")
    assert (ended.code, Path("new").exists()) == (2, False)


def test_the_help_names_the_files_that_are_replaced(kvroute: Kvroute) -> None:
    """The help names the files of an older run and an older trace."""
    for command, what in (
        ("simulate", "existing files are replaced"),
        ("trace generate", "an existing file is replaced"),
    ):
        assert what in " ".join(kvroute(*command.split(), "--help").out.replace("│", "").split())


def test_a_report_prints_only_the_document_on_stdout(kvroute: Kvroute, trace: str) -> None:
    """The path of the report is printed on stderr, and the records are in the same folder."""
    ended = kvroute(
        "simulate", CLUSTER, "--trace", trace, "--policy", "netkv", "--seeds", "1", "--workers", "1", "--json",
        "--out", "new/out",
    )  # fmt: skip
    (run,) = document(ended)["runs"]
    assert "Report: " in ended.err
    (record,) = Path("new/out/results.jsonl").read_text().splitlines()
    assert json.loads(record)["summary"] == run


def test_a_run_over_several_datacenters_shows_what_was_offloaded(kvroute: Kvroute) -> None:
    """The table has threshold, offloaded share, failures and copies, and the figures mark the cut; one site shows none
    of them."""
    Path("cut.yaml").write_text(
        "changes: [{at: 4 s, link: wan, share: 0}, {at: 9 s, link: wan, share: 1}]\nstall: 1 s\n"
        "offload: {threshold: 8K tokens}\n"
    )
    only = ("--policy", "netkv", "--seeds", "1", "--workers", "1", "--requests", "30")
    ended = kvroute(
        "simulate", str(EXAMPLES / "two-datacenters.yaml"), "--scenario", "cut.yaml", "--rate", "3", *only, "--out", "o"
    )
    assert ended.code == 0, ended.err
    headings = " ".join(ended.out.split())
    assert all(heading in headings for heading in ("threshold", "remote", "KV %", "failed", "copied"))
    record = json.loads(Path("o/results.jsonl").read_text())
    summary, timeline = record["summary"], record["timeline"]
    assert len(timeline["threshold_tokens"]) == len(timeline["at_s"]) > 0
    assert summary["threshold_tokens"] == np.median(timeline["threshold_tokens"])
    assert f"{summary['threshold_tokens']:,.0f}" in ended.out
    page = Path("o/report.html").read_text()
    assert page.count("<!-- wan cut -->") == page.count("<!-- wan restored -->") == 2, "in both figures over time"
    assert "Settings that differ from the defaults" in page
    folded = page.index("<details>")
    assert page.index("settings.changes") < folded < page.index("settings.prefill_queueing")
    alone = kvroute("simulate", CLUSTER, *only, "--out", "alone")
    assert "threshold" not in alone.out
    assert not Path("alone/figures/threshold.svg").exists()
    assert "restored" not in Path("alone/report.html").read_text()


def test_options_without_effect_are_reported(kvroute: Kvroute, trace: str) -> None:
    """A policy given twice, a warm-up longer than the trace, heads that cannot be shared evenly by the shards."""
    once = ("simulate", CLUSTER, "--trace", trace, "--policy", "netkv", "--seeds", "1", "--workers", "1")
    ended = kvroute(*once, "--policy", "netkv", "--warmup", "1e9")
    assert "Duplicate policies run only once" in ended.err
    assert "No request was measured, so no comparison is possible." in ended.out
    assert "No request arrived after the warm-up; shorten it (--warmup)" in ended.out
    uneven = kvroute("llm", "llama-3-70b", "--tp", "3")
    assert (uneven.code, "cannot share the KV heads evenly" in uneven.err) == (0, True)
    assert kvroute("llm", "llama-3-70b", "--tp", "4").err == ""
    ended = kvroute(*once)
    of_trace, *others = ended.err.splitlines()
    assert "the output of 1 of 20 requests has 0 tokens" in of_trace
    assert others == ["Simulating: 1 run"]
    assert "warm-up" not in ended.out


def test_text_output_is_a_table_and_a_verdict(kvroute: Kvroute, trace: str) -> None:
    """There is no JSON, and a difference over one seed is not called significant."""
    ended = kvroute(
        "simulate",
        CLUSTER,
        "--trace",
        trace,
        "--policy",
        "round-robin",
        "--policy",
        "netkv",
        "--seeds",
        "1",
        "--workers",
        "1",
    )
    assert ended.code == 0
    assert "netkv" in ended.out
    assert "lowest mean TTFT" in ended.out
    assert "one seed cannot show" in " ".join(ended.out.split())


def test_invalid_lines_stop_the_run_unless_they_are_skipped(kvroute: Kvroute, trace: str) -> None:
    """The error names the line; with `--skip-bad` the other lines are played."""
    Path(trace).write_text(Path(trace).read_text() + '{"timestamp": 1}\n')
    arguments = ("simulate", CLUSTER, "--trace", trace, "--policy", "netkv", "--seeds", "1", "--json")
    ended = kvroute(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "trace.jsonl:21: " in ended.err
    assert document(kvroute(*arguments, "--skip-bad"))["runs"][0]["requests"]["arrived"] == 20


def test_the_command_has_gateways_and_a_delay(kvroute: Kvroute) -> None:
    """The settings are those of the options, and impossible ones get one sentence."""
    arguments = ("simulate", CLUSTER, "--requests", "30", "--policy", "netkv", "--seeds", "1", "--workers", "1")
    runs = [document(kvroute(*arguments, "--gateways", "4", "--sync-ms", text, "--json")) for text in ("0", "none")]
    single = document(kvroute(*arguments, "--json"))
    assert runs[0]["runs"][0]["ttft_s"] == single["runs"][0]["ttft_s"]
    assert runs[1]["runs"][0]["requests"]["finished"] == 30
    refused = kvroute(*arguments, "--gateways", "4", "--sync-ms", "soon")
    assert refused.code == 2
    assert "'soon' is not a number of milliseconds" in refused.err
    logged = kvroute(*arguments, "--gateways", "4", "--log", "never.log")
    assert (logged.code, "a log has the decisions of one gateway" in logged.err) == (2, True)
