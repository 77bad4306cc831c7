"""What a process imports before it has work to do: nothing heavy for a help page, no plots or scipy for a gateway."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
from tests.cli.cli_rig import CLUSTER
from tests.waiting import until
from typer.core import TyperGroup

from kvroute.cli import choices
from kvroute.cli.app import app
from kvroute.planner.placement.grouping import Method
from kvroute.policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY, PREFILL_POLICIES
from kvroute.sim.workload import PROFILES, THINK_MAX_S
from kvroute_studies.netkv.readings import READINGS

_HEAVY = {"numpy", "numba", "llvmlite", "scipy", "matplotlib", "jinja2", "yaml", "aiohttp", "kvroute.topology"}
_HELP = """
import json, os, sys
from kvroute.cli.app import main
for words in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    sys.argv = ["kvroute", *words, "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    sys.stdout.flush()
    sys.stderr.write(json.dumps([words, list(sys.modules)]) + "\\n")
    sys.stderr.flush()
    os._exit(0)
"""


def _commands(words: tuple[str, ...], command: object) -> Iterator[tuple[str, ...]]:
    """Yield a command and those below it."""
    yield words
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _commands((*words, name), command.get_command(context, name))


_PAGES = list(_commands((), typer.main.get_command(app)))
_GROUPS = sorted({words[:-1] for words in _PAGES})


@pytest.mark.parametrize("group", _GROUPS, ids=lambda group: " ".join(("kvroute", *group)))
def test_a_help_page_imports_nothing_heavy(group: tuple[str, ...]) -> None:
    """The page of every command is printed by a process without the modules that take long to import. Those of a group
    are forks of one that has imported no more than the start of a command."""
    pages = [words for words in _PAGES if words[:-1] == group]
    ended = subprocess.run([sys.executable, "-c", _HELP, json.dumps(pages)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Usage: ") == len(pages)
    found = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [tuple(words) for words, _ in found] == pages
    assert {" ".join(words): heavy for words, modules in found if (heavy := _HEAVY & set(modules))} == {}


def test_names_in_help_pages_are_those_of_the_code() -> None:
    """The lists are written out for the help; their order is that of the code."""
    assert tuple(DECODE_POLICIES) == choices.DECODE_POLICIES
    assert choices.DEFAULT_DECODE_POLICY == DEFAULT_DECODE_POLICY
    assert tuple(PREFILL_POLICIES) == choices.PREFILL_POLICIES
    assert tuple(PROFILES) == choices.PROFILES
    assert tuple(READINGS) == choices.READINGS
    assert get_args(Method) == choices.GROUPINGS
    assert choices.THINK_MAX_S == THINK_MAX_S


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
@pytest.mark.parametrize(
    "command",
    ["serve --embedded", pytest.param("serve --embedded --workers 2", marks=pytest.mark.slow), "epp --embedded"],
)
def test_a_gateway_loads_neither_scipy_nor_matplotlib(command: str, tmp_path: Path) -> None:
    """Each process of it that serves has no extension module of them in its memory, and a package of theirs that is
    imported has one."""
    ready = tmp_path / "ready"
    arguments = [*command.split(), CLUSTER, "--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
    program = [sys.executable, "-m", "kvroute.cli.app", *arguments]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            asyncio.run(until(lambda: ready.exists() or process.poll() is not None, poll_s=0.1))
            assert process.poll() is None
            children = [pid for pid in _children(process.pid) if "emulate" not in _arguments(pid)]
            assert len(children) == (2 if "--workers" in command else 0)
            for pid in (process.pid, *children):
                maps = Path(f"/proc/{pid}/maps").read_text()
                assert "/numba/" in maps
                assert [name for name in ("/scipy/", "/scipy.libs/", "/matplotlib/") if name in maps] == []
        finally:
            process.terminate()


def _arguments(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
