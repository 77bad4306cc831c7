"""Testbeds by name: what belongs to one, where it keeps its files, and how all of it is found and taken away."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

import msgspec
import xxhash

from kvroute.testbed import namespaces, processes
from kvroute.types import InputError

FOLDER = Path("/run/kvroute-testbed")
ADDRESSES = IPv4Network("198.18.0.0/15")
"""Set aside for measurements (RFC 2544), so nobody's own; every testbed takes 256 of them."""
PASSES = 3
_PREFIX = "kvt-"
_NAME = re.compile(r"[a-z0-9]{1,8}", re.ASCII)
"""A device's name has 15 letters at most."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a testbed says of itself once it is up."""

    run: str
    url: str
    """For clients."""
    admin: str
    """Dashboard, metrics."""
    cluster: str
    """The file that the gateway serves: true rates, the engines' endpoints."""
    hosts: dict[str, str]
    """Address by instance."""
    scale: float
    queues: str


@dataclass(frozen=True, slots=True)
class Run:
    """A testbed by its name; it may be there or not."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            mend = "use 1 to 8 small letters and digits"
            raise InputError(f"{self.name!r} is no name for a testbed", where="--name", mend=mend)

    @classmethod
    def of(cls, cluster: str) -> Run:
        """That of a cluster's name, where none is given."""
        return cls(f"{xxhash.xxh32_intdigest(cluster.encode()):08x}")

    @property
    def prefix(self) -> str:
        """Of its namespaces' and devices' names."""
        return f"{_PREFIX}{self.name}-"

    @property
    def device(self) -> str:
        """The one device outside of the namespaces."""
        return f"{_PREFIX}{self.name}"

    @property
    def folder(self) -> Path:
        """Its files."""
        return FOLDER / self.name

    def namespace(self, place: str) -> str:
        """Of a host or a switch."""
        return f"{self.prefix}{place}"

    def remains(self) -> list[str]:
        """Whatever is there of it, in words; empty: nothing."""
        found = [f"namespace {name}" for name in namespaces.named(self.prefix)]
        found += [f"device {name}" for name in namespaces.links(self.device) if name == self.device]
        found += [f"process {pid}" for pid in processes.marked(self.name)]
        return found + ([f"folder {self.folder}"] if self.folder.exists() else [])

    def remove(self) -> None:
        """Take all of it away, in whatever state it is; what a dying parent was about to make may come in between."""
        for _ in range(PASSES):
            processes.end(self.name)
            if self.device in namespaces.links(self.device):
                namespaces.run("ip", "link", "delete", self.device)
            for name in namespaces.named(self.prefix):
                namespaces.run("ip", "netns", "delete", name)
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.remains():
                return


def known() -> list[Run]:
    """Every testbed of which anything is there, by namespaces, devices and folders."""
    names = {name.removeprefix(_PREFIX).partition("-")[0] for name in namespaces.named(_PREFIX)}
    names |= {name.removeprefix(_PREFIX) for name in namespaces.links(_PREFIX)}
    if FOLDER.is_dir():
        names |= {path.name for path in FOLDER.iterdir() if path.is_dir()}
    return [Run(name) for name in sorted(names) if _NAME.fullmatch(name)]


@contextmanager
def addresses(run: Run) -> Iterator[IPv4Network]:
    """256 addresses that no other testbed has; nobody else looks for some until the block ends, by which time the
    first one of them must be on the run's device."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = {address.rpartition(".")[0] for found in namespaces.links(_PREFIX).values() for address in found}
        for network in ADDRESSES.subnets(new_prefix=24):
            if str(network[0]).rpartition(".")[0] not in taken:
                yield network
                return
    raise InputError("no addresses are left", where=run.name, mend="`kvroute testbed down --all`")
