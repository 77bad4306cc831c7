"""What the fuzzing targets share: one way to cut an input into pieces, and a count of the work that an input causes."""

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
    """`data` in up to 16 pieces, the same ones each time; short data byte by byte now and then."""
    draw = random.Random(zlib.crc32(data))
    if len(data) <= 256 and draw.random() < 0.25:
        edges = list(range(len(data) + 1))
    else:
        edges = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(draw.randrange(16)))})
    for start, end in pairwise(edges):
        yield data[start:end]


def bounded(work: Callable[[], T], most: float) -> T:
    """The result of `work`, which may make so many calls of functions at most.

    A count tells what grows faster than its input, on any machine. It does not see into regular expressions: the
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
