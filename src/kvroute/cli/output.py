"""Output shared by all commands: one JSON document on stdout, progress and remarks on stderr."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvroute_engine.command.output import check_writable, make_folder, tell, write_whole

__all__ = [
    "PAPER_WIDTH",
    "check_writable",
    "console",
    "make_folder",
    "own_command",
    "print_json",
    "progress_bar",
    "remarks",
    "tell",
    "thin_table",
    "write_whole",
]

PAPER_WIDTH = 200
"""Width in columns if stdout is a file or a pipe; wide, because the reader cannot restore a truncated table."""


def console() -> Console:
    """Return the console for tables and sentences on stdout."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if fits else Console(width=PAPER_WIDTH)


def thin_table(*headings: str, title: str = "") -> Table:
    """Return a table in the style of all commands: a rule below the headings and no other lines."""
    return Table(*headings, title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def remarks() -> Console:
    """Return the console for remarks on stderr."""
    return Console(stderr=True)


def print_json(document: Any) -> None:
    """Print the document and a newline on stdout, nothing else; a NaN is a bug of kvroute."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def own_command() -> str:
    """Return the shell command that runs this kvroute: `kvroute` if the shell finds this one, else its path, such as
    `.venv/bin/kvroute`."""
    installed = Path(sys.executable).with_name("kvroute")
    found = shutil.which("kvroute")
    if not installed.is_file() or (found is not None and Path(found).samefile(installed)):
        return "kvroute"
    near = installed.is_relative_to(Path.cwd())
    return shlex.quote(str(installed.relative_to(Path.cwd()) if near else installed))


def _plain_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Print the total at the first call."""
    announced: list[int] = []

    def tell(done: int, total: int) -> None:
        if not announced and done < total:
            sys.stderr.write(f"{title}: {total - done} run{'s' * (total - done != 1)}\n")
        announced.append(done)

    yield tell


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, or one line without a terminal; call the yielded function with (done, all)."""
    if not sys.stderr.isatty():
        yield from _plain_progress(title)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=remarks(),
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
