"""Samples on a Prometheus text page, found by their names in its bytes; lines of other names are not read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

_SAMPLE = re.compile(rb'[ \t]*(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})?[ \t]*([^\s#{]+)')
"""Labels and value behind a name; what follows (a timestamp, an exemplar) is not read. Possessive, hence linear."""
_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\(.)")


def samples(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels as they stand and value of each sample of exactly this name."""
    line = b"\n" + name
    at = page.find(line)
    while at >= 0:
        at += len(line)
        if page[at : at + 1] in (b"{", b" ", b"\t"):
            match = _SAMPLE.match(page, at)
            if match is not None:
                value = _number(match[2])
                if math.isfinite(value):
                    yield match[1] or b"", value
        at = page.find(line, at)


def values(page: bytes, name: bytes) -> list[float]:
    return [value for _, value in samples(page, name)]


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@lru_cache(maxsize=4096)
def labels_of(text: bytes) -> Mapping[str, str]:
    """Cached, for pages come every second with the same labels."""
    return {name.decode(): _unescaped(value) for name, value in _LABEL.findall(text)}


def _unescaped(value: bytes) -> str:
    plain = _ESCAPE.sub(lambda match: b"\n" if match[1] == b"n" else match[1], value) if b"\\" in value else value
    return plain.decode(errors="replace")


def lines_between(page: bytes, *prefixes: bytes) -> bytes:
    """From the first to the last line that begins so, a line's end before each; `prefixes` have one, too."""
    start = min((at for at in map(page.find, prefixes) if at >= 0), default=-1)
    if start < 0:
        return b""
    end = page.find(b"\n", max(map(page.rfind, prefixes)) + 1)
    return page[start:] if end < 0 else page[start:end]
