"""The command line as a user meets it: one document or one sentence, and an exit code that a script can use."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvroute import __version__
from kvroute.cli.app import main
from kvroute.cli.experiment import FAMILIES
from kvroute.event_log import read_log
from kvroute.types import Decode, Terms

CLUSTER = str(Path(__file__).resolve().parents[1] / "examples" / "small.yaml")
EXAMPLES = Path(CLUSTER).parent
FLOWS, PLAN = EXAMPLES / "flows-classes.json", EXAMPLES / "prfaas-case-study.yaml"
CUT = EXAMPLES / "scenarios" / "wan-cut.yaml"
COMMANDS = (
    "simulate", "experiment", "llm", "flows", "replay", "explain",
    "topology check", "topology show", "trace show", "trace generate", "timing fit",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Kvroute = Callable[..., Ended]


@pytest.fixture
def kvroute(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Kvroute:
    """The entry point of the installed command, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # independent of the terminal that runs the tests
    # The completion script is requested by name; shell detection depends on the calling process.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kvroute", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twenty requests within two seconds; some share a prefix, and one requests no output."""
    lines = [
        {
            "timestamp": 100 * number,
            "input_length": 700 + 400 * (number % 5),
            "output_length": 0 if number == 7 else 5 + number,
            "hash_ids": [number % 3, *(100 * number + k for k in range(1, -(-(700 + 400 * (number % 5)) // 512)))],
        }
        for number in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def log(kvroute: Kvroute, trace: str) -> Path:
    """A recorded run with NetKV."""
    run = kvroute(
        "simulate", CLUSTER, "--trace", trace, "--policy", "netkv", "--seeds", "1", "--log", "run.log", "--workers", "1"
    )
    assert run.code == 0, run.err
    return Path("run.log")


def document(ended: Ended) -> Any:
    """Return stdout, which must be one JSON document without NaN."""
    assert ended.code == 0, ended.err

    def never(text: str) -> None:
        raise AssertionError(f"{text} in JSON")

    return json.loads(ended.out, parse_constant=never)


def test_version_is_that_of_the_package(kvroute: Kvroute) -> None:
    """`kvroute --version` prints the installed version."""
    assert kvroute("--version") == Ended(0, f"kvroute {__version__}\n", "")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(kvroute: Kvroute, command: str) -> None:
    """The exit code is 0 and the help is on stdout."""
    ended = kvroute(*command.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    assert "Usage" in ended.out


OPTION = re.compile(r"--[a-z][a-z0-9-]*")


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete_in_a_narrow_terminal(kvroute: Kvroute, command: str, width: int, monkeypatch: Any) -> None:
    """No option name and no sentence is cut, and no line is too long: the words are the same as in a wide terminal."""
    wide = kvroute(*command.split(), "--help").out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = kvroute(*command.split(), "--help").out
    assert max(map(len, narrow.splitlines())) <= width
    assert set(OPTION.findall(wide)) <= set(OPTION.findall(narrow))
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow


@pytest.mark.parametrize("width", [80, 100])
def test_tables_cut_no_cell_in_a_narrow_terminal(
    kvroute: Kvroute, log: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """A column that does not fit is left out and named; the others are complete, in human-readable units."""
    case, flows = (str(EXAMPLES / name) for name in ("prfaas-case-study.yaml", "flows-shared-uplink.json"))
    monkeypatch.setenv("COLUMNS", str(width))
    for line in (
        ("explain", str(log), "3"),
        ("plan", "prfaas", case),
        ("plan", "egress", "--gpus", "512"),
        ("flows", flows, "--table"),
        ("llm",),
        ("llm", "kimi-linear-48b", "--tp", "4"),
        ("experiment",),
        ("topology", "show", CLUSTER),
        ("trace", "show", "--generate", "--requests", "50"),
    ):
        shown = kvroute(*line)
        assert shown.code == 0, shown.err
        assert max(map(len, shown.out.splitlines())) <= width, line
        assert "\N{HORIZONTAL ELLIPSIS}" not in shown.out, line
        assert not re.search(r"\de[+-]\d", shown.out), line


def test_the_completion_script_is_printed(kvroute: Kvroute) -> None:
    """The shell is bash, and the output is written to a file."""
    ended = kvroute("--show-completion", "bash")
    assert ended.code == 0, ended.err
    assert "complete " in ended.out
    assert "kvroute" in ended.out


def test_simulate_prints_one_document_of_runs(kvroute: Kvroute, trace: str) -> None:
    """Two policies and two seeds give one run each in this order, with every documented key, and a verdict."""
    ended = kvroute(
        "simulate", CLUSTER, "--trace", trace, "--policy", "round-robin", "--policy", "netkv",
        "--seeds", "2", "--workers", "1", "--json",
    )  # fmt: skip
    found = document(ended)
    runs = found["runs"]
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
    assert found["verdict"]["winner"] in ("round-robin", "netkv")


def test_stdout_contains_only_the_document(trace: str) -> None:
    """By default four policies run, compared over one seed here. If stderr is no terminal, it has one line and no
    progress bar."""
    command = [sys.executable, "-m", "kvroute.cli.app", "simulate", CLUSTER, "--trace", trace, "--seeds", "1"]
    out = subprocess.run([*command, "--workers", "1", "--json"], capture_output=True, text=True)
    runs = document(Ended(out.returncode, out.stdout, out.stderr))["runs"]
    assert [run["policy"] for run in runs] == ["round-robin", "cla", "netkv", "foresight"]
    assert out.stderr == "Simulating: 4 runs\n"


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
    assert all(word in headings for word in ("threshold", "remote", "KV %", "failed", "copied"))
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
    said = kvroute(*once)
    assert said.err == "Simulating: 1 runs\n"
    assert "warm-up" not in said.out


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


def test_a_log_replays_bit_for_bit(kvroute: Kvroute, log: Path) -> None:
    """19 requests have two decisions each, and one needs no decode."""
    found = document(kvroute("replay", str(log), "--json"))
    assert (found["decisions"], found["equal"], found["first_difference_line"]) == (39, True, None)
    assert found["events"] == len(log.read_bytes().splitlines()) - 1
    assert "bit for bit" in kvroute("replay", str(log)).out


def test_a_truncated_log_is_reported(kvroute: Kvroute, log: Path) -> None:
    """The complete lines are replayed; a complete log causes no warning, and an unknown request ID gives the range of
    IDs."""
    assert kvroute("replay", str(log)).err == ""
    wrong = kvroute("explain", str(log), "99999")
    assert (wrong.code, "the log has 20 requests, numbered from 0 to 19" in wrong.err) == (2, True)
    log.write_bytes(log.read_bytes()[:-40])
    ended = kvroute("replay", str(log))
    assert (ended.code, "bit for bit" in ended.out) == (0, True)
    assert "the last line is incomplete and was skipped" in ended.err


def test_a_skipped_line_is_reported_without_a_hint(kvroute: Kvroute, trace: str) -> None:
    """The place and the error of the line are printed once; without `--skip-bad` the message names this option."""
    Path(trace).write_text(Path(trace).read_text() + '{"timestamp": 1}\n')
    assert "skip invalid lines (--skip-bad)" in kvroute("trace", "show", trace).err
    ended = kvroute("trace", "show", trace, "--skip-bad")
    assert ended.code == 0
    assert "skipped: " in ended.err
    assert "--skip-bad" not in ended.err


def test_a_log_is_replayed_with_another_policy(kvroute: Kvroute, log: Path) -> None:
    """The recorded run is unchanged; the policy of the log itself makes equal decisions."""
    found = document(kvroute("replay", str(log), "--shadow", "round-robin", "--json"))
    assert found["equal"]
    assert found["shadow"]["policy"] == "round-robin"
    assert 0 < found["shadow"]["differ"] < found["shadow"]["decisions"] == 19
    spoken = kvroute("replay", str(log), "--shadow", "round-robin").out
    assert f"differs from netkv in {found['shadow']['differ']} of 19 decode decisions" in " ".join(spoken.split())
    assert "agrees with netkv in all 19" in " ".join(kvroute("replay", str(log), "--shadow", "netkv").out.split())
    wrong = kvroute("replay", str(log), "--shadow", "netkw")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean 'netkv'?" in wrong.err


def test_a_modified_decision_is_found_with_its_line(kvroute: Kvroute, log: Path) -> None:
    """One target is exchanged for the other: the exit code is 1, and the line is named."""
    lines = log.read_text().splitlines(keepends=True)
    number = next(index for index, line in enumerate(lines) if '"type":"decode"' in line)
    other = {"decode0": "decode1", "decode1": "decode0"}
    target = msgspec.json.decode(lines[number])["decisions"][0]["target"]
    lines[number] = lines[number].replace(f'"target":"{target}"', f'"target":"{other[target]}"')
    log.write_text("".join(lines))
    ended = kvroute("replay", str(log))
    assert ended.code == 1
    assert f"differ starting at line {number + 1} of run.log" in ended.out
    again = kvroute("replay", str(log), "--json")
    assert again.code == 1
    assert json.loads(again.out)["first_difference_line"] == number + 1


def test_an_impossible_event_is_found_with_its_line(kvroute: Kvroute, log: Path) -> None:
    """One arrival is removed: the next event of that request is rejected."""
    lines = log.read_text().splitlines(keepends=True)
    gone = next(index for index, line in enumerate(lines) if '"type":"arrived"' in line)
    number = msgspec.json.decode(lines.pop(gone))["event"]["request"]["id"]
    log.write_text("".join(lines))
    first = next(index for index, line in enumerate(lines) if f'"request_id":{number}}}' in line)
    ended = kvroute("replay", str(log))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"kvroute: run.log:{first + 1}: ")
    assert f"request {number} is not in flight" in ended.err


def _terms(decision: Decode) -> Terms:
    assert decision.terms is not None
    return decision.terms


def test_explain_shows_the_terms_in_the_log(kvroute: Kvroute, log: Path) -> None:
    """Every term of every candidate is shown, as JSON and as a table."""
    _, records = read_log(log)
    decisions = [made for record in records for made in record.decisions if isinstance(made, Decode)]
    decision = max(decisions, key=lambda made: float(np.ptp(_terms(made).cost)))
    terms = _terms(decision)
    assert np.ptp(terms.cost) > 0
    shown = document(kvroute("explain", str(log), str(decision.request_id), "--json"))
    assert (shown["request"], shown["policy"]) == (decision.request_id, "netkv")
    assert [one["kind"] for one in shown["decisions"]] == ["prefill", "decode"]
    last = shown["decisions"][-1]
    assert (last["chosen"], last["unit"]) == (decision.target, "s")
    assert [row["name"] for row in last["candidates"]] == list(terms.names)
    for part, values in {**terms.parts, "cost": terms.cost}.items():
        assert [row[part] for row in last["candidates"]] == values.tolist()
    table = kvroute("explain", str(log), str(decision.request_id)).out
    assert all(f"{cost * 1e3:,.2f}" in table for cost in terms.cost.tolist())
    assert all(word in table for part in terms.parts for word in part.removesuffix("_bytes_per_s").split("_")[:-1])


def test_an_invalid_option_does_not_change_an_older_log(kvroute: Kvroute, log: Path, trace: str) -> None:
    """Invalid options are found before the file is opened for writing."""
    before = log.read_bytes()
    for wrong in (["--policy", "netkw"], ["--policy", "netkv", "--constraint", "podd:fail"], []):
        ended = kvroute("simulate", CLUSTER, "--trace", trace, "--seeds", "1", "--log", str(log), *wrong)
        assert ended.code == 2
        assert log.read_bytes() == before


WRONG = [
    ("simulate nofile.yaml", "nofile.yaml: the file cannot be read"),
    (f"simulate {CLUSTER} --policy netkw", "did you mean 'netkv'?"),
    (f"simulate {CLUSTER} --prefill-policy x", "unknown prefill policy 'x'"),
    (f"simulate {CLUSTER} --constraint x", "unknown level 'x'"),
    (f"simulate {CLUSTER} --cla-weights 1", "--cla-weights: '1' is not a pair of weights"),
    (f"simulate {CLUSTER} --profile x", "--profile: there is no profile 'x'"),
    (f"simulate {CLUSTER} --requests 9 --rate inf", "'inf' is not a rate"),
    (f"simulate {CLUSTER} --requests 9 --warmup inf", "'inf' is not a duration"),
    (f"simulate {CLUSTER} --requests 9 --slo-ttft inf", "'inf' is not a duration"),
    (f"simulate {CLUSTER} --requests 9 --on mars", "--on: cannot run on 'mars'"),
    ("trace show octets --seed 3", "--seed: a trace file needs no seed; omit it"),
    (f"simulate {CLUSTER} --trace nofile.jsonl", "nofile.jsonl: cannot be read"),
    (f"simulate {CLUSTER} --requests 9 --out file", "--out: file is not a writable folder"),
    (f"simulate {CLUSTER} --requests 9 --log a.log", "--log: a log can hold only one run"),
    (f"simulate {CLUSTER} --requests 9 --policy netkv --seeds 1 --log no/a.log", "no/a.log: cannot be written"),
    (f"simulate {CLUSTER} --requests 9 --policy netkv --seeds 1 --log .", ".: cannot be written"),
    ("simulate octets --policy netkv --seeds 1 --log a.log", "octets: the file is not UTF-8 text"),
    ("experiment nothing", "there is no experiment 'nothing'"),
    ("experiment netkv-load --reading x", "--reading: there is no reading 'x'"),
    ("experiment netkv-load --profile x", "--profile: there is no profile 'x'"),
    ("experiment netkv-load --cell rag,netkv", "write profile,load,policy"),
    ("experiment netkv-load --cell rag,x,netkv", "an axis value that is not a number"),
    ("experiment netkv-load --cell rag,nan,netkv", "netkv-load has no cell 'rag,nan,netkv'"),
    ("experiment netkv-load --trace octets", "octets:1: "),
    ("experiment netkv-load --out file", "--out: file/paper/generated is not a writable folder"),
    ("experiment netkv-load --set ecmp", "--set: 'ecmp' has no value; write field=value"),
    ("experiment netkv-load --set ecmp=foo", "--set: ecmp=foo: the value is unknown; choose one of "),
    ("experiment netkv-load --set prefill_base_s=foo", "--set: prefill_base_s=foo: the value is not of type number"),
    ("experiment prfaas-burst --set wan_gbps", "--set: 'wan_gbps' has no value"),
    (
        "experiment prfaas-burst --set wan_gbps=x",
        "--set: wan_gbps=x: the value is not of type number; give a value of this type",
    ),
    ("replay octets", "octets:1: is not a kvroute log; give a file that `kvroute serve --log`"),
    ("replay nofile", "nofile: cannot be read (No such file or directory); give a file that `kvroute serve --log`"),
    ("explain object 1", "object:1: is not a kvroute log; give a file that"),
    ("explain empty 1", "empty: the log is empty; give a file that"),
    ("flows empty", "empty: the file is empty; give a JSON object with `links` and `flows`"),
    ("flows object", "object: `links` is missing; give a JSON object with `links` and `flows`"),
    (f"emulate {CLUSTER} --background 2", "--background: 2 is not a valid share; use 0 or more and less than 1"),
    ("trace generate no/x.jsonl", "no/x.jsonl: cannot be written (No such file or directory); give a file in a folder"),
    (f"topology new --both http://a:1 --out {CLUSTER}", "the file already exists; give another file to --out"),
    (f"topology show {FLOWS}", "this looks like transfers over links; read it with `kvroute flows FILE`"),
    (f"topology show {PLAN}", "this looks like a plan file; read it with `kvroute plan prfaas FILE`"),
    (f"plan prfaas {CLUSTER}", "this looks like a cluster file; read it with `kvroute topology check FILE`"),
    (f"simulate {CLUSTER} --scenario {CLUSTER}", "this looks like a cluster file"),
    (f"simulate {CUT}", "this looks like a scenario; read it with `kvroute simulate CLUSTER --scenario FILE`"),
    ("simulat x", "no such command 'simulat'. Did you mean 'simulate'"),
    ("topolgy check x", "no such command 'topolgy'. Did you mean 'topology'?; see `kvroute --help`"),
    ("topology chekc x", "no such command 'chekc'. Did you mean 'check'?; see `kvroute topology --help`"),
    ("llm nothing", "there is no model 'nothing'; `kvroute llm` lists the presets; or give a config.json"),
    ("llm llama-3-70", "did you mean llama-3-70b? `kvroute llm` lists the presets; or"),
    ("llm empty", "empty: the file is empty"),
    ("flows octets", "octets"),
    (f"flows {CLUSTER}", "this looks like a cluster file; read it with `kvroute topology check FILE`"),
    ("experiment netkv-load --cell x --trace-dir .", "--trace-dir: netkv does not support this option; omit it"),
    ("experiment prfaas --cell x --trace-dir .", "--trace-dir: prfaas does not support this option; omit it"),
    (
        "experiment prefix-copies --cell x --trace-dir .",
        "--trace-dir: prefix-copies does not support this option; omit it",
    ),
    ("experiment never-worse --cell x --trace-dir .", ".: the folder has none of the recorded traces; give"),
    ("topology show nofile", "nofile: "),
    ("trace show nofile", "nofile: cannot be read (No such file or directory); check its path"),
    ("trace generate trace.txt", "trace.txt"),
    ("timing fit nofile", "nofile"),
    (
        f"emulate {CLUSTER} --host 10.99.99.99",
        "cannot listen on 10.99.99.99 (Cannot assign requested address); give an",
    ),
    (f"emulate {CLUSTER} --host 10.99.99.99 --no-kv-events", "give an address of this machine"),
    (f"emulate {CLUSTER} --ready-file no/x", "--ready-file: no/x cannot be written (no such folder)"),
    (f"serve --embedded {CLUSTER} --ready-file no/x", "--ready-file: no/x cannot be written (no such folder)"),
    (f"serve --embedded {CLUSTER} --log no/x", "no/x: cannot be written (no such folder)"),
    (f"serve --embedded {CLUSTER} --log file", "file: exists and is not a kvroute log"),
    (f"serve --embedded {CLUSTER} --policy nope", "unknown decode policy 'nope'"),
    (f"serve --embedded {CLUSTER} --shadow nope", "unknown decode policy 'nope'"),
    (f"serve --embedded {CLUSTER} --constraint foo", "constraint: unknown level 'foo'"),
    (f"serve --embedded {CLUSTER} --host 10.99.99.99", "gateway.listen: cannot listen on 10.99.99.99:8080"),
]


@pytest.mark.parametrize(("line", "problem"), WRONG, ids=[line.replace(str(EXAMPLES), "examples") for line, _ in WRONG])
def test_invalid_input_gives_one_sentence_and_exit_code_2(kvroute: Kvroute, line: str, problem: str) -> None:
    """The sentence is on stderr; stdout stays empty, also with `--json`."""
    Path("file").write_text("in the way\n")
    Path("empty").write_text("")
    Path("object").write_text("{}")
    Path("octets").write_bytes(bytes([0xFF, 0xFE, 0x00, 0x93]) * 20)
    ended = kvroute(*line.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kvroute: ")
    assert problem in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("line", [f"simulate {CLUSTER} --requests 9", "experiment netkv-load --seeds 1"])
def test_a_missing_ray_is_reported_before_any_other_output(kvroute: Kvroute, line: str) -> None:
    """Nothing is printed about runs that will not start."""
    ended = kvroute(*line.split(), "--on", "ray")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kvroute: --on ray: Ray is not installed")


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_in_use_is_found_before_engines_start(kvroute: Kvroute, option: str) -> None:
    """The error names the section and the fix, and it is the only output, because no engine has started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = "--admin-port" if option == "--port" else "--port"
        ended = kvroute("serve", "--embedded", CLUSTER, option, str(port), other, "0")
    assert (ended.code, ended.out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another port" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_executor_leaves_no_folder(kvroute: Kvroute, name: str) -> None:
    """`--on` is checked first, for every publication."""
    ended = kvroute("experiment", name, "--on", "mars", "--out", "made")
    assert (ended.code, Path("made").exists()) == (2, False)
    assert ended.err == "kvroute: --on: cannot run on 'mars'; choose local or ray\n"


@pytest.mark.parametrize("how", ["embedded", "live"])
def test_an_older_log_is_kept_if_no_address_can_be_bound(kvroute: Kvroute, log: Path, how: str) -> None:
    """Every address of a host name is tried; an invalid host name is reported before engines start."""
    Path("live.yaml").write_text(kvroute("topology", "new", "--both", "http://127.0.0.1:1").out)
    start = ("serve", "--embedded", CLUSTER) if how == "embedded" else ("serve", "live.yaml")
    before = log.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, why in (("localhost", "Address already in use"), ("no..name", "the host name is not valid")):
            ended = kvroute(*start, "--host", host, "--port", str(port), "--admin-port", "0", "--log", str(log))
            assert (ended.code, ended.out) == (2, "")
            assert ended.err.startswith(f"kvroute: gateway.listen: cannot listen on {host}:{port} ({why}); ")
            assert ended.err.count("\n") == 1
    assert (log.read_bytes(), Path("run.log.1").exists()) == (before, False)


@pytest.mark.parametrize(
    "options",
    [
        "--rate -1", "--rate nan", "--background 1", "--background nan", "--oracle-refresh 0", "--p-share 2",
        "--warmup nan", "--slo-ttft nan", "--seeds 0", "--seed -1", "--seed 9999999999999999999999", "--requests 0",
        "--input-tokens 10000000000", "--workers 0", "--workers 100000", "--nonsense",
    ],
)  # fmt: skip
def test_values_out_of_range_are_usage_errors(kvroute: Kvroute, options: str) -> None:
    """The exit code is 2 and one sentence gives the option's name and the help command, before anything runs."""
    ended = kvroute("simulate", CLUSTER, *options.split(), "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kvroute: ")
    assert options.split()[0] in ended.err
    assert ended.err.endswith("; see `kvroute simulate --help`\n")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("plain", "with_unit"),
    [
        ("--slo-ttft 2", "--slo-ttft 2s"),
        ("--slo-ttft 0.5", "--slo-ttft 500ms"),
        ("--warmup 60", "--warmup 1min"),
        ("--rate 1.5", "--rate 90/min"),
        ("--oracle-refresh 0.25", "--oracle-refresh 250ms"),
        ("--input-tokens 2048", "--input-tokens 2K"),
    ],
)
def test_options_accept_units(kvroute: Kvroute, plain: str, with_unit: str) -> None:
    """Numbers without a unit are seconds, requests per second and tokens."""
    start = ("simulate", CLUSTER, "--requests", "40", "--seeds", "1", "--policy", "cla", "--json")
    runs = [document(kvroute(*start, *each.split())) for each in (plain, with_unit)]
    for each in runs:
        for measured in ("decision_s", "wall_s", "cpu_s"):
            del each["runs"][0][measured]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--slo-ttft 2x", "'2x' is not a duration; write a number of seconds, or a number and ns, us, ms, s, min or h"),
        ("--slo-ttft 0", "'0' is not 1 us or more; write"),
        ("--rate 6/d", "'6/d' is not a rate; write requests per second, or with a unit, such as 6/s or 90/min"),
        ("--rate 0/s", "'0/s' is not above 0; write requests per second"),
        ("--input-tokens 2.5", "'2.5' is not a number of tokens; write a whole number, or thousands such as 32K"),
    ],
)
def test_a_wrong_unit_gives_one_sentence_with_a_hint(kvroute: Kvroute, options: str, sentence: str) -> None:
    """The sentence contains the option's name."""
    ended = kvroute("simulate", CLUSTER, *options.split(), "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"kvroute: invalid value for '{options.split()[0]}': {sentence}")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("simulat", "no such command 'simulat'. Did you mean 'simulate' or 'emulate'?; see `kvroute --help`"),
        ("simulate", "missing argument 'cluster'; see `kvroute simulate --help`"),
        ("topology nope", "no such command 'nope'; see `kvroute topology --help`"),
        ("trace generate", "missing argument 'out'; see `kvroute trace generate --help`"),
    ],
)
def test_an_invalid_command_line_gives_one_sentence(kvroute: Kvroute, line: str, sentence: str) -> None:
    """There is no box and no usage text, only a reference to the help."""
    assert kvroute(*line.split()) == Ended(2, "", f"kvroute: {sentence}\n")


@pytest.mark.parametrize("line", ["", "topology"])
def test_a_command_group_alone_shows_its_help(kvroute: Kvroute, line: str) -> None:
    """A command group without a subcommand prints its help and no error."""
    ended = kvroute(*line.split())
    assert (ended.code, ended.err) == (2, "")
    assert "Usage" in ended.out


def test_one_cell_of_an_experiment_runs_alone_and_once(kvroute: Kvroute) -> None:
    """NetKV has no weights to tune; a second start reads the record from the folder, equal to the last bit."""
    arguments = ("experiment", "netkv-load", "--cell", "rag,1.0,netkv", "--seed", "3", "--out", "res", "--json")
    found = document(kvroute(*arguments))
    (record,) = found["records"]
    assert record["key"] == "netkv-load/paper/rag/load=1/netkv/3"
    assert (record["summary"]["policy"], record["summary"]["seed"], found["cla_weights"]) == ("netkv", 3, [])
    assert [path.name for path in Path("res").rglob("*.jsonl")] == ["netkv-load.jsonl"]
    assert document(kvroute(*arguments))["records"] == [record]


def test_topology_check_counts_the_errors(kvroute: Kvroute) -> None:
    """The command prints its findings and then their number."""
    Path("octets").write_bytes(b"\xff\xfe")
    ended = kvroute("topology", "check", "octets")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        "octets: the file is not UTF-8 text; give a YAML file", "1 error in octets",
    ]  # fmt: skip


def test_results_in_another_format_are_not_truncated(kvroute: Kvroute) -> None:
    """The file has one complete line that is not a record."""
    path = Path("res/paper/generated/netkv-load.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("my notes\n")
    ended = kvroute("experiment", "netkv-load", "--cell", "rag,1.0,netkv", "--seed", "3", "--out", "res")
    assert ended.code == 2
    assert "netkv-load.jsonl:1: the line is not a valid result" in ended.err
    assert path.read_text() == "my notes\n"


def test_experiment_without_arguments_lists_all_experiments(kvroute: Kvroute, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every experiment is listed, as a table and as JSON; a narrow terminal cuts no name."""
    listed = document(kvroute("experiment", "--json"))["experiments"]
    names = [name for family in FAMILIES.values() for name in family.experiments]
    assert [one["name"] for one in listed] == names
    monkeypatch.setenv("COLUMNS", "80")
    table = kvroute("experiment").out
    assert all(name in table for name in names)
