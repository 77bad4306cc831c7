"""What the leader of a group wants the group to use: the scheduler's entry for it, and the return to the switch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path

from kvroute_engine.agent.files import TABLE, TableFile, read_file
from kvroute_engine.all_reduce.rules import GroupRules, LiveScheme, prepared_rules

log = logging.getLogger("kvroute.connector")
_HOLD_TIMES = 32
"""Factor between the least and the longest time before a return."""


@dataclass
class TableSource:
    """Reads the table of the server's agent. The last table stays in use, however old it is."""

    folder: Path
    group: str
    settings: GroupRules
    """Rules until there is a table, and without an entry for the group."""
    prepared: Set[LiveScheme]
    received_unix_s: float | None = None
    """Time at which the agent has last heard that the table is current; None: there was no table yet."""
    _rules: GroupRules | None = None
    _table_version: int = -1
    _entry_version: int = 0
    _stamp: tuple[int, int] | None = None
    _warned: set[str] = field(default_factory=set)

    def poll(self) -> GroupRules:
        """Return the rules of the newest table. The file is read only if it has changed."""
        path = self.folder / TABLE
        try:
            found = path.stat()
        except OSError:
            return self._rules or self.settings
        stamp = found.st_mtime_ns, found.st_ino
        if stamp != self._stamp and (table := read_file(path, TableFile)) is not None:
            self._stamp = stamp
            self._take(table)
        return self._rules or self.settings

    def _take(self, table: TableFile) -> None:
        """Take a table; older versions than before are ignored."""
        if table.version < self._table_version:
            return
        self._table_version, self.received_unix_s = table.version, table.received_unix_s
        entry = table.groups.get(self.group)
        if entry is None:
            self._rules = None
        elif entry.version > self._entry_version or (self._rules is None and entry.version == self._entry_version):
            self._entry_version = entry.version
            rules, replaced = prepared_rules(entry.rules, self.prepared)
            self._rules = GroupRules(rules, entry.version)
            for scheme in sorted(replaced - self._warned):
                what = "the table names %s for group %s, which has not prepared it: it uses ring; add it to `also`"
                log.warning(what, scheme, self.group)
            self._warned |= replaced


@dataclass
class SwitchReturn:
    """When a group that has given up the switch returns to it: after a while, if the switch answers."""

    rejoin_s: float
    """Least time before a return; it doubles if the next generation fails soon, too."""
    is_answering: Callable[[], bool]
    """Whether the switch answers now."""
    generation: int = 0
    """Number of returns."""
    _hold_s: float = 0.0
    _began_s: float | None = None
    _failed_s: float | None = None

    def update(self, failed_generation: int, wanted: bool, now_s: float | None = None) -> int:
        """Return the generation that the group should use.

        Args:
            failed_generation: last generation in which the group has given up the switch; -1: none.
            wanted: whether the rules name a scheme through the switch.
            now_s: the time on any clock.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if failed_generation < self.generation:
            return self.generation
        if self._failed_s is None:
            soon = self._began_s is not None and now_s - self._began_s < _HOLD_TIMES * self.rejoin_s
            self._hold_s = min(2 * self._hold_s, _HOLD_TIMES * self.rejoin_s) if soon else self.rejoin_s
            self._failed_s = now_s
        if wanted and now_s >= self._failed_s + self._hold_s and self.is_answering():
            self.generation += 1
            self._began_s, self._failed_s = now_s, None
        return self.generation
