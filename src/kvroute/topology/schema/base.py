"""Types of values that the parts of a cluster file share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*\Z", max_length=200)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=65_536)]
Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
GpuCount: TypeAlias = Annotated[int, Meta(ge=0, le=1024)]
Ratio: TypeAlias = Annotated[float, Meta(gt=0, le=1000)]
Efficiency: TypeAlias = Annotated[float, Meta(gt=0, le=1)]


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One mapping of the file; an unknown key is an error."""
