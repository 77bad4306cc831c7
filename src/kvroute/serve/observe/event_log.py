"""The event log of a live gateway: private, without secrets, in files of bounded size; a full disk fails no request."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvroute.control import LogHashing, LogHeader, TermsKept
from kvroute.control.log import EventLog, bytes_beside, remove_oldest, rotate
from kvroute.serve.observe.logs import log_event
from kvroute.types import Decision, Event, InputError

MODE = 0o600
"""Only the owner may read the log: it shows which client requested what, how much and when."""


@dataclass(frozen=True, slots=True)
class LogBounds:
    """Maximum sizes of an event log."""

    file_bytes: float
    """A larger file is renamed, and the log continues in a new one."""
    total_bytes: float
    """Limit for all files together, including those of older logs; the oldest are removed."""


class EventLogWriter:
    """Writes events until it is closed or an error occurs; later events are dropped.

    Block hashes are keyed for each recording (`LogHashing`), and the key is stored nowhere else.
    """

    def __init__(
        self, path: Path, header: LogHeader, terms: TermsKept, bounds: LogBounds, on_lost: Callable[[], None]
    ) -> None:
        """Create a log; an existing file is renamed and kept.

        Args:
            path: path of the log.
            header: its first line, without secrets.
            terms: which candidates' terms of a decision are kept.
            bounds: its maximum sizes.
            on_lost: called once, when the log cannot be written any more.

        Raises:
            InputError: the log cannot be created.
        """
        self._path, self._terms, self._bounds, self._on_lost = path, terms, bounds, on_lost
        self._hashing = LogHashing()
        self._header = msgspec.structs.replace(header, log_id=secrets.token_hex(8), part=1)
        self._beside_bytes = 0
        """Size of the files beside the current one."""
        self._log: EventLog | None = self._begun()

    @property
    def open(self) -> bool:
        """Whether the log is being written."""
        return self._log is not None

    def write(self, event: Event, decisions: tuple[Decision, ...], name: str = "") -> int:
        """Append one record and return its size in bytes. `name` is the client's id of an arriving request."""
        log = self._log
        if log is None:
            return 0
        try:
            nbytes = log.write(self._hashing.event(event), self._hashing.decisions(decisions), name)
            if log.nbytes >= self._bounds.file_bytes:
                self._next_part(log)
            return nbytes
        except (OSError, InputError) as error:
            self._lose(error)
            return 0

    def flush(self) -> None:
        """Flush to the operating system, for readers of the growing file, and enforce the bounds."""
        log = self._log
        if log is None:
            return
        try:
            log.flush()
            if self._beside_bytes + log.nbytes > self._bounds.total_bytes and log.is_at(self._path):
                self._remove_oldest()
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Write the last lines and close the file."""
        log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except OSError as error:
                self._tell(error)

    def _begun(self) -> EventLog:
        """Return the file for the next part; an existing file is renamed."""
        kept = rotate(self._path)
        if kept is not None:
            log_event("info", "event_log_kept", file=str(kept))
        log = EventLog(self._path, self._header, terms=self._terms, mode=MODE)
        self._beside_bytes = bytes_beside(self._path)
        return log

    def _next_part(self, log: EventLog) -> None:
        """Continue in another file. If a reload has replaced this log at its path, it stays in its file: it gets no
        more events."""
        if log.is_at(self._path):
            log.close()
            self._header = msgspec.structs.replace(self._header, part=self._header.part + 1)
            self._log = self._begun()

    def _remove_oldest(self) -> None:
        for file in remove_oldest(self._path, self._bounds.total_bytes):
            log_event("info", "event_log_removed", file=str(file))
        self._beside_bytes = bytes_beside(self._path)

    def _lose(self, error: OSError | InputError) -> None:
        log, self._log = self._log, None
        if log is not None:
            with suppress(OSError):  # the file is closed in any case; unwritten records are lost
                log.close()
        self._tell(error)

    def _tell(self, error: OSError | InputError) -> None:
        reason = str(error) if isinstance(error, InputError) else error.strerror or str(error)
        log_event("error", "event_log_lost", file=str(self._path), reason=reason)
        self._on_lost()
