"""The `replication:` section of the gateway's settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.serve.config.field_types import NonEmptyText, Wait
from kvroute.topology.schema import Entry
from kvroute_engine.files.units import Duration

RedisUrl: TypeAlias = Annotated[
    str, Meta(pattern=r"^(rediss?://[^\s/?#]+|unix:///)[^\s]*\Z", examples=["redis://10.0.0.9:6379/0"])
]


class Lease(Duration):
    """Time after which a silent gateway is lost, in seconds."""

    least: ClassVar[float] = 1.0
    most: ClassVar[float] = 3_600.0
    range_text: ClassVar[str] = "between 1 s and 1 h"
    example: ClassVar[str] = "5 s"


class ReplicationSection(Entry, frozen=True, kw_only=True):
    """The stream that the gateways of one cluster share."""

    redis: RedisUrl
    """Server of the stream: Redis 7 or Valkey."""
    cluster: NonEmptyText | None = None
    """Name of the stream; None: the cluster's name. Gateways with the same name must serve the same engines."""
    username: NonEmptyText | None = None
    """User of the server; None: its default user."""
    password_env: str | None = None
    """Environment variable with the password of the server."""
    password_file: str | None = None
    """File with the password of the server."""
    lease_s: Lease = field(name="lease", default=Lease(5.0))
    """Time without a report after which the other gateways release the bookings of a gateway."""
    flush_s: Wait = field(name="flush", default=Wait(0.005))
    """Time for which changes are collected in one entry of the stream."""
    limits: Literal["common", "own"] = "common"
    """Whether the limits of admission hold for all gateways together, or for each of them."""
    entries: Annotated[int, Meta(ge=1_000, le=100_000_000)] = 100_000
    """Number of entries that the stream keeps, about."""


def password_of(section: ReplicationSection) -> str | None:
    """Return the password from the environment or the file; None if the section names neither. Raises OSError."""
    if section.password_file is not None:
        return Path(section.password_file).read_text(encoding="utf-8").strip()
    return os.environ.get(section.password_env) if section.password_env is not None else None
