"""Shared by the fuzzing targets: a function that splits an input into pieces, and a count of the work that an input
causes."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def pieces(data: bytes) -> Iterator[bytes]:
    """Split `data` into up to 16 pieces, always the same ones; short data is sometimes split into bytes."""
    draw = random.Random(zlib.crc32(data))
    if len(data) <= 256 and draw.random() < 0.25:
        edges = list(range(len(data) + 1))
    else:
        edges = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(draw.randrange(16)))})
    for start, end in pairwise(edges):
        yield data[start:end]


def bounded(work: Callable[[], T], most: float) -> T:
    """Return the result of `work`, which may make at most this number of function calls.

    The count detects work that grows faster than its input, on any machine. It does not cover regular expressions; the
    fuzzer's own time limit does.
    """
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(None)
        assert calls <= most, f"{calls} calls, and {most:g} are allowed"
