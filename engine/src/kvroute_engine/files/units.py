"""Converts text such as "100 Gbps", "3 us" or "160 GiB" to bytes and seconds and back; rejects numbers without a
unit."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, ClassVar, TypeVar

from kvroute_engine.errors import InputError

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(\S*)\s*", re.ASCII)
_LONGEST_TEXT = 60
_LONGEST_NUMBER = 30
"""Maximum length of a number; longer ones are written with an exponent."""

_DECIMAL = {"": 0, "K": 3, "M": 6, "G": 9, "T": 12}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
_BITS = {f"{prefix}bps": Decimal(10) ** power / 8 for prefix, power in _DECIMAL.items()}
_BYTES = {f"{prefix}B": Decimal(10) ** power for prefix, power in _DECIMAL.items()}
_BINARY_BYTES = {f"{prefix}B": Decimal(2) ** power for prefix, power in _BINARY.items()}
_BYTE_RATES = {f"{unit}/s": factor for unit, factor in (_BYTES | _BINARY_BYTES).items()}
_BIT_ALIASES = {f"{p}{bit}": _BITS[f"{p}bps"] for p in _DECIMAL for bit in ("bit/s", "b/s")}
_KILO_ALIASES = {"kbps": _BITS["Kbps"], "kbit/s": _BITS["Kbps"], "kB/s": _BYTE_RATES["KB/s"]}
_SECONDS = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")}


class Quantity(float):
    """A number in SI units that is text in a file; the subclass defines the accepted units and range."""

    __slots__ = ()
    noun: ClassVar[str]
    example: ClassVar[str]
    units: ClassVar[dict[str, Decimal]]
    accepted: ClassVar[str]
    least: ClassVar[float] = 0.0
    most: ClassVar[float]
    range_text: ClassVar[str]

    def __new__(cls, value: float) -> Quantity:
        """Wrap `value`, already in bytes or seconds; raise InputError if it is out of range, NaN or infinite."""
        number = float.__new__(cls, value)
        if not cls.least <= number <= cls.most:
            raise InputError(
                f"{float(number):.6g} is out of range for a {cls.noun}", hint=f"it must be {cls.range_text}"
            )
        return number


class Bandwidth(Quantity):
    """Bytes per second of one link, in one direction."""

    noun = "bandwidth"
    example = "100 Gbps"
    units = _BITS | _BYTE_RATES | _BIT_ALIASES | _KILO_ALIASES
    accepted = "bps, Kbps, Mbps, Gbps or Tbps (bits) or B/s, KB/s, MB/s, GB/s or TB/s (bytes; KiB/s ... TiB/s as well)"
    least, most = 125.0, 12.5e12
    range_text = "between 1 Kbps and 100 Tbps"


class Duration(Quantity):
    """Computing time in seconds."""

    noun = "duration"
    example = "12.5 ms"
    units = _SECONDS | {"µs": _SECONDS["us"], "μs": _SECONDS["us"], "min": Decimal(60), "h": Decimal(3600)}
    accepted = "ns, us, ms, s, min or h"
    most = 1e7
    range_text = "between 0 s and 1e7 s"


class Latency(Duration):
    """End-to-end latency of an idle path in seconds."""

    noun = "latency"
    example = "3 us"
    most = 10.0
    range_text = "between 0 s and 10 s"


class Size(Quantity):
    """Bytes of memory."""

    noun = "size"
    example = "180 GB"
    units = _BYTES | _BINARY_BYTES | {"kB": _BYTES["KB"]}
    accepted = "B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
    least, most = 1.0, 1e18
    range_text = "between 1 B and 1e6 TB"


Q = TypeVar("Q", bound=Quantity)


def quantity(kind: type[Q], value: object) -> Q:
    """Convert `value` to a `kind`: text with a unit, or a number already in bytes or seconds wrapped as a `kind`.

    Raises:
        InputError: no text, no number, no unit or a wrong one, or out of the kind's range.
    """
    if isinstance(value, kind):
        return value
    hint = f"write a number and one of {kind.accepted}, such as {kind.example}"
    if not isinstance(value, str):
        raise InputError(f"{_shown(value)} is not a {kind.noun}: it has no unit", hint=hint)
    match = _QUANTITY.fullmatch(value)
    if match is None or len(value) > _LONGEST_TEXT:
        raise InputError(f"{_shown(value)} is not a {kind.noun}", hint=hint)
    number, unit = match.groups()
    if unit not in kind.units:
        fault = f"the unit {unit!r} is not a unit of {kind.noun}" if unit else "it has no unit"
        raise InputError(f"{_shown(value)} is not a {kind.noun}: {fault}", hint=hint)
    si = Decimal(number) * kind.units[unit]
    if not kind.least <= si <= kind.most:
        raise InputError(f"{_shown(value)} is out of range for a {kind.noun}", hint=f"it must be {kind.range_text}")
    return kind(float(si))


def read_quantity(kind: type[Any], value: object) -> object:
    """Decode hook of msgspec for the types of this module."""
    return quantity(kind, value)


def bandwidth_bytes_per_s(text: str) -> float:
    """Return the bytes per second of "100 Gbps" (bits) or "450 GB/s" (bytes); raise InputError for other text."""
    return float(quantity(Bandwidth, text))


def duration_s(text: str) -> float:
    """Return the seconds of "3 us", "12.5 ms", "1 min"; never negative; raise InputError for other text."""
    return float(quantity(Duration, text))


def size_bytes(text: str) -> float:
    """Return the bytes of "80 GB" or "160 GiB"; raise InputError for other text."""
    return float(quantity(Size, text))


def bandwidth_text(bytes_per_s: float) -> str:
    """Return the shortest exact text: bits up to 1.6 Tbps as usual for networks, bytes above as for NVLink."""
    return _text(bytes_per_s, _BITS if bytes_per_s <= 200e9 else _BYTE_RATES)


def duration_text(seconds: float) -> str:
    """Return the shortest exact text of seconds, in ns, us, ms or s."""
    return _text(seconds, _SECONDS)


def size_text(nbytes: float) -> str:
    """Return the shortest exact text of bytes, with decimal or binary units."""
    return _text(nbytes, _BYTES | _BINARY_BYTES)


def about_bandwidth(bytes_per_s: float) -> str:
    """Return a measured bandwidth with three digits, for people: "91.1 Gbps"; always in bits, so that values are
    comparable."""
    return _about(bytes_per_s * 8, {"bps": 1, "Kbps": 1e3, "Mbps": 1e6, "Gbps": 1e9, "Tbps": 1e12})


def about_duration(seconds: float) -> str:
    """Return a measured time with three digits, for people: "12.3 ms", "145 s"."""
    return _about(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1})


def about_size(nbytes: float) -> str:
    """Return an amount of bytes with three digits, for people: "16.8 MB"."""
    return _about(nbytes, {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12})


def _about(value: float, units: dict[str, float]) -> str:
    """Use the largest unit in which the rounded value is 1 or more."""
    rounded = float(f"{value:.3g}")
    fitting = [(factor, unit) for unit, factor in units.items() if abs(rounded) >= factor]
    factor, unit = max(fitting) if fitting else (min(units.values()), next(iter(units)))
    if not rounded:
        return f"0 {next(unit for unit, factor in units.items() if factor == 1)}"
    return f"{float(f'{rounded / factor:.4g}'):,.10g} {unit}"


def quantity_text(value: Quantity) -> str:
    """Return text that `quantity` converts back to exactly `value`."""
    if isinstance(value, Bandwidth):
        return bandwidth_text(value)
    return size_text(value) if isinstance(value, Size) else duration_text(value)


def _text(si: float, units: dict[str, Decimal]) -> str:
    """Return `number unit` that is exactly `si`: a number from 1 to 1000 if possible, then the shortest."""
    texts = []
    for unit, factor in units.items():
        number = _plain(Decimal(repr(float(si))) / factor)
        if float(Decimal(number) * factor) == float(si):
            handy = 1 <= float(number) < 1000
            texts.append((not handy, len(number), float(number), abs(factor - 1), f"{number} {unit}"))
    assert texts, si
    return min(texts)[-1]


def _plain(number: Decimal) -> str:
    text = f"{number:f}"
    if len(text) > _LONGEST_NUMBER:
        return str(number)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."
