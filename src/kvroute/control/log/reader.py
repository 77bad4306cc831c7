"""Reads event logs, also those of several files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvroute.control.log.entries import LogHeader, LogRecord, decode_header, decode_record, is_log
from kvroute.control.log.files import family
from kvroute.types import InputError

_HINT = "give a file that `kvroute serve --log` or `kvroute simulate --log` wrote"


def is_truncated(path: Path) -> bool:
    """Whether the last line of a log has no line end, so that `read_log` skips it; the file must not be empty."""
    with parts_of(path)[-1].open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_header(path: Path) -> LogHeader:
    """Return the first line of one file of a log. Raises InputError if it cannot be read or is not a log."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint=_HINT) from None
    if not line:
        raise InputError("the log is empty", where=str(path), hint=_HINT)
    try:
        return decode_header(line)
    except msgspec.DecodeError as error:
        why = f" of this version ({error})" if is_log(line) else ""
        raise InputError(f"is not a kvroute log{why}", where=f"{path}:1", hint=_HINT) from None


def parts_of(path: Path) -> list[Path]:
    """Return all existing files of the log that this file is a part of, in order.

    Raises:
        InputError: the file cannot be read or is not a log, or a part between two others is missing.
    """
    header = read_header(path)
    if not header.log_id:
        return [path]
    parts = {header.part: path}
    for file in family(path):
        try:
            other = read_header(file)
        except InputError:
            continue
        if other.log_id == header.log_id:
            parts.setdefault(other.part, file)
    for number in range(min(parts), max(parts)):
        if number not in parts:
            hint = f"put it back into the folder of {path.name}"
            raise InputError(f"part {number} of this log is missing", where=str(path), hint=hint)
    return [parts[number] for number in sorted(parts)]


def read_log(path: Path) -> tuple[LogHeader, Records]:
    """Return the header and an iterator over the records of a log; any part of the log may be given.

    The error for a broken line names its file and line number. A last line without a line end is skipped: the log is
    still being written, or its writer was killed. If the first parts of the log were removed, the header is that of the
    first existing part (`header.part`).
    """
    files = parts_of(path)
    header = read_header(files[0])
    return header, Records(files, header)


def check_whole(path: Path, header: LogHeader) -> None:
    """Raises InputError if the first part of the log is missing: the log then cannot be replayed."""
    if header.part > 1:
        what = f"the log begins with part {header.part}, but a replay needs the first part"
        hint = "raise gateway.log.total_size to keep more parts, or reload the gateway to start a new log"
        raise InputError(what, where=str(path), hint=hint)


class Records:
    """Reads the records of a log one by one; `place` is the position of the last one read."""

    def __init__(self, files: Sequence[Path], header: LogHeader) -> None:
        """Args: the parts in order, and the header of the first one."""
        self.place = (files[0], 1)
        """File and line number."""
        self._lines = self._read(files, header)

    def __iter__(self) -> Records:
        return self

    def __next__(self) -> LogRecord:
        line = next(self._lines)
        try:
            return decode_record(line)
        except msgspec.DecodeError as error:
            file, number = self.place
            what = f"broken record ({error})"
            raise InputError(what, where=f"{file}:{number}", hint="record the run again") from None

    def _read(self, files: Sequence[Path], header: LogHeader) -> Iterator[bytes]:
        for part, path in enumerate(files, start=header.part):
            try:
                with path.open("rb") as file:
                    for number, line in enumerate(file, start=1):
                        self.place = (path, number)
                        if number == 1:
                            _check_part(line, path, header.log_id, part)
                        elif line.endswith(b"\n"):
                            yield line
            except OSError as error:
                raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint=_HINT) from None


def _check_part(line: bytes, path: Path, log_id: str, part: int) -> None:
    """Raises InputError if the file is now another one: the gateway renames the files of the log that it writes."""
    try:
        header = decode_header(line)
    except msgspec.DecodeError:
        header = None
    if header is None or (header.log_id, header.part) != (log_id, part):
        what = f"is no longer part {part} of the log, because files were renamed while it was read"
        raise InputError(what, where=str(path), hint="read the log again")
