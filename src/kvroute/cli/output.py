"""What every command prints the same way: one JSON document on stdout, progress and remarks on stderr."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvroute.types import InputError

PAPER_WIDTH = 200
"""Columns where stdout is a file or a pipe: a table that is cut there cannot be mended by the reader."""


def console() -> Console:
    """For people: tables and sentences on stdout."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if fits else Console(width=PAPER_WIDTH)


def thin_table(*headings: str, title: str = "") -> Table:
    """A table as all commands draw it: a rule below the headings and no other lines; further columns may be added."""
    return Table(*headings, title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def remarks() -> Console:
    """For people, beside the result: on stderr."""
    return Console(stderr=True)


def tell(sentences: Iterable[str]) -> None:
    """Each as a line on stderr."""
    for sentence in sentences:
        sys.stderr.write(f"{sentence}\n")


def print_json(document: Any) -> None:
    """The document and a newline on stdout, nothing else; a NaN would be our own bug."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def own_command() -> str:
    """How to call kvroute again from here: `kvroute` where the shell finds this one, else its path, such as
    `.venv/bin/kvroute`."""
    installed = Path(sys.executable).with_name("kvroute")
    found = shutil.which("kvroute")
    if not installed.is_file() or (found is not None and Path(found).samefile(installed)):
        return "kvroute"
    near = installed.is_relative_to(Path.cwd())
    return shlex.quote(str(installed.relative_to(Path.cwd()) if near else installed))


def make_folder(path: Path, where: str) -> None:
    """Have a folder there to write to; InputError that names the option `where` if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} is no folder to write to ({error.strerror})", where=where, mend="give another"
        ) from None


def check_writable(path: Path, where: str) -> None:
    """InputError that names the option `where` if a file cannot be written there; for work that must not be in vain."""
    if path.is_dir() or not (os.access(path if path.exists() else path.parent, os.W_OK)):
        why = "it is a folder" if path.is_dir() else "no such folder" if not path.parent.is_dir() else "not allowed"
        raise InputError(f"{path} cannot be written ({why})", where=where, mend="give another")


def write_whole(path: Path, text: str, where: str) -> None:
    """All at once: who waits for the file must not read half of it. InputError names the option `where`."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})", where=where, mend="give another") from None


def _plain_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """The first call says how much there is to do."""
    told: list[int] = []

    def tell(done: int, total: int) -> None:
        if not told and done < total:
            sys.stderr.write(f"{title}: {total - done} runs\n")
        told.append(done)

    yield tell


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; call what it yields with (done, all). Where that is no terminal, one line at the start."""
    if not sys.stderr.isatty():
        yield from _plain_progress(title)
        return
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
