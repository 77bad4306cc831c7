"""The table that an agent holds: the file for the ranks, and its age."""

from __future__ import annotations

from pathlib import Path

from kvroute_engine.agent.files import TABLE, TableFile, read_file, replace_file
from kvroute_engine.agent.reports import AgentTable

_WRITE_S = 1.0
"""Least time between two writes that only refresh the age."""


class HeldTable:
    """The last table of the scheduler. It stays in its file when scheduler and agent are away."""

    def __init__(self, folder: Path) -> None:
        """Begin with the table in the folder, if there is one."""
        self._path = folder / TABLE
        self._table = read_file(self._path, TableFile)
        self._written_unix_s = self._table.received_unix_s if self._table is not None else 0.0

    @property
    def version(self) -> int:
        """Version of the table; 0: there is none."""
        return self._table.version if self._table is not None else 0

    def age_s(self, now_unix_s: float) -> float | None:
        """Return the time since the scheduler last said that the table is current; None without a table."""
        return None if self._table is None else max(now_unix_s - self._table.received_unix_s, 0.0)

    def receive(self, table: AgentTable, now_unix_s: float) -> None:
        """Take a table and write it.

        Raises:
            OSError: the file cannot be written.
        """
        self._table = TableFile(table.version, now_unix_s, table.groups)
        self._write(now_unix_s)

    def heartbeat(self, version: int, now_unix_s: float) -> None:
        """Take a heartbeat; it refreshes the age if it is that of the table.

        Raises:
            OSError: the file cannot be written.
        """
        if self._table is None or self._table.version != version:
            return
        self._table = TableFile(version, now_unix_s, self._table.groups)
        if abs(now_unix_s - self._written_unix_s) >= _WRITE_S:
            self._write(now_unix_s)

    def _write(self, now_unix_s: float) -> None:
        assert self._table is not None
        replace_file(self._path, self._table)
        self._written_unix_s = now_unix_s
