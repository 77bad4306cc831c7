"""The event log of a live gateway: private, without secrets, in files of bounded size; a full disk costs no request."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvroute.control import EventLog, LogHashing, LogHeader, TermsKept, bytes_beside, remove_oldest, set_aside
from kvroute.gateway.logs import note
from kvroute.types import Decision, Event, InputError

MODE = 0o600
"""The log tells who asked how much of what, and when."""


@dataclass(frozen=True, slots=True)
class LogBounds:
    """How much an event log may take."""

    file_bytes: float
    """A file that is larger is set aside, and the log goes on in another one."""
    total_bytes: float
    """The limit for all files together, those of older logs included; the oldest are removed."""


class Recording:
    """Writes until it is closed or cannot; what is told it afterwards is dropped.

    Block hashes are keyed for each recording (`LogHashing`), and the key is kept nowhere else.
    """

    def __init__(
        self, path: Path, header: LogHeader, terms: TermsKept, bounds: LogBounds, on_lost: Callable[[], None]
    ) -> None:
        """Begin a log; one that is there already is kept beside it.

        Args:
            path: of the log.
            header: its first line, without secrets.
            terms: whose terms of a decision are kept.
            bounds: how much it may take.
            on_lost: called once, if the log cannot be written any more.

        Raises:
            InputError: it cannot be begun.
        """
        self._path, self._terms, self._bounds, self._on_lost = path, terms, bounds, on_lost
        self._hashing = LogHashing()
        self._header = msgspec.structs.replace(header, log_id=secrets.token_hex(8), part=1)
        self._beside_bytes = 0
        """What the files beside the current one take."""
        self._log: EventLog | None = self._begun()

    @property
    def open(self) -> bool:
        """Whether it is being written."""
        return self._log is not None

    def write(self, event: Event, decisions: tuple[Decision, ...], name: str = "") -> int:
        """Append one record; how many bytes that was. `name` is what the client calls the request that arrives."""
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
        """Hand what has been written to the system, for somebody who reads along, and keep within the bounds."""
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
        """The last line is on its way to the disk."""
        log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except OSError as error:
                self._tell(error)

    def _begun(self) -> EventLog:
        """The file for the next part, in place of what stands there."""
        kept = set_aside(self._path)
        if kept is not None:
            note("info", "event_log_kept", file=str(kept))
        log = EventLog(self._path, self._header, terms=self._terms, mode=MODE)
        self._beside_bytes = bytes_beside(self._path)
        return log

    def _next_part(self, log: EventLog) -> None:
        """Go on in another file; a log whose place another one has taken, at a reload, stays in the one that it has:
        nothing arrives there any more."""
        if log.is_at(self._path):
            log.close()
            self._header = msgspec.structs.replace(self._header, part=self._header.part + 1)
            self._log = self._begun()

    def _remove_oldest(self) -> None:
        for file in remove_oldest(self._path, self._bounds.total_bytes):
            note("info", "event_log_removed", file=str(file))
        self._beside_bytes = bytes_beside(self._path)

    def _lose(self, error: OSError | InputError) -> None:
        log, self._log = self._log, None
        if log is not None:
            with suppress(OSError):  # It closes the file all the same; what it has not written is what is lost.
                log.close()
        self._tell(error)

    def _tell(self, error: OSError | InputError) -> None:
        reason = str(error) if isinstance(error, InputError) else error.strerror or str(error)
        note("error", "event_log_lost", file=str(self._path), reason=reason)
        self._on_lost()
