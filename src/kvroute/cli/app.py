"""Joins the commands into `kvroute` and reports wrong input as one sentence on stderr with exit code 2.

A command's module is imported only when the command runs, because some imports take a second.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

from kvroute import __version__
from kvroute.cli.output import console
from kvroute.types import InputError

_INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells report it."""
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
_NOT = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of at most 4,300 digits",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "greater_than": "above {gt:,.15g}",
    "greater_than_equal": "{ge:,.15g} or more",
    "less_than": "below {lt:,.15g}",
    "less_than_equal": "at most {le:,.15g}",
}
"""What the value of an option or argument is not, by pydantic's type of the error, with its limits."""
_PAGE_WIDTH = 100
_NAMES_WIDTH = 30
"""Width of the name column of a help page; a longer name gets a line of its own."""


class Command(TyperCommand):
    """A command whose help page fits 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        page = Console(width=min(console().width, _PAGE_WIDTH))
        page.print(Padding(Text(self.get_usage(ctx), style="bold"), 1))
        if self.help:
            page.print(Padding(Text.from_markup(_unwrapped(self.help)), (0, 1, 1, 1)))
        panels: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            if not getattr(parameter, "hidden", False):
                standard = "Arguments" if isinstance(parameter, TyperArgument) else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or standard, []).append(parameter)
        order = sorted(panels, key=lambda title: {"Arguments": 0, "Options": 2}.get(title, 1))
        for title in order:
            rows = [_row(parameter.get_help_record(ctx)) for parameter in panels[title]]
            page.print(Panel(Group(*rows), title=title, title_align="left", border_style="dim"))


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph of the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _row(record: tuple[str, str]) -> RenderableType:
    names, about = record
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=_NAMES_WIDTH, overflow="fold")
    row.add_column(overflow="fold")
    if len(names) <= _NAMES_WIDTH:
        row.add_row(Text(names, style="cyan"), Text(about))
        return row
    row.add_row("", Text(about))
    return Group(Text(names, style="cyan"), row)


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
        code = int(app(prog_name="kvroute", standalone_mode=False) or 0)
        if code == _INTERRUPTED:  # typer returns it after Ctrl-C
            typer.echo("kvroute: interrupted", err=True)
        return code
    except InputError as error:
        return _refused(str(error))
    except UsageError as error:
        error.message = _wrong_value(error) or error.message
        text = " ".join(error.format_message().split())  # choices are on separate lines
        if not text:
            return 2  # a group without a command has printed its help
        command = error.ctx.command_path if error.ctx else "kvroute"
        return _refused(f"{text[0].lower()}{text[1:].rstrip('.')}; see `{command} --help`")


def _wrong_value(error: Any) -> str | None:
    """Return what is wrong with a value that typer could not convert; None for other errors of the command line."""
    faults: list[Any] = getattr(error.__cause__, "errors", list)()
    if len(faults) != 1 or faults[0]["type"] not in _NOT:
        return None
    what = _NOT[faults[0]["type"]].format(**faults[0].get("ctx", {}))
    return f"{str(faults[0]['input'])[:40]!r} is not {what}"


def _refused(sentence: str) -> int:
    typer.echo(f"kvroute: {sentence}", err=True)
    return 2


if __name__ == "__main__":
    main()
