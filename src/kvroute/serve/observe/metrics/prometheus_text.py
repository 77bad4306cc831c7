"""Samples on a Prometheus text page, found by their names in its bytes; lines of other names are not parsed.

A page may come from a broken or hostile engine, so the work per page is bounded and done in slices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

from kvroute.http.slices import Meter, Slices

SERIES_MAX = 4096
"""Maximum number of samples with the requested names on one page."""
LINE_BYTES_MAX = 2048
"""A longer line is skipped."""
VALUE_MAX = 1e18
"""A larger sample, or one that is not a number, is skipped."""
_SLICE_BYTES = 16 * 1024
_SKIP_BYTES = 32
"""Work, in bytes, counted for a line that is found but not parsed."""
_SAMPLE = re.compile(rb'[ \t]*(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})?[ \t]*([^\s#{]+)')
"""Labels and value after a name; a timestamp or exemplar is ignored. Possessive quantifiers keep it linear."""
_LABEL = re.compile(rb'(?<![A-Za-z0-9_])([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"')
"""Linear as well: a match starts only at the start of a word."""
_ESCAPE = re.compile(rb"\\(.)")
_BEHIND_NAME = (b"{", b" ", b"\t")


class PageError(ValueError):
    """A page with too many samples."""


class Budget(Meter):
    """Counts the work on one page, in bytes, and its samples."""

    __slots__ = ("_series",)

    def __init__(self, series_max: int = SERIES_MAX) -> None:
        super().__init__(_SLICE_BYTES)
        self._series = series_max

    def count(self) -> None:
        """Count one sample. Raises PageError if it exceeds the maximum."""
        self._series -= 1
        if self._series < 0:
            raise PageError("the page has too many series of transfers and load")


def samples(page: bytes, name: bytes, budget: Budget) -> Slices[list[tuple[bytes, float]]]:
    """Return undecoded labels and value of each sample of exactly this name; `page` starts with a line feed.

    Raises:
        PageError: there are more samples than the budget allows.
    """
    found = []
    line = b"\n" + name
    at = page.find(line)
    while at >= 0:
        at += len(line)
        read = page[at : at + 1] in _BEHIND_NAME
        if read:
            budget.count()
            end = page.find(b"\n", at, at + LINE_BYTES_MAX)
            if end < 0:
                end = len(page) if len(page) - at <= LINE_BYTES_MAX else at
            match = _SAMPLE.match(page, at, end)
            if match is not None and abs(value := _number(match[2])) <= VALUE_MAX:
                found.append((match[1] or b"", value))
        if budget.spend(end - at if read else _SKIP_BYTES):
            yield
        at = page.find(line, at)
    return found


def values(page: bytes, name: bytes, budget: Budget) -> Slices[list[float]]:
    """Return the values of all samples of exactly this name."""
    found = yield from samples(page, name, budget)
    return [value for _, value in found]


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@lru_cache(maxsize=4096)
def labels_of(text: bytes) -> Mapping[str, str]:
    """Decode labels; cached because every page, once per second, has the same labels."""
    return {name.decode(): _unescaped(value) for name, value in _LABEL.findall(text)}


def _unescaped(value: bytes) -> str:
    plain = _ESCAPE.sub(lambda match: b"\n" if match[1] == b"n" else match[1], value) if b"\\" in value else value
    return plain.decode(errors="replace")


def lines_between(page: bytes, *prefixes: bytes) -> bytes:
    """Return the part from the first to the last line with one of the prefixes. The result and each prefix start with a
    line feed."""
    start = min((at for at in map(page.find, prefixes) if at >= 0), default=-1)
    if start < 0:
        return b""
    end = page.find(b"\n", max(map(page.rfind, prefixes)) + 1)
    return page[start:] if end < 0 else page[start:end]
