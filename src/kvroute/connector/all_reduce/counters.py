"""Counters of all-reduces by scheme, in Prometheus' text format for node_exporter's textfile collector."""

from __future__ import annotations

import atexit
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger("kvroute.connector")
_WRITE_S = 2.0
_HELP = (
    ("kvroute_all_reduces_total", "All-reduces by the scheme that was used."),
    ("kvroute_all_reduce_bytes_total", "Bytes of the tensors of all-reduces by the scheme that was used."),
    ("kvroute_all_reduce_fallbacks_total", "Changes from a scheme through the switch to a ring."),
)


@dataclass
class Counters:
    """All-reduces of one rank."""

    rank: int
    path: Path | None = None
    """File to which they are written, every few seconds and at the end of the process; None: no file."""
    calls: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    _written_s: float = 0.0

    def __post_init__(self) -> None:
        atexit.register(self.write)

    def add(self, scheme: str, nbytes: int) -> None:
        """Count an all-reduce."""
        self.calls[scheme] = self.calls.get(scheme, 0) + 1
        self.nbytes[scheme] = self.nbytes.get(scheme, 0) + nbytes
        if self.path is not None and time.monotonic() > self._written_s + _WRITE_S:
            self.write()

    def fell_back(self, scheme: str, done: str, why: str) -> None:
        """Count the first all-reduce that could not use its scheme, and log why."""
        if scheme in self.fallbacks:
            return
        self.fallbacks[scheme] = 1
        log.warning("rank %d: all-reduces use %s in place of %s from now on: %s", self.rank, done, scheme, why)
        self.write()

    def text(self) -> str:
        """Return the counters in Prometheus' text format."""
        lines = []
        for (name, what), counts in zip(_HELP, (self.calls, self.nbytes, self.fallbacks), strict=True):
            lines += [f"# HELP {name} {what}", f"# TYPE {name} counter"]
            lines += [f'{name}{{rank="{self.rank}",scheme="{each}"}} {counts[each]}' for each in sorted(counts)]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Write the file, whole or not at all."""
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
