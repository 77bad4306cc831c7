"""Value types of the `gateway:` section: times with a unit, shares, counts, tokens, addresses."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from kvroute_engine.files.units import Duration, Size

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
