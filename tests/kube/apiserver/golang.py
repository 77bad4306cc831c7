"""Error texts of Go's JSON, time and number parsers, which the API server passes on to its clients."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction

from tests.kube.apiserver.status import quoted

TIME = "2006-01-02T15:04:05Z07:00"
MICRO_TIME = "2006-01-02T15:04:05.000000Z07:00"
LAYOUT_PARTS = (
    ("2006", r"\d{4}"), ("-", "-"), ("01", r"\d\d"), ("-", "-"), ("02", r"\d\d"), ("T", "T"), ("15", r"\d\d"),
    (":", ":"), ("04", r"\d\d"), (":", ":"), ("05", r"\d\d"),
)  # fmt: skip
QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
QUANTITY_ERROR = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


class GoError(ValueError):
    """A parser's error; its text is Go's."""


def json_error(error: json.JSONDecodeError) -> str:
    """Return Go's text for a syntax error of JSON."""
    rest = error.doc[error.pos :].lstrip()
    if not rest:
        return "unexpected end of JSON input"
    character = f"'{rest[0]}'"
    if error.msg == "Extra data":
        return f"invalid character {character} after top-level value"
    if error.msg == "Expecting value":
        return f"invalid character {character} looking for beginning of value"
    if "property name" in error.msg:
        return f"invalid character {character} looking for beginning of object key string"
    return f"invalid character {character} after object key:value pair"


def json_kind(value: object) -> str:
    """Return the name that Go's decoder gives a JSON type."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list):
        return "array"
    return "string" if isinstance(value, str) else "null"


def parse_uint(text: str) -> int:
    """Return an unsigned integer; raise GoError with the text of strconv.ParseUint."""
    if not text.isascii() or not text.isdigit():
        raise GoError(f"strconv.ParseUint: parsing {quoted(text)}: invalid syntax")
    return int(text)


def parse_int(text: str) -> int:
    """Return an integer; raise GoError with the text of strconv.ParseInt."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise GoError(f"strconv.ParseInt: parsing {quoted(text)}: invalid syntax")
    return int(text)


def parse_time(text: str, micro: bool) -> datetime:
    """Return a time in UTC. A MicroTime has exactly six digits of the second's fraction."""
    layout = MICRO_TIME if micro else TIME
    rest, taken = text, ""
    for part, pattern in LAYOUT_PARTS:
        rest, found = _take(text, layout, rest, part, pattern)
        taken += found
    fraction = ""
    if micro:
        rest, fraction = _take(text, layout, rest, ".000000", r"\.\d{6}")
    elif found_fraction := re.match(r"\.\d+", rest):
        fraction, rest = found_fraction[0], rest[found_fraction.end() :]
    rest, zone = _take(text, layout, rest, "Z07:00", r"(Z|[+-]\d\d:\d\d)$")
    moment = datetime.strptime(taken, "%Y-%m-%dT%H:%M:%S")
    if fraction:
        moment = moment.replace(microsecond=int(fraction[1:7].ljust(6, "0")))
    return moment.replace(tzinfo=_zone(zone)).astimezone(UTC)


def _take(text: str, layout: str, rest: str, part: str, pattern: str) -> tuple[str, str]:
    """Return what is left after a part of a time, and the part."""
    found = re.match(pattern, rest)
    if found is None:
        raise GoError(f"parsing time {quoted(text)} as {quoted(layout)}: cannot parse {quoted(rest)} as {quoted(part)}")
    return rest[found.end() :], found[0]


def _zone(text: str) -> timezone:
    """Return the zone of an RFC 3339 time."""
    if text == "Z":
        return UTC
    offset = timedelta(hours=int(text[1:3]), minutes=int(text[4:6]))
    return timezone(-offset if text[0] == "-" else offset)


def format_time(moment: datetime, micro: bool = False) -> str:
    """Return a time as the API shows it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


def now() -> str:
    """Return the present as the API shows it, to the second."""
    return format_time(datetime.now(UTC))


def quantity_value(text: str) -> Fraction:
    """Return the number that a quantity stands for; raise GoError for another text."""
    found = QUANTITY.fullmatch(text)
    suffix = found[2] if found else "?"
    if found is None or found[1].count(".") > 1:
        raise GoError(QUANTITY_ERROR)
    number = Fraction(Decimal(found[1]))
    if suffix in BINARY:
        return number * Fraction(1024) ** BINARY[suffix]
    if suffix in DECIMAL:
        return number * Fraction(10) ** DECIMAL[suffix]
    if exponent := re.fullmatch(r"[eE]([-+]?\d+)", suffix):
        return number * Fraction(10) ** int(exponent[1])
    raise GoError(QUANTITY_ERROR)


def canonical_quantity(text: str) -> str:
    """Return a quantity in its canonical form: whole numbers with the largest suffix (`0.5` is `500m`)."""
    value = quantity_value(text)
    if text.endswith("i"):
        if value.denominator == 1:
            for suffix, power in reversed(BINARY.items()):
                unit = 1024**power
                if value.numerator and value.numerator % unit == 0:
                    return f"{value.numerator // unit}{suffix}"
            return str(value.numerator)
        return canonical_quantity(str(float(value)))
    for suffix, power in reversed(DECIMAL.items()):
        scaled = value / Fraction(10) ** power
        if scaled.denominator == 1 and scaled.numerator:
            return f"{scaled.numerator}{suffix}"
    return "0"
