"""Options with a unit, such as `2s`, `6/s` or `32K`; a plain number is in seconds, requests per second or tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import typer

from kvroute.types import InputError

DURATION, RATE, TOKENS, SIZE = "<duration>", "<rate>", "<tokens>", "<size>"
"""Placeholders of the options' values in the help."""
TPOT_MAX_S = 10.0
"""Largest SLO of a token in seconds: a larger number is one in milliseconds without its unit."""
_RATE = re.compile(r"\s*([^\s/]+)\s*(?:/\s*(s|min|h))?\s*", re.ASCII)
_TOKENS = re.compile(r"\s*(\d{1,15})\s*([KkMm]?)\s*", re.ASCII)
_PER_S = {"s": 1.0, "min": 60.0, "h": 3600.0, None: 1.0}
_FACTORS = {"": 1, "k": 1024, "m": 1024**2}


def listed(texts: Iterable[str] | None) -> list[str]:
    """Return the items of an option that may be repeated, and whose value may have several, separated by commas."""
    return [stripped for text in texts or () for item in text.split(",") if (stripped := item.strip())]


def seconds(least: float = 0.0, most: float = 1e15) -> Callable[[Any], float]:
    """Return a parser of durations from `least` to `most` seconds."""
    write = "write a number of seconds, or a number and ns, us, ms, s, min or h, such as 2s or 500ms"

    def parse(text: Any) -> float:
        number = _number(text)
        plain = number is not None
        if number is None:
            from kvroute_engine.files.units import duration_s

            try:
                number = duration_s(str(text))
            except InputError:
                raise _wrong(text, "a duration", write) from None
        if not least <= number <= most:
            from kvroute_engine.files.units import about_duration

            if number < least:
                raise _wrong(text, f"{about_duration(least)} or more", write)
            likely = f"did you mean {number:g}ms? {write}" if plain and number / 1e3 <= most else write
            raise _wrong(text, f"at most {about_duration(most)}", likely)
        return number

    return parse


def per_second(least: float = 1e-9, most: float = 1e9) -> Callable[[Any], float]:
    """Return a parser of request rates from `least` to `most` per second."""
    write = "write requests per second, or with a unit, such as 6/s or 90/min"

    def parse(text: Any) -> float:
        match = _RATE.fullmatch(str(text))
        number = _number(match[1]) if match else None
        if match is None or number is None:
            raise _wrong(text, "a rate", write)
        rate_per_s = number / _PER_S[match[2]]
        if not least <= rate_per_s <= most:
            raise _wrong(text, "above 0" if number <= 0 else f"between {least:,g} and {most:,.0f} per second", write)
        return rate_per_s

    return parse


def token_count(least: int = 1, most: int = 10**9) -> Callable[[Any], int]:
    """Return a parser of token counts from `least` to `most`; K is 1,024."""
    write = "write a whole number, or thousands such as 32K (K is 1,024)"

    def parse(text: Any) -> int:
        match = _TOKENS.fullmatch(str(text))
        if match is None:
            raise _wrong(text, "a number of tokens", write)
        count = int(match[1]) * _FACTORS[match[2].lower()]
        if not least <= count <= most:
            raise _wrong(text, f"between {least:,} and {most:,} tokens", write)
        return count

    return parse


def byte_count(least: int = 0) -> Callable[[Any], int]:
    """Return a parser of sizes of at least `least` bytes."""
    write = "write a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 64GB"

    def parse(text: Any) -> int:
        from kvroute_engine.files.units import size_bytes

        try:
            nbytes = int(text) if isinstance(text, int) else int(size_bytes(str(text)))
        except InputError:
            raise _wrong(text, "a size", write) from None
        if nbytes < least:
            raise _wrong(text, f"{least} bytes or more", write)
        return nbytes

    return parse


def _number(text: Any) -> float | None:
    """Parse a plain number; None if it is not a number or not finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _wrong(text: Any, what: str, write: str) -> Exception:
    return typer.BadParameter(f"{str(text)[:40]!r} is not {what}; {write}")
