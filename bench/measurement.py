"""Results of a bench and their measurement: fresh processes, medians, one table. A missed target is no failure."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CHILD_S = 1_800


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measure: our figure, the peer's figure of the same run or the reason for its absence, and our target."""

    measure: str
    unit: str
    better: Literal["higher", "lower"]
    ours: float | None
    """Our figure; None if it was not measured, with the reason in `note`."""
    peer: float | None = None
    peer_name: str = ""
    target: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """True if our figure reaches the target; None if the figure or the target is missing."""
        if self.ours is None or self.target is None:
            return None
        return self.ours >= self.target if self.better == "higher" else self.ours <= self.target

    @property
    def ratio(self) -> float | None:
        """Our figure relative to the peer's, as a factor; below 1 the peer is better."""
        if self.ours is None or self.peer is None or not self.ours or not self.peer:
            return None
        return self.ours / self.peer if self.better == "higher" else self.peer / self.ours


class Failed(Exception):
    """A child process ended without a figure; the message is the reason in one line."""


def fresh(module: str, *arguments: object, python: str = sys.executable, env: Mapping[str, str] | None = None) -> Any:
    """Run `python -m module arguments` in a separate process; return the JSON document in its last line.

    Raises:
        Failed: the process could not start, ended with an error, took too long or printed no JSON.
    """
    command = [python, "-m", module, *map(str, arguments)]
    try:
        child = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=CHILD_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{module}: {error}") from error
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        errors = child.stderr.strip().splitlines() or ["no output"]
        raise Failed(f"{module} ended with {child.returncode}: {errors[-1]}")
    try:
        return json.loads(lines[-1])
    except ValueError as error:
        raise Failed(f"{module} printed no JSON: {lines[-1][:80]}") from error


def process_figures() -> dict[str, float]:
    """Return CPU seconds (user and system) and peak RSS in MB (1e6 bytes) of this process, including imports."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return {"process_cpu_s": usage.ru_utime + usage.ru_stime, "rss_mb": usage.ru_maxrss * unit_bytes / 1e6}


def median(figures: Sequence[Mapping[str, float]], field: str) -> float | None:
    """Return the median of one field over repeats; None without repeats."""
    return statistics.median(figure[field] for figure in figures) if figures else None


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for people."""
    drawn = Table("measure", "unit", show_lines=False)
    for heading in ("ours", "peer or bound", "ratio", "target"):
        drawn.add_column(heading, justify="right")
    drawn.add_column("met")
    for row in rows:
        drawn.add_row(
            row.measure,
            row.unit,
            number(row.ours),
            f"{number(row.peer)} {row.peer_name}".strip() if row.peer is not None else row.peer_name or "-",
            "-" if row.ratio is None else f"{row.ratio:.2f}x",
            "-" if row.target is None else ("≥ " if row.better == "higher" else "≤ ") + number(row.target),
            {True: "yes", False: "no", None: "-"}[row.met],
        )
    return drawn


def show(rows: Sequence[Row], as_json: bool, texts: Mapping[str, str] | None = None) -> None:
    """Print the rows as one JSON document or as a table, then remarks and the output of benches without rows."""
    if as_json:
        entries = [{**msgspec.to_builtins(row), "ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps({"rows": entries, "texts": dict(texts or {})}, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(rows))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(f"- {note}", highlight=False, markup=False)
    for name, text in (texts or {}).items():
        console.print(f"\n{name}\n{text}", highlight=False, markup=False)


def number(value: float | None) -> str:
    """Return a figure with three digits, or all before the point."""
    if value is None:
        return "not available"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
