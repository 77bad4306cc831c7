"""The command line as a user meets it: version, help, completion, commands of a group, lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_rig import CLUSTER, EXAMPLES, Ended, Kvroute, document

from kvroute import __version__
from kvroute_studies.command import families

COMMANDS = (
    "simulate", "experiment", "llm", "flows", "replay", "explain",
    "topology check", "topology show", "trace show", "trace generate", "timing fit", "timing from layers",
)  # fmt: skip


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
    """No text is cut, no line exceeds the width, and the options are those of a wide terminal."""
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


@pytest.mark.parametrize("line", ["", "topology"])
def test_a_command_group_alone_shows_its_help(kvroute: Kvroute, line: str) -> None:
    """A command group without a subcommand prints its help and no error."""
    ended = kvroute(*line.split())
    assert (ended.code, ended.err) == (2, "")
    assert "Usage" in ended.out


def test_one_cell_of_an_experiment_runs_alone_and_once(kvroute: Kvroute) -> None:
    """NetKV has no weights to tune; a second start reads the record from the folder, equal to the last bit."""
    arguments = ("experiment", "netkv-load", "--cell", "rag,1.0,netkv", "--seed", "3", "--out", "res", "--json")
    output = document(kvroute(*arguments))
    (record,) = output["records"]
    assert record["key"] == "netkv-load/paper/rag/load=1/netkv/3"
    assert (record["summary"]["policy"], record["summary"]["seed"], output["cla_weights"]) == ("netkv", 3, [])
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
    names = [name for family in families().values() for name in family.experiments]
    assert [experiment["name"] for experiment in listed] == names
    monkeypatch.setenv("COLUMNS", "80")
    table = kvroute("experiment").out
    assert all(name in table for name in names)
