"""Compares what a command prints with what a page prints: text exactly, numbers within a tolerance."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.pages.page_blocks import Output

_NUMBER = re.compile(r"(?<![\w.])[-+±]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_ELISION = "..."


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line of a page that a command prints differently. `line` counts from 1 in the page."""

    line: int
    page: str
    printed: str

    def __str__(self) -> str:
        return f"line {self.line}: the page has {self.page!r}, the command prints {self.printed!r}"


def difference(output: Output, printed: str, tolerance: float = 0.0) -> Difference | None:
    """Return the first difference, or None. In a page, `...` stands for any text in a line, or for any lines.

    Spaces count as one, because columns are as wide as their numbers. In JSON a page may leave out keys. `tolerance` is
    a share of the larger number, or of 10 if both are smaller; 0: the same digits."""
    if output.language == "json":
        return _json_difference(output, printed, tolerance)
    lines = [_folded(line) for line in printed.splitlines() if line.strip()]
    first, *others = _runs(output)
    position, found = _compared(first, lines, 0, tolerance)
    for index, run in enumerate(others, start=2):
        if found is None and index <= len(others):
            position, found = _searched(run, lines, position, tolerance)
        elif found is None:
            position, found = _compared(run, lines, max(position, len(lines) - len(run)), tolerance)
    if found is None and (not others or others[-1]) and position < len(lines):
        return Difference(output.line + len(output.lines), "nothing", lines[position])
    return found


_Run: TypeAlias = list[tuple[int, str]]
"""Lines of a page that follow each other, with their numbers."""


def _runs(output: Output) -> list[_Run]:
    """Return the lines before, between and after the lines `...`."""
    runs: list[_Run] = [[]]
    for number, line in enumerate(output.lines, start=output.line):
        if line.strip() == _ELISION:
            runs.append([])
        elif line.strip():
            runs[-1].append((number, _folded(line)))
    return runs


def _compared(run: _Run, lines: list[str], position: int, tolerance: float) -> tuple[int, Difference | None]:
    """Compare a run with the lines at `position`; return the position after the equal ones, and a difference."""
    for number, line in run:
        printed = lines[position] if position < len(lines) else "nothing"
        if not _same(line, printed, tolerance):
            return position, Difference(number, line, printed)
        position += 1
    return position, None


def _searched(run: _Run, lines: list[str], first: int, tolerance: float) -> tuple[int, Difference | None]:
    """Compare a run at the position from `first` on where most of its lines are equal."""
    tried = [_compared(run, lines, start, tolerance) for start in range(first, len(lines) + 1)]
    equal = [position - start for start, (position, _) in enumerate(tried, start=first)]
    return tried[equal.index(max(equal))]


def _folded(line: str) -> str:
    return re.sub(r"─+", "─", " ".join(line.split()))


def _same(expected: str, line: str, tolerance: float) -> bool:
    """Return whether a line has the text of the page between numbers, and numbers within the tolerance."""
    if _ELISION in expected:
        return bool(re.fullmatch(".*".join(re.escape(part) for part in expected.split(_ELISION)), line))
    if tolerance == 0.0 or expected == line:
        return expected == line
    here, there = _NUMBER.findall(expected), _NUMBER.findall(line)
    texts = _NUMBER.split(expected) == _NUMBER.split(line)
    return texts and all(
        _near(_value(first), _value(other), tolerance) for first, other in zip(here, there, strict=True)
    )


def _value(number: str) -> float:
    return float(number.replace(",", "").removeprefix("±"))


def _near(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 10.0)


def _json_difference(output: Output, printed: str, tolerance: float) -> Difference | None:
    try:
        found = json.loads(printed)
    except json.JSONDecodeError:
        return Difference(output.line, "a document of JSON", printed[:200])
    wrong = _first_wrong(json.loads("\n".join(output.lines)), found, tolerance, "")
    return Difference(output.line, *wrong) if wrong else None


def _first_wrong(expected: Any, found: Any, tolerance: float, place: str) -> tuple[str, str] | None:
    """Return the expected and the printed value at the first place where they differ, with its path."""
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = [(expected[key], found.get(key), f"{place}.{key}") for key in expected if key != _ELISION]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [
            (wanted_part, other, f"{place}[{index}]")
            for index, (wanted_part, other) in enumerate(zip(expected, found, strict=True))
        ]
    else:
        numbers = isinstance(expected, float | int) and isinstance(found, float | int)
        same = _near(expected, found, tolerance) if numbers else _same(str(expected), str(found), tolerance)
        return None if same else (f"{place} = {expected}", f"{found}")
    return next((wrong for pair, other, path in pairs if (wrong := _first_wrong(pair, other, tolerance, path))), None)
