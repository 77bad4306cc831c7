"""`kvroute help`: what it lists and prints, and that its texts agree with the code and the documentation."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.core import TyperGroup

from kvroute.cli.app import COMMANDS, app, main
from kvroute.cli.topics import SECTIONS, VARIABLES, topics
from kvroute.policies import DECODE_POLICIES, DECODE_USES, PREFILL_POLICIES
from kvroute.topology import ClusterFile
from kvroute_engine.files.units import Bandwidth, Duration, Latency, Size

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("src", "engine/src", "studies/src") for path in (ROOT / folder).rglob("*.py"))
_INTERNAL = {"KVROUTE_WARNED_OF_KERNEL_CACHE", "KVROUTE_TESTBED"}
"""Variables that kvroute sets for its own child processes."""

Kvroute = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvroute(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Kvroute:
    """The entry point of the installed command in a terminal of 80 columns: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvroute", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def test_help_alone_lists_topics_and_commands(kvroute: Kvroute) -> None:
    """Each name begins a line, and no topic has the name of a command."""
    code, out, err = kvroute("help")
    assert (code, err) == (0, "")
    for name in (*topics(), *COMMANDS):
        assert re.search(rf"^  {name}  +\S", out, re.MULTILINE), name
    assert topics().keys() & COMMANDS.keys() == set()
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", topics())
def test_a_topic_is_printed_whole(kvroute: Kvroute, name: str) -> None:
    """The text is complete at 80 columns, without markup, and the page that it names exists."""
    topic = topics()[name]()
    code, out, err = kvroute("help", name)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    texts = [topic.title, *topic.paragraphs, *(text for row in (*topic.rows, *topic.commands) for text in row)]
    assert set(" ".join(texts).replace("`", "").split()) <= set(out.split())
    assert "`" not in out
    assert (ROOT / "docs" / topic.page).is_file()


@pytest.mark.parametrize("arguments", ["unit", "nothing at all", "units bandwidth"])
def test_an_unknown_topic_is_one_sentence_with_the_list(kvroute: Kvroute, arguments: str) -> None:
    """The exit code is 2."""
    code, out, err = kvroute("help", *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kvroute: there is no help topic {arguments!r}; ")
    assert ", ".join(topics()) in err
    assert ("did you mean 'units'?" in err) == arguments.startswith("unit")


@pytest.mark.parametrize("arguments", ["simulate", "topology", "topology check"])
def test_help_of_a_command_is_its_own(kvroute: Kvroute, arguments: str) -> None:
    """`kvroute help COMMAND` and `kvroute COMMAND --help` print the same."""
    assert kvroute("help", *arguments.split()) == kvroute(*arguments.split(), "--help")


def test_every_command_of_a_topic_exists() -> None:
    """The same holds for its options; text in capitals is a placeholder."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    shown = [line for make in topics().values() for line, _ in make().commands]
    assert len(shown) > 10
    for line in shown:
        program, *arguments = line.split()
        command: Any = group
        while isinstance(command, TyperGroup):
            command = command.get_command(typer.Context(command), arguments.pop(0))
            assert command is not None, line
        assert program == "kvroute"
        known = {option for parameter in command.params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= known, line


def test_units_are_those_of_the_page() -> None:
    """docs/cluster-file.md has the same ranges, and only units that are accepted."""
    page = (ROOT / "docs" / "cluster-file.md").read_text(encoding="utf-8")
    rows = {
        noun: (units, accepted)
        for noun, units, accepted in re.findall(r"^\| (\w+) \| (.*) \| (.* to .*) \|$", page, re.MULTILINE)
    }
    topic = dict(topics()["units"]().rows)
    for kind in (Bandwidth, Latency, Duration, Size):
        units, accepted = rows[kind.noun]
        low, high = accepted.split(" to ")
        assert f"between {low} and {high};" in topic[kind.noun]
        assert set(re.findall(r"`([^`]+)`", units)) <= kind.units.keys()
    assert topic.keys() == {kind.noun for kind in (Bandwidth, Latency, Duration, Size)}


def test_policies_are_those_of_the_code_and_of_the_page() -> None:
    """The use of each policy is the one in the table of docs/policies.md."""
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    table = page.split("## Decode:")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line[:3] == "| `"]
    assert {row[0].strip("` "): row[3] for row in rows} == DECODE_USES
    assert DECODE_USES.keys() == DECODE_POLICIES.keys()
    topic = topics()["policies"]()
    assert all(f"`{name}`" in " ".join(topic.paragraphs) for name in PREFILL_POLICIES)


def test_sections_are_those_of_the_cluster_file() -> None:
    """In the same order."""
    assert list(SECTIONS) == [entry.encode_name for entry in msgspec.structs.fields(ClusterFile)]


def test_every_variable_with_a_fixed_name_is_in_the_list() -> None:
    """The code reads `os.environ[...]`, `os.environ.get(...)` or `... in os.environ`, by a name or a constant."""
    read: set[str] = set()
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    for tree in [ast.parse(text) for text in texts if "environ" in text]:
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            for key in _environment_keys(node):
                name = key.value if isinstance(key, ast.Constant) else constants.get(getattr(key, "id", ""))
                read |= {name} if isinstance(name, str) and name else set()
    assert {"COLUMNS", "KVROUTE_TRACES", "VLLM_HOST_IP"} <= read
    assert read - _INTERNAL <= VARIABLES.keys()
    pages = "".join([*texts, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))])
    assert all(len(re.findall(rf"\b{name}\b", pages)) > 1 for name in VARIABLES)


def _environment_keys(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), slice=key):
            return [key]
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[key, *_]):
            return [key]
        case ast.Compare(left=key, comparators=[ast.Attribute(attr="environ")]):
            return [key]
    return []


def test_every_fixed_exit_code_is_in_the_list() -> None:
    """Codes above 128 are those of signals."""
    cli = [path for path in SOURCES if {"cli", "command", "command.py"} & set(path.parts)]
    codes = {
        int(code) for path in cli for code in re.findall(r"(?:\bExit\(|sys\.exit\(|\breturn )(\d+)\b", path.read_text())
    }
    assert {1, 2, 130} <= codes
    listed = {int(code) for code, _ in topics()["exit-codes"]().rows if code.isdecimal()}
    assert {code for code in codes if code < 128} <= listed


def test_an_error_has_the_exit_code_of_the_list(kvroute: Kvroute) -> None:
    """A missing file is an error of input."""
    assert kvroute("topology", "check", "no-such-file.yaml")[0] == 2
