"""What a process imports before it has work to do: nothing heavy for a help page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest
import typer
from typer.core import TyperGroup

from kvroute.cli import choices
from kvroute.cli.app import app
from kvroute.experiments.readings import READINGS
from kvroute.planner.placement.grouping import Method
from kvroute.policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY, PREFILL_POLICIES
from kvroute.sim.workload import PROFILES, THINK_MAX_S

_HEAVY = {"numpy", "numba", "llvmlite", "scipy", "matplotlib", "jinja2", "yaml", "aiohttp", "kvroute.topology"}
_HELP = """
import json, sys
from kvroute.cli.app import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
sys.stderr.write(json.dumps(list(sys.modules)))
"""


def _commands(words: tuple[str, ...], command: object) -> Iterator[tuple[str, ...]]:
    """Yield a command and those below it."""
    yield words
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _commands((*words, name), command.get_command(context, name))


@pytest.mark.parametrize("words", list(_commands((), typer.main.get_command(app))), ids=" ".join)
def test_a_help_page_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    """The page of every command is printed by a process without the modules that take long to import."""
    arguments = [sys.executable, "-c", _HELP, *words, "--help"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "Usage" in ended.stdout
    assert _HEAVY & set(json.loads(ended.stderr)) == set()


def test_names_in_help_pages_are_those_of_the_code() -> None:
    """The lists are written out for the help; their order is that of the code."""
    assert tuple(DECODE_POLICIES) == choices.DECODE_POLICIES
    assert choices.DEFAULT_DECODE_POLICY == DEFAULT_DECODE_POLICY
    assert tuple(PREFILL_POLICIES) == choices.PREFILL_POLICIES
    assert tuple(PROFILES) == choices.PROFILES
    assert tuple(READINGS) == choices.READINGS
    assert get_args(Method) == choices.GROUPINGS
    assert choices.THINK_MAX_S == THINK_MAX_S
