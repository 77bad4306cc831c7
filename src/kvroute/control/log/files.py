"""The files of event logs in a folder: the current log, older logs and parts, and the space that they take.

The file being written has the name of the log. When another file takes its place, it is renamed to that name with a
number at the end. The number increases each time, so no file is ever overwritten.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvroute.control.log.entries import is_log
from kvroute.types import InputError


def check_can_create(path: Path) -> None:
    """Raises InputError if no log can be created here: the folder does not exist, or another file has this name."""
    refuse_other_files(path)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is a folder" if path.is_dir() else "no such folder" if not path.parent.is_dir() else "not allowed"
        raise InputError(f"cannot be written ({why})", where=str(path), hint="give a file in a folder that exists")


def refuse_other_files(path: Path) -> None:
    """Raises InputError if the file exists and is not a log: a log must not overwrite a cluster file or a trace."""
    start = _start(path)
    if start and not is_log(start):
        raise InputError("exists and is not a kvroute log", where=str(path), hint="give another file")


def numbered(path: Path) -> list[Path]:
    """The renamed older logs of this name, oldest first."""
    found = []
    pattern = re.compile(re.escape(path.name) + r"\.(\d{1,9})")
    for entry in os.scandir(path.parent):
        match = pattern.fullmatch(entry.name)
        if match is not None and is_log(_start(Path(entry.path))):
            found.append((int(match[1]), Path(entry.path)))
    return [file for _, file in sorted(found)]


def rotate(path: Path) -> Path | None:
    """Rename an existing log to free its name for a new one: `.1`, or the next free number, is added to its name.

    Returns:
        the new path; None if there was no log.

    Raises:
        InputError: the existing file is not a log, or it cannot be renamed.
    """
    refuse_other_files(path)
    if not path.exists():
        return None
    pattern = re.compile(re.escape(path.name) + r"\.(\d{1,9})")
    matches = [pattern.fullmatch(entry.name) for entry in os.scandir(path.parent)]
    number = max((int(match[1]) for match in matches if match is not None), default=0) + 1
    kept = path.with_name(f"{path.name}.{number}")
    try:
        path.replace(kept)
    except OSError as error:
        hint = "make the folder writable"
        raise InputError(f"cannot be renamed to {kept.name} ({error.strerror})", where=str(path), hint=hint) from None
    return kept


def bytes_beside(path: Path) -> int:
    """Total size of the renamed older logs of this name."""
    return sum(file.stat().st_size for file in numbered(path) if file.exists())


def remove_oldest(path: Path, total_bytes: float) -> list[Path]:
    """Remove the oldest renamed logs until all files together, with the current one, take at most `total_bytes`.

    The current file is never removed. Return the removed files. Raises OSError if one cannot be removed.
    """
    files = numbered(path)
    taken = sum(file.stat().st_size for file in [*files, path] if file.exists())
    removed = []
    for file in files:
        if taken <= total_bytes:
            break
        taken -= file.stat().st_size
        file.unlink()
        removed.append(file)
    return removed


def family(path: Path) -> list[Path]:
    """The files that may be other parts of this log: those with the same name and any number. A number at the end of
    `path` may be the number of a part or belong to the name of the log, so both cases are included."""
    base = path.with_name(re.sub(r"\.\d{1,9}\Z", "", path.name))
    files = [*numbered(base), *(numbered(path) if path != base else [])] if base.parent.is_dir() else []
    return [*files, *([base] if base.exists() else [])]


def _start(path: Path) -> bytes:
    """The first bytes of a file; empty if it cannot be read: the caller's own open or write reports the error."""
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""
