"""Value types of the `gateway:` section: times with a unit, shares, counts, tokens, addresses."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from kvroute.policies import DEFAULT_DECODE_POLICY, TARGETS
from kvroute.types import InputError
from kvroute_engine.files.units import Duration, Size, quantity

Host: TypeAlias = Annotated[str, Meta(pattern=r"^[^\s/]+\Z", examples=["127.0.0.1"])]
HeaderName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z", examples=["X-Tenant"])]
WebOrigin: TypeAlias = Annotated[
    str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^\s/]+)\Z", examples=["https://app.example"])
]
"""Origin of a web page, as a browser writes it in the Origin header; `*`: any."""
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Path: TypeAlias = Annotated[str, Meta(pattern=r"^/[!-~]*\Z", examples=["/health"])]
PassthroughPath: TypeAlias = Annotated[
    str, Meta(pattern=r"^(/\*|(/[A-Za-z0-9_.~@:+-]+)+(/?\*)?)\Z", examples=["/v2/embed", "/v1/images/*"])
]
"""Path without escapes; it may end with `*`."""
Url: TypeAlias = Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+[^\s]*\Z", examples=["http://10.0.0.9:9090"])]
Secret: TypeAlias = Annotated[
    str, Meta(pattern=r"^[!-~]{16,1000}\Z", examples=["16 or more random characters"], extra={"secret": True})
]
NonEmptyText: TypeAlias = Annotated[str, Meta(pattern=r"^ *[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]*\Z", examples=["rack"])]
"""Text that is not blank and has no control characters."""
Query: TypeAlias = Annotated[str, Meta(pattern=r"\S", examples=["avg(rate(link_bytes[1m])) / 1e9"])]
"""Text that is not blank; it may have several lines."""
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
ShareAboveZero: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Number: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
LimitOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=1_000_000)]

PolicyParameter: TypeAlias = float | Annotated[str, Meta(pattern=r"^[0-9][^\n]*[a-z]\Z", examples=["50 ms"])]
"""A number, or a time with its unit."""
PolicyName: TypeAlias = Annotated[
    str,
    Meta(
        examples=[DEFAULT_DECODE_POLICY],
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "object", "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "string"}]}},
            ]
        },
    ),
]
"""Name of a policy. A file may give a mapping with the name and the parameters; see `preflight`."""

_TOKENS = r"^(\d{1,12}(?:\.\d{1,12})?)\s?([KM]?)(?: ?tokens?)?\Z"
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6}
Tokens: TypeAlias = (
    Annotated[float, Meta(gt=0, le=1e9)] | Annotated[str, Meta(pattern=_TOKENS, examples=["19.4K tokens"])]
)
"""A prompt length in tokens: a number, or text such as "19.4K tokens"."""


class Wait(Duration):
    """Time to wait, in seconds; neither zero nor infinite."""

    # A power of two just below 1 ms, so that rounding does not reject "1 ms" itself.
    least: ClassVar[float] = 2.0**-10
    most: ClassVar[float] = 86_400.0
    range_text: ClassVar[str] = "between 1 ms and 24 h"


class Window(Duration):
    """Length of a time window, in seconds; 0: at once."""

    most: ClassVar[float] = 86_400.0
    range_text: ClassVar[str] = "between 0 s and 24 h"


class Target(Duration):
    """Target for a latency, in seconds; 0: none."""

    example: ClassVar[str] = "50 ms"


class LogSize(Size):
    """Size limit of log files, in bytes; large enough for the first line of a large cluster, and never unlimited."""

    least: ClassVar[float] = 1e6
    most: ClassVar[float] = 1e15
    range_text: ClassVar[str] = "between 1 MB and 1000 TB"


class MemorySize(Size):
    """Memory limit for one kind of work, in bytes."""

    least: ClassVar[float] = 100e6
    range_text: ClassVar[str] = "100 MB or more"


def tokens(length: Tokens) -> float:
    """Return the number of tokens; K is 1,000."""
    if not isinstance(length, str):
        return length
    match = re.match(_TOKENS, length)
    assert match is not None, "checked where the file was read"
    return float(match[1]) * _FACTORS[match[2]]


def policy_parameter(name: str, value: PolicyParameter) -> float:
    """Return a parameter of a policy as a number, a time in seconds.

    Raises:
        InputError: a target is no time with its unit, or another parameter is neither a number nor, if its name says
            that it is in seconds, a time. `where` is its name.
    """
    if not isinstance(value, str) and name not in TARGETS:
        return value
    if not isinstance(value, str):
        value = f"{value:g}"
    try:
        if name in TARGETS or name.endswith("_s"):
            return float(quantity(Target, value))
        raise InputError(f"{value!r} is not a number", hint="write a number without a unit")
    except InputError as error:
        raise InputError(error.what, where=name, hint=error.hint) from None
