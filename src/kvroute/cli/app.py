"""Joins the commands into `kvroute` and reports wrong input as one sentence on stderr with exit code 2.

A command's module is imported only when the command runs, because some imports take a second.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from kvroute import __version__
from kvroute.cli.help import Command
from kvroute.types import InputError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UsageError: Any = typer.BadParameter.__base__
"""Exception of a wrong command line; typer exports only this subclass."""
COMMANDS = {
    "simulate": "simulate.command:simulate",
    "serve": "serve.command:serve",
    "epp": "serve.epp:epp",
    "doctor": "inspect.doctor:doctor",
    "kube": "kube.command:app",
    "buffer": "engines.declared:buffer",
    "switch": "engines.declared:switch",
    "scheduler": "engines.scheduler:scheduler",
    "agent": "engines.declared:agent",
    "emulate": "trial.emulate:emulate",
    "demo": "trial.demo:demo",
    "testbed": "trial.testbed:app",
    "experiment": "studies:experiment",
    "plan": "plan.command:app",
    "topology": "topology.command:app",
    "trace": "trace.command:app",
    "timing": "timing.command:app",
    "key": "inspect.keys:app",
    "llm": "inspect.llm:llm",
    "flows": "inspect.flows:flows",
    "replay": "inspect.replay:replay_log",
    "explain": "inspect.explain:explain",
    "help": "help_topics:help_topic",
}
"""Location of each command as `module:name` in this package: a function, or a Typer app with several commands."""
STUDIES = "experiment"
"""The command that another distribution, kvroute-studies, brings by an entry point of the group `kvroute.commands`."""


class Commands(TyperGroup):
    """A group whose commands are those of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the command names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is none of that name."""
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        found = _brought(cmd_name) if cmd_name == STUDIES else None
        if found is None:
            module, _, attribute = place.partition(":")
            found = getattr(import_module(f"kvroute.cli.{module}"), attribute)
        single = typer.Typer(rich_markup_mode="rich", add_completion=False)
        if isinstance(found, typer.Typer):
            for registered in found.registered_commands:
                registered.cls = Command
            single.add_typer(found, name=cmd_name)
            return typer.main.get_group(single).commands[cmd_name]
        single.command(cmd_name, cls=Command)(found)
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command; the error for an unknown one suggests the nearest names of the table."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            near = get_close_matches(args[0], COMMANDS)
            if near:
                suggested = " or ".join(repr(name) for name in near)
                error.message = f"{error.message.rstrip('.')}. Did you mean {suggested}?"
            raise


def _brought(name: str) -> Any:
    """Return a command of another distribution; None if that is not installed."""
    entries = tuple(entry_points(group="kvroute.commands", name=name))
    return entries[0].load() if entries else None


class ClosedOutput(OSError):
    """Raised when a command has output and was started without stdout."""


class _Closed(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise ClosedOutput(errno.EBADF, "stdout is closed")


def _replace_closed_streams() -> None:
    """Replace closed standard streams (None in Python), so that no file opened later gets their numbers."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(spare, True)
    os.close(spare)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or io.TextIOWrapper(_Closed(), encoding="utf-8", write_through=True)


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
    _replace_closed_streams()
    try:
        code = _run()
    except ClosedOutput as error:
        code = _refused(f"the output cannot be written ({error.strerror}); send stdout to a file or a terminal")
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        place = error.filename or "the output"
        code = _refused(f"{place} cannot be written ({error.strerror}); send stdout and files to a disk with room")
    sys.exit(code)


def _run() -> int:
    """Run the command and return the exit code; input errors are printed."""
    try:
        return int(app(prog_name="kvroute", standalone_mode=False) or 0)
    except InputError as error:
        return _refused(str(error))
    except UsageError as error:
        text = " ".join(error.format_message().split())  # choices are on separate lines
        if not text:
            return 2  # a group without a command has printed its help
        command = error.ctx.command_path if error.ctx else "kvroute"
        return _refused(f"{text[0].lower()}{text[1:].rstrip('.')}; see `{command} --help`")


def _refused(sentence: str) -> int:
    typer.echo(f"kvroute: {sentence}", err=True)
    return 2


if __name__ == "__main__":
    main()
