"""The log of a run: each event with its decisions, one JSON line each. A replay of the log gives the same decisions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, TypeAlias

import msgspec
import numpy as np

from kvroute.control.core import Control
from kvroute.control.log_files import family, is_log, refuse_other_files
from kvroute.control.spec import ControlSpec
from kvroute.types import Convert, CopyPrefix, Decision, Decode, Event, InputError, Prefill, Reject, Terms

TermsKept: TypeAlias = Literal["best", "all"]
TERMS_ALL, TERMS_BEST = 64, 16
"""`best` keeps all terms of up to 64 candidates; of more, only those of the 16 cheapest and of the chosen one."""
_BUFFER_BYTES = 1 << 18
_LOG_MEND = "give a file that `kvroute serve --log` or `kvroute simulate --log` wrote"


class LogRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event and its decisions, terms included."""

    event: Event
    decisions: tuple[Decision, ...]
    name: str = ""
    """The client's name for the request that arrives."""


class LogHeader(msgspec.Struct, frozen=True, tag="kvroute-log", tag_field="log", kw_only=True):
    """The first line of a log: the data needed to build the same core again."""

    cluster: str
    """Text of the cluster file; without secrets if a live gateway writes the log."""
    spec: ControlSpec
    log_id: str = ""
    """Identifier that all parts of a log share; empty if the log has one part."""
    part: int = 1
    """Number of this file among the parts of the log, counted from 1; each part continues the one before it."""


def _plain(value: Any) -> Any:
    """Arrays as lists: JSON has no numeric arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot log a {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_RECORDS = msgspec.json.Decoder(LogRecord, dec_hook=lambda _type, value: np.asarray(value))
_HEADERS = msgspec.json.Decoder(LogHeader)


class EventLog:
    """Writes a log. Use it as a context manager to have the last line on disk when the run ends or fails.

    Raises InputError if the file cannot be opened for writing, OSError if a later write fails.
    """

    def __init__(self, path: Path, header: LogHeader, *, terms: TermsKept = "all", mode: int = 0o666) -> None:
        """
        Args:
            path: of the file.
            header: first line of the file.
            terms: which terms of a decision are kept.
            mode: permissions of a new file, before the process's umask is applied.
        """
        refuse_other_files(path)
        self._cuts = terms == "best"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            hint = "give a file in a folder that exists"
            raise InputError(f"cannot be written ({error.strerror})", where=str(path), hint=hint) from None
        self.nbytes = self._file.write(_ENCODER.encode(header) + b"\n")
        """Bytes written so far."""

    def write(self, event: Event, decisions: tuple[Decision, ...], name: str = "") -> int:
        """Append one record and return its size in bytes."""
        if self._cuts and decisions:
            decisions = tuple([trim_terms(decision) for decision in decisions])
        nbytes = self._file.write(_ENCODER.encode(LogRecord(event, decisions, name)) + b"\n")
        self.nbytes += nbytes
        return nbytes

    def is_at(self, path: Path) -> bool:
        """Whether the file still has this name and no other file has taken its place."""
        own = os.fstat(self._file.fileno())
        try:
            return os.path.samestat(own, path.stat())
        except FileNotFoundError:
            return False

    def flush(self) -> None:
        """Pass buffered records to the operating system, so that another process can read them."""
        self._file.flush()

    def close(self) -> None:
        """Write the rest of the buffer and close the file."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def trim_terms(decision: Decision) -> Decision:
    """Reduce a decision with over TERMS_ALL candidates to the terms of the TERMS_BEST cheapest and of the chosen one.
    Ties in cost are broken by position."""
    terms = decision.terms
    if terms is None or len(terms.names) <= TERMS_ALL:
        return decision
    order = np.where(terms.feasible, terms.cost, np.inf).argsort(kind="stable")[:TERMS_BEST].tolist()
    match decision:
        case Prefill(instance=chosen) | Decode(target=chosen) | CopyPrefix(target=chosen):
            order.append(terms.names.index(chosen))
        case Reject() | Convert():
            pass
    kept = sorted(set(order))
    return msgspec.structs.replace(
        decision,
        terms=Terms(
            tuple([terms.names[index] for index in kept]),
            terms.cost[kept],
            terms.feasible[kept],
            {name: values[kept] for name, values in terms.parts.items()},
            terms.unit,
            len(terms.names) - len(kept),
        ),
    )


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
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint=_LOG_MEND) from None
    if not line:
        raise InputError("the log is empty", where=str(path), hint=_LOG_MEND)
    try:
        return _HEADERS.decode(line)
    except msgspec.DecodeError as error:
        why = f" of this version ({error})" if is_log(line) else ""
        raise InputError(f"is not a kvroute log{why}", where=f"{path}:1", hint=_LOG_MEND) from None


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
            return _RECORDS.decode(line)
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
                raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint=_LOG_MEND) from None


def _check_part(line: bytes, path: Path, log_id: str, part: int) -> None:
    """Raises InputError if the file is now another one: the gateway renames the files of the log that it writes."""
    try:
        header = _HEADERS.decode(line)
    except msgspec.DecodeError:
        header = None
    if header is None or (header.log_id, header.part) != (log_id, part):
        what = f"is no longer part {part} of the log, because files were renamed while it was read"
        raise InputError(what, where=str(path), hint="read the log again")


def replay(control: Control, records: Iterable[LogRecord]) -> Iterator[tuple[LogRecord, tuple[Decision, ...]]]:
    """Feed the events of a log to a fresh core; yield each record with the decisions made now.

    Raises InputError if an event is not possible after those before it.
    """
    for record in records:
        yield record, control.handle(record.event)


def decisions_equal(recorded: tuple[Decision, ...], again: tuple[Decision, ...]) -> bool:
    """Whether decisions are equal bit for bit, including the terms that the record kept."""
    if any(decision.terms is not None and decision.terms.left_out for decision in recorded):
        again = tuple([trim_terms(decision) for decision in again])
    return _ENCODER.encode(recorded) == _ENCODER.encode(again)
