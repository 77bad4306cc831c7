"""Writes one file of an event log."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import IO

from kvroute.control.log.entries import LogHeader, LogRecord, TermsKept, encode, trim_terms
from kvroute.control.log.files import refuse_other_files
from kvroute.types import Decision, Event, InputError

_BUFFER_BYTES = 1 << 18


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
        self.nbytes = self._file.write(encode(header) + b"\n")
        """Bytes written so far."""

    def write(self, event: Event, decisions: tuple[Decision, ...], name: str = "") -> int:
        """Append one record and return its size in bytes."""
        if self._cuts and decisions:
            decisions = tuple([trim_terms(decision) for decision in decisions])
        nbytes = self._file.write(encode(LogRecord(event, decisions, name)) + b"\n")
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
