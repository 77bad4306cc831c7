"""The event log of a live gateway: where its disk takes no more, the log ends and the requests go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvroute.control import EventLog, LogHeader, TermsKept, set_aside
from kvroute.gateway.logs import note
from kvroute.types import Decision, Event


class Recording:
    """Writes until it is closed or cannot; what is told it afterwards is dropped."""

    def __init__(self, path: Path, header: LogHeader, terms: TermsKept, on_lost: Callable[[], None]) -> None:
        """Begin a log; one that is there already is kept beside it.

        Args:
            path: of the log.
            header: its first line.
            terms: whose terms of a decision are kept.
            on_lost: called once, if the log cannot be written any more.

        Raises:
            InputError: it cannot be begun.
        """
        kept = set_aside(path)
        if kept is not None:
            note("info", "event_log_kept", file=str(kept))
        self._path, self._on_lost = path, on_lost
        self._log: EventLog | None = EventLog(path, header, terms=terms)

    @property
    def open(self) -> bool:
        """Whether it is being written."""
        return self._log is not None

    def write(self, event: Event, decisions: tuple[Decision, ...], name: str = "") -> int:
        """Append one record; how many bytes that was. `name` is what the client calls the request that arrives."""
        if self._log is None:
            return 0
        try:
            return self._log.write(event, decisions, name)
        except OSError as error:
            self._lose(error)
            return 0

    def flush(self) -> None:
        """Hand what has been written to the system, for somebody who reads along."""
        if self._log is not None:
            try:
                self._log.flush()
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

    def _lose(self, error: OSError) -> None:
        log, self._log = self._log, None
        assert log is not None
        with suppress(OSError):  # It closes the file all the same; what it has not written is what is lost.
            log.close()
        self._tell(error)

    def _tell(self, error: OSError) -> None:
        note("error", "event_log_lost", file=str(self._path), reason=error.strerror or str(error))
        self._on_lost()
