"""Counters of all-reduces by scheme, in Prometheus' text format for node_exporter's textfile collector, and as traffic
of a group for the server's agent."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvroute_engine.agent.files import GroupTraffic, size_exponent
from kvroute_engine.all_reduce.rules import LiveScheme

log = logging.getLogger("kvroute.connector")
_WRITE_S = 2.0
_HELP = (
    ("kvroute_all_reduces_total", "All-reduces by the scheme that was used."),
    ("kvroute_all_reduce_bytes_total", "Bytes of the tensors of all-reduces by the scheme that was used."),
    ("kvroute_all_reduce_fallbacks_total", "Changes from a scheme through the switch to a ring."),
)
_VERSION = (
    "kvroute_all_reduce_table_version",
    "Version of the group's entry in the scheduler's table that is in use; 0: the rules of the settings.",
)
_AGE = (
    "kvroute_all_reduce_table_age_seconds",
    "Time since the server's agent last heard from the scheduler that the table is current.",
)


@dataclass
class AllReduceCounters:
    """All-reduces of one rank."""

    rank: int
    path: Path | None = None
    """File to which they are written, every few seconds and at the end of the process; None: no file."""
    fallbacks: dict[LiveScheme, int] = field(default_factory=dict)
    table_version: int | None = None
    """Version of the table's entry that is in use; None: the group has no table."""
    received_unix_s: float | None = None
    """Time at which the agent has last heard that the table is current; None: unknown on this rank."""
    _by_size: dict[tuple[LiveScheme, int], tuple[int, int]] = field(default_factory=dict)
    """All-reduces and bytes by scheme and exponent of the size."""
    _generations: dict[LiveScheme, int] = field(default_factory=dict)
    """Generation of the last fallback of each scheme."""
    _written_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        atexit.register(self.write)

    def add(self, scheme: LiveScheme, nbytes: int) -> None:
        """Count an all-reduce."""
        key = scheme, size_exponent(nbytes)
        calls, total = self._by_size.get(key, (0, 0))
        self._by_size[key] = calls + 1, total + nbytes
        self.write_if_due()

    def fell_back(self, scheme: LiveScheme, done: LiveScheme, why: str, generation: int = 0) -> bool:
        """Count and log an all-reduce that could not use its scheme; return False if it was not the first one of its
        generation."""
        if self._generations.get(scheme, -1) >= generation:
            return False
        self._generations[scheme] = generation
        self.fallbacks[scheme] = self.fallbacks.get(scheme, 0) + 1
        log.warning("rank %d: all-reduces use %s in place of %s from now on: %s", self.rank, done, scheme, why)
        self.write()
        return True

    @property
    def calls(self) -> dict[LiveScheme, int]:
        """All-reduces by scheme."""
        return self._summed(0)

    @property
    def nbytes(self) -> dict[LiveScheme, int]:
        """Bytes of their tensors by scheme."""
        return self._summed(1)

    def _summed(self, place: int) -> dict[LiveScheme, int]:
        found: dict[LiveScheme, int] = {}
        for (scheme, _), counts in self._by_size.copy().items():
            found[scheme] = found.get(scheme, 0) + counts[place]
        return found

    def traffic(self, group: str, incarnation: int) -> GroupTraffic:
        """Return the all-reduces of a group since its rank 0 has started, and the table's version in use."""
        traffic = GroupTraffic(group, incarnation, self.table_version or 0, {}, {})
        for (scheme, exponent), (calls, nbytes) in sorted(self._by_size.copy().items()):
            traffic.calls.setdefault(scheme, {})[exponent] = calls
            traffic.nbytes.setdefault(scheme, {})[exponent] = nbytes
        return traffic

    def text(self) -> str:
        """Return the counters in Prometheus' text format."""
        lines = []
        for (name, what), counts in zip(_HELP, (self.calls, self.nbytes, dict(self.fallbacks)), strict=True):
            lines += [f"# HELP {name} {what}", f"# TYPE {name} counter"]
            lines += [f'{name}{{rank="{self.rank}",scheme="{scheme}"}} {counts[scheme]}' for scheme in sorted(counts)]
        for (name, what), value in self._gauges().items():
            lines += [f"# HELP {name} {what}", f"# TYPE {name} gauge", f'{name}{{rank="{self.rank}"}} {value}']
        return "\n".join(lines) + "\n"

    def _gauges(self) -> Mapping[tuple[str, str], str]:
        found = {} if self.table_version is None else {_VERSION: str(self.table_version)}
        received_unix_s = self.received_unix_s
        if received_unix_s is not None:
            found[_AGE] = f"{max(time.time() - received_unix_s, 0.0):.3f}"
        return found

    def write_if_due(self) -> None:
        """Write the file if it is some seconds old."""
        if self.path is not None and time.monotonic() > self._written_s + _WRITE_S:
            self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        with self._lock:
            if self.path is None:
                return
            self._written_s = time.monotonic()
            part = self.path.with_suffix(f".{os.getpid()}.part")
            try:
                part.write_text(self.text(), encoding="ascii")
                part.replace(self.path)
            except OSError as error:
                log.warning("the counters of all-reduces cannot be written to %s: %s", self.path, error.strerror)
                self.path = None
