"""Joins the commands into `kvroute` and turns wrong input into one sentence on stderr and exit code 2.

A command's module is imported when it is asked for: some take a second, and nobody waits for another one's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from kvroute import __version__
from kvroute.types import InputError

COMMANDS = {
    "simulate": "simulate:simulate",
    "serve": "serve:serve",
    "emulate": "emulate:emulate",
    "demo": "demo:demo",
    "testbed": "testbed:app",
    "experiment": "experiment:experiment",
    "plan": "plan:app",
    "topology": "topology:app",
    "trace": "workload:app",
    "timing": "timing:app",
    "key": "keys:app",
    "llm": "llm:llm",
    "flows": "flows:flows",
    "replay": "replay:replay_log",
    "explain": "explain:explain",
}
"""Where each command is, as `module:name` in this room: a function, or a Typer app of several."""


class Commands(TyperGroup):
    """The table as a group."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one; None where there is none of that name."""
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        found = getattr(import_module(f"kvroute.cli.{module}"), attribute)
        alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
        if isinstance(found, typer.Typer):
            alone.add_typer(found, name=cmd_name)
            return typer.main.get_group(alone).commands[cmd_name]
        alone.command(cmd_name)(found)
        return typer.main.get_command(alone)


app = typer.Typer(
    name="kvroute",
    cls=Commands,
    help="Network-aware control plane for prefill/decode-disaggregated LLM inference.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvroute {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Simulate, plan and serve prefill/decode-disaggregated clusters with the same decision code."""


def main() -> None:
    """Entry point of the `kvroute` command."""
    try:
        app()
    except InputError as error:
        typer.echo(f"kvroute: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
