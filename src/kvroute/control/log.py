"""The record of a run: each event with its decisions, one JSON line each; replayed, it gives the same again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import numpy as np

from kvroute.control.core import Control
from kvroute.control.spec import ControlSpec
from kvroute.types import Decision, Event, InputError


class LogRecord(msgspec.Struct, frozen=True):
    """One event and its decisions, terms included."""

    event: Event
    decisions: tuple[Decision, ...]


class LogHeader(msgspec.Struct, frozen=True, tag="kvroute-log", tag_field="log", kw_only=True):
    """The first line of a log: what is needed to build the same core again."""

    cluster: str
    """The cluster file's text."""
    spec: ControlSpec


def _plain(value: Any) -> Any:
    """Arrays as lists: JSON has no arrays of numbers of its own."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot log a {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_HEADER_START = b'{"log":"kvroute-log"'
_RECORDS = msgspec.json.Decoder(LogRecord, dec_hook=lambda _type, value: np.asarray(value))
_HEADERS = msgspec.json.Decoder(LogHeader)


class EventLog:
    """Writes a log; use it as a context manager, so that the last line is on disk when the run ends or fails.

    Raises InputError where the file cannot be written.
    """

    def __init__(self, path: Path, header: LogHeader) -> None:
        _refuse_other_files(path)
        try:
            self._file: IO[bytes] = path.open("wb")
        except OSError as error:
            mend = "give a file in a folder that exists"
            raise InputError(f"cannot be written ({error.strerror})", where=str(path), mend=mend) from None
        self._file.write(_ENCODER.encode(header) + b"\n")

    def write(self, event: Event, decisions: tuple[Decision, ...]) -> int:
        """Append one record; how many bytes that was."""
        return self._file.write(_ENCODER.encode(LogRecord(event, decisions)) + b"\n")

    def flush(self) -> None:
        """Hand what has been written to the system, for somebody who reads along."""
        self._file.flush()

    def close(self) -> None:
        """The last line is on its way to the disk."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _refuse_other_files(path: Path) -> None:
    """A log may take the place of a log, never of a cluster file or a trace."""
    try:
        with path.open("rb") as old:
            start = old.read(64)
    except OSError:
        return  # not there, or what is wrong shows when it is opened for writing
    if start and not start.startswith(_HEADER_START):
        raise InputError("is there already and is no kvroute log", where=str(path), mend="give another file")


def read_log(path: Path) -> tuple[LogHeader, Iterator[LogRecord]]:
    """The header and, one by one, the records of a log; a broken line is named by file and line number."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if not lines:
        raise InputError("the log is empty", where=str(path), mend="write one with `kvroute simulate --log`")
    try:
        header = _HEADERS.decode(lines[0])
    except msgspec.DecodeError as error:
        raise InputError(f"is not a kvroute log ({error})", where=f"{path}:1") from None
    return header, _records(path, lines[1:])


def _records(path: Path, lines: Iterable[bytes]) -> Iterator[LogRecord]:
    for number, line in enumerate(lines, start=2):
        try:
            yield _RECORDS.decode(line)
        except msgspec.DecodeError as error:
            raise InputError(
                f"broken record ({error})", where=f"{path}:{number}", mend="record the run again"
            ) from None


def replay(control: Control, records: Iterable[LogRecord]) -> Iterator[tuple[LogRecord, tuple[Decision, ...]]]:
    """Feed a log's events to a fresh core; yields each record with the decisions made now.

    Raises InputError where an event cannot follow those before it.
    """
    for record in records:
        yield record, control.handle(record.event)


def same(first: tuple[Decision, ...], second: tuple[Decision, ...]) -> bool:
    """Whether decisions are equal bit for bit, terms included."""
    return _ENCODER.encode(first) == _ENCODER.encode(second)
