"""The record of a run: each event with its decisions, one JSON line each; replayed, it gives the same again."""

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
"""Of up to 64 candidates `best` keeps all terms, of more those of the 16 cheapest and of the chosen one."""
_BUFFER_BYTES = 1 << 18
_LOG_MEND = "give a file that `kvroute serve --log` or `kvroute simulate --log` wrote"


class LogRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event and its decisions, terms included."""

    event: Event
    decisions: tuple[Decision, ...]
    name: str = ""
    """What the client calls the request that arrives."""


class LogHeader(msgspec.Struct, frozen=True, tag="kvroute-log", tag_field="log", kw_only=True):
    """The first line of a log: what is needed to build the same core again."""

    cluster: str
    """The cluster file's text; of a live gateway without secrets."""
    spec: ControlSpec
    log_id: str = ""
    """The same in all parts of a log; empty where it has one part."""
    part: int = 1
    """Which part of the log this file is, counted from 1: it goes on where the one before ends."""


def _plain(value: Any) -> Any:
    """Arrays as lists: JSON has no arrays of numbers of its own."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot log a {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_RECORDS = msgspec.json.Decoder(LogRecord, dec_hook=lambda _type, value: np.asarray(value))
_HEADERS = msgspec.json.Decoder(LogHeader)


class EventLog:
    """Writes a log; use it as a context manager, so that the last line is on disk when the run ends or fails.

    Raises InputError where the file cannot be opened for writing, OSError where it takes no more later.
    """

    def __init__(self, path: Path, header: LogHeader, *, terms: TermsKept = "all", mode: int = 0o666) -> None:
        """
        Args:
            path: of the file.
            header: its first line.
            terms: says whose terms of a decision are kept.
            mode: permissions of a file that is made, less the process's umask.
        """
        refuse_other_files(path)
        self._cuts = terms == "best"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            mend = "give a file in a folder that exists"
            raise InputError(f"cannot be written ({error.strerror})", where=str(path), mend=mend) from None
        self.nbytes = self._file.write(_ENCODER.encode(header) + b"\n")
        """Written so far."""

    def write(self, event: Event, decisions: tuple[Decision, ...], name: str = "") -> int:
        """Append one record; how many bytes that was."""
        if self._cuts and decisions:
            decisions = tuple([cheapest(decision) for decision in decisions])
        nbytes = self._file.write(_ENCODER.encode(LogRecord(event, decisions, name)) + b"\n")
        self.nbytes += nbytes
        return nbytes

    def is_at(self, path: Path) -> bool:
        """Whether the file has this name still, and no other one has taken its place."""
        own = os.fstat(self._file.fileno())
        try:
            return os.path.samestat(own, path.stat())
        except FileNotFoundError:
            return False

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


def cheapest(decision: Decision) -> Decision:
    """The same with the terms of TERMS_BEST candidates and the chosen one, where there are more than TERMS_ALL; of
    equal cost the first by place."""
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


def is_cut(path: Path) -> bool:
    """Whether the last line of a log has no end, so that `read_log` leaves it out; the file must not be empty."""
    with parts_of(path)[-1].open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_header(path: Path) -> LogHeader:
    """The first line of one file of a log. Raises InputError where it cannot be read or is no log."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), mend=_LOG_MEND) from None
    if not line:
        raise InputError("the log is empty", where=str(path), mend=_LOG_MEND)
    try:
        return _HEADERS.decode(line)
    except msgspec.DecodeError as error:
        why = f" of this version ({error})" if is_log(line) else ""
        raise InputError(f"is not a kvroute log{why}", where=f"{path}:1", mend=_LOG_MEND) from None


def parts_of(path: Path) -> list[Path]:
    """All files of the log that this file is a part of, in order, as far as they are there.

    Raises:
        InputError: it cannot be read or is no log, or a part between two others is missing.
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
            mend = f"put it back beside {path.name}"
            raise InputError(f"part {number} of this log is missing", where=str(path), mend=mend)
    return [parts[number] for number in sorted(parts)]


def read_log(path: Path) -> tuple[LogHeader, Records]:
    """The header and, one by one, the records of a log, whichever of its parts is given; a broken line is named by file
    and line number. A last line without its end is left out: the log is still written, or its writer was killed.

    Where the beginning of the log was removed, the header is that of the first part that is there (`header.part`).
    """
    files = parts_of(path)
    header = read_header(files[0])
    return header, Records(files, header)


def check_whole(path: Path, header: LogHeader) -> None:
    """Raises InputError where the log lacks its beginning, so that it cannot be replayed."""
    if header.part > 1:
        what = f"the log begins with its part {header.part}, and a replay starts from the first"
        mend = "raise gateway.log.total_size to keep more, or reload the gateway to begin another log"
        raise InputError(what, where=str(path), mend=mend)


class Records:
    """The records of a log, read one by one; `place` tells where the last one stands."""

    def __init__(self, files: Sequence[Path], header: LogHeader) -> None:
        """Args: the parts in order, and the first one's header."""
        self.place = (files[0], 1)
        """File and line."""
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
            raise InputError(what, where=f"{file}:{number}", mend="record the run again") from None

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
                raise InputError(f"cannot be read ({error.strerror})", where=str(path), mend=_LOG_MEND) from None


def _check_part(line: bytes, path: Path, log_id: str, part: int) -> None:
    """Raises InputError where a file is another one by now: the gateway that writes a log renames its files."""
    try:
        header = _HEADERS.decode(line)
    except msgspec.DecodeError:
        header = None
    if header is None or (header.log_id, header.part) != (log_id, part):
        what = f"is no longer part {part} of the log, because files were renamed while it was read"
        raise InputError(what, where=str(path), mend="read the log again")


def replay(control: Control, records: Iterable[LogRecord]) -> Iterator[tuple[LogRecord, tuple[Decision, ...]]]:
    """Feed a log's events to a fresh core; yields each record with the decisions made now.

    Raises InputError where an event cannot follow those before it.
    """
    for record in records:
        yield record, control.handle(record.event)


def same(recorded: tuple[Decision, ...], again: tuple[Decision, ...]) -> bool:
    """Whether decisions are equal bit for bit, terms included; those that the record has left out are not compared."""
    if any(decision.terms is not None and decision.terms.left_out for decision in recorded):
        again = tuple([cheapest(decision) for decision in again])
    return _ENCODER.encode(recorded) == _ENCODER.encode(again)
