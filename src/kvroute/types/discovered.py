"""Engines that a discovery source reports: in Kubernetes, by DNS, or in a watched file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from kvroute.types.instances import Endpoint, Role


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Location of a node; an empty name means that the level is not known."""

    node: str
    rack: str = ""
    pod: str = ""
    """Group of racks: a pod, block or spine of the network, not a Kubernetes pod."""
    datacenter: str = ""


class Discovered(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, or one data-parallel rank of it."""

    name: str
    """Unique among all engines that exist at the same time; may be used again after the engine is gone."""
    uid: str
    """Different for each engine that ever had the name or the address."""
    role: Role
    endpoint: Endpoint
    place: Place
    model: str = ""
    """Empty: the model of the cluster file's `defaults`."""
    tp: int | None = None
    """None: as in `defaults`."""
    pp: int | None = None
    timing: str = ""
    """Empty: as in `defaults`."""
    engine: str = ""
    """Engine, one server, of which it is a data-parallel rank; empty: it has an address of its own."""
    rank: int = 0
    """Its data-parallel rank, which requests to that address name."""
    ready: bool = True
    """Whether it takes requests. An engine that ends is not ready, stays until its requests have ended, and then
    disappears."""

    @property
    def server(self) -> str:
        """Name of the server process; all data-parallel ranks of an engine have the same."""
        return self.engine or self.name


class OwnPicker(msgspec.Struct, frozen=True):
    """This process as the endpoint picker that a source of engines, such as an InferencePool, should name."""

    port: int
    """Its gRPC port."""
    fails_open: bool | None = None
    """Whether the configuration of Envoy that it has written fails open; None: it has written none."""


class Joined(msgspec.Struct, frozen=True):
    """A discovered engine that is part of the cluster."""

    engine: Discovered
    gpus: tuple[int, ...]
    """Its GPUs on its node, shard by shard."""


class Reporter(Protocol):
    """Takes what a source finds."""

    def __call__(self, engines: tuple[Discovered, ...]) -> None:
        """Take all engines that exist now, ascending by name."""


class DiscoverySource(Protocol):
    """Follows the engines that exist."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the last report may be out of date, one sentence each; empty while the source answers."""

    @property
    def findings(self) -> Mapping[str, int]:
        """Number of engines that are left out or doubtful, by effect."""

    async def run(self, report: Reporter) -> None:
        """Report all engines at the beginning and after each change, until cancelled. A source that has lost its server
        reports nothing; the last report stays valid."""
