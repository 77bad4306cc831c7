"""The files of event logs in a folder: older ones beside the current one, parts of one log, and how much they take.

The file that is written has the log's own name. When another one takes its place it is renamed to that name with a
number at the end, each time a higher one, so that no file is ever written over.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvroute.types import InputError

HEADER_START = b'{"log":"kvroute-log"'


def is_log(start: bytes) -> bool:
    """Whether a file that begins like this is an event log."""
    return start.startswith(HEADER_START)


def check_place(path: Path) -> None:
    """Raises InputError where no log can be begun: no such folder, or something else is there already."""
    refuse_other_files(path)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is a folder" if path.is_dir() else "no such folder" if not path.parent.is_dir() else "not allowed"
        raise InputError(f"cannot be written ({why})", where=str(path), mend="give a file in a folder that exists")


def refuse_other_files(path: Path) -> None:
    """A log may take the place of a log, never of a cluster file or a trace. Raises InputError."""
    start = _start(path)
    if start and not is_log(start):
        raise InputError("is there already and is no kvroute log", where=str(path), mend="give another file")


def numbered(path: Path) -> list[Path]:
    """Logs that were set aside under this name, the oldest first."""
    found = []
    pattern = re.compile(re.escape(path.name) + r"\.(\d{1,9})")
    for entry in os.scandir(path.parent):
        match = pattern.fullmatch(entry.name)
        if match is not None and is_log(_start(Path(entry.path))):
            found.append((int(match[1]), Path(entry.path)))
    return [file for _, file in sorted(found)]


def set_aside(path: Path) -> Path | None:
    """Rename a log that stands where another one is to begin: `.1` is added to its name, or the next free number.

    Returns:
        where it is now; None: there was none.

    Raises:
        InputError: what stands there is no log, or it cannot be renamed.
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
        mend = "give a file in a folder that may be written"
        raise InputError(f"cannot be renamed to {kept.name} ({error.strerror})", where=str(path), mend=mend) from None
    return kept


def bytes_beside(path: Path) -> int:
    """What the logs that were set aside under this name take."""
    return sum(file.stat().st_size for file in numbered(path) if file.exists())


def remove_oldest(path: Path, total_bytes: float) -> list[Path]:
    """Remove the oldest logs that were set aside until all files together, the current one included, take no more than
    `total_bytes`, or the current one alone is left; those removed. Raises OSError where one cannot be removed."""
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
    """The files beside a log that may be other parts of it: those of the same name, whatever their number. A number at
    the end of its own name may be a part's, or belong to the log's name."""
    base = path.with_name(re.sub(r"\.\d{1,9}\Z", "", path.name))
    files = [*numbered(base), *(numbered(path) if path != base else [])] if base.parent.is_dir() else []
    return [*files, *([base] if base.exists() else [])]


def _start(path: Path) -> bytes:
    """The first bytes of a file; empty where it cannot be read: what is wrong shows when it is used."""
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""
