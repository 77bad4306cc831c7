"""The record of a run: each event with its decisions, one JSON line each; replayed, it gives the same again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, TypeAlias

import msgspec
import numpy as np

from kvroute.control.core import Control
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

    Raises InputError where the file cannot be opened for writing, OSError where it takes no more later.
    """

    def __init__(self, path: Path, header: LogHeader, *, terms: TermsKept = "all") -> None:
        """Args: `terms` says whose terms of a decision are kept."""
        _refuse_other_files(path)
        self._cuts = terms == "best"
        try:
            self._file: IO[bytes] = path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            mend = "give a file in a folder that exists"
            raise InputError(f"cannot be written ({error.strerror})", where=str(path), mend=mend) from None
        self._file.write(_ENCODER.encode(header) + b"\n")

    def write(self, event: Event, decisions: tuple[Decision, ...], name: str = "") -> int:
        """Append one record; how many bytes that was."""
        if self._cuts and decisions:
            decisions = tuple([cheapest(decision) for decision in decisions])
        return self._file.write(_ENCODER.encode(LogRecord(event, decisions, name)) + b"\n")

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


def check_place(path: Path) -> None:
    """Raises InputError where no log can be begun: no such folder, or something else is there already."""
    _refuse_other_files(path)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is a folder" if path.is_dir() else "no such folder" if not path.parent.is_dir() else "not allowed"
        raise InputError(f"cannot be written ({why})", where=str(path), mend="give a file in a folder that exists")


def set_aside(path: Path) -> Path | None:
    """Keep a log that stands where another one is to begin, under its name with `.1` at the end; one is kept.

    Returns:
        where it is now; None: there was none.

    Raises:
        InputError: what stands there, or at the other name, is no log, or cannot be renamed.
    """
    _refuse_other_files(path)
    if not path.exists():
        return None
    kept = path.with_name(f"{path.name}.1")
    _refuse_other_files(kept)
    try:
        path.replace(kept)
    except OSError as error:
        mend = "give a file in a folder that may be written"
        raise InputError(f"cannot be renamed to {kept.name} ({error.strerror})", where=str(path), mend=mend) from None
    return kept


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


def _refuse_other_files(path: Path) -> None:
    """A log may take the place of a log, never of a cluster file or a trace."""
    try:
        with path.open("rb") as old:
            start = old.read(64)
    except OSError:
        return  # not there, or what is wrong shows when it is opened for writing
    if start and not is_log(start):
        raise InputError("is there already and is no kvroute log", where=str(path), mend="give another file")


def is_log(start: bytes) -> bool:
    """Whether a file that begins like this is an event log."""
    return start.startswith(_HEADER_START)


def is_cut(path: Path) -> bool:
    """Whether the last line of a log has no end, so that `read_log` leaves it out; the file must not be empty."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_log(path: Path) -> tuple[LogHeader, Iterator[LogRecord]]:
    """The header and, one by one, the records of a log; a broken line is named by file and line number. A last line
    without its end is left out: somebody still writes it, or was killed over it."""
    try:
        octets = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), mend=_LOG_MEND) from None
    lines = octets.splitlines()
    if not lines:
        raise InputError("the log is empty", where=str(path), mend=_LOG_MEND)
    try:
        header = _HEADERS.decode(lines[0])
    except msgspec.DecodeError as error:
        why = f" of this version ({error})" if is_log(lines[0]) else ""
        raise InputError(f"is not a kvroute log{why}", where=f"{path}:1", mend=_LOG_MEND) from None
    return header, _records(path, lines[1:] if octets.endswith(b"\n") else lines[1:-1])


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


def same(recorded: tuple[Decision, ...], again: tuple[Decision, ...]) -> bool:
    """Whether decisions are equal bit for bit, terms included; those that the record has left out are not compared."""
    if any(decision.terms is not None and decision.terms.left_out for decision in recorded):
        again = tuple([cheapest(decision) for decision in again])
    return _ENCODER.encode(recorded) == _ENCODER.encode(again)
