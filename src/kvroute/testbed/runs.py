"""Testbeds by name: what belongs to one, where its files are, and how all of it is found and removed."""

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
"""Reserved for measurements (RFC 2544), so no network uses them. Every testbed takes 256 of them."""
PASSES = 3
_PREFIX = "kvt-"
_NAME = re.compile(r"[a-z0-9]{1,8}", re.ASCII)
"""A device's name has at most 15 characters."""


class SavedTestbed(msgspec.Struct, frozen=True, kw_only=True):
    """State of a testbed that is up."""

    run: str
    url: str
    """URL for clients."""
    admin: str
    """URL of dashboard and metrics."""
    cluster: str
    """The file that the gateway serves, with true rates and the engines' endpoints."""
    hosts: dict[str, str]
    """Address by name of the instance."""
    scale: float
    queues: str


@dataclass(frozen=True, slots=True)
class NamedTestbed:
    """A testbed by its name, whether it exists or not."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            hint = "use 1 to 8 small letters and digits"
            raise InputError(f"{self.name!r} is not a valid testbed name", where="--name", hint=hint)

    @classmethod
    def of(cls, cluster: str) -> NamedTestbed:
        """Return the testbed with the default name for a cluster."""
        return cls(f"{xxhash.xxh32_intdigest(cluster.encode()):08x}")

    @property
    def prefix(self) -> str:
        """Prefix of the names of its namespaces."""
        return f"{_PREFIX}{self.name}-"

    @property
    def device(self) -> str:
        """Name of its only device outside the namespaces."""
        return f"{_PREFIX}{self.name}"

    @property
    def folder(self) -> Path:
        """Folder of its files."""
        return FOLDER / self.name

    def namespace(self, place: str) -> str:
        """Return the namespace of a host or a switch."""
        return f"{self.prefix}{place}"

    def remains(self) -> list[str]:
        """Describe what exists of it; empty: nothing."""
        found = [f"namespace {name}" for name in namespaces.named(self.prefix)]
        found += [f"device {name}" for name in namespaces.links(self.device) if name == self.device]
        found += [f"process {pid}" for pid in processes.marked(self.name)]
        return found + ([f"folder {self.folder}"] if self.folder.exists() else [])

    def remove(self) -> None:
        """Remove all of it, in any state. It repeats, because a dying parent may still create something."""
        for _ in range(PASSES):
            processes.end(self.name)
            if self.device in namespaces.links(self.device):
                namespaces.run("ip", "link", "delete", self.device)
            for name in namespaces.named(self.prefix):
                namespaces.run("ip", "netns", "delete", name)
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.remains():
                return


def known() -> list[NamedTestbed]:
    """Return every testbed of which anything exists, found by namespaces, devices and folders."""
    names = {name.removeprefix(_PREFIX).partition("-")[0] for name in namespaces.named(_PREFIX)}
    names |= {name.removeprefix(_PREFIX) for name in namespaces.links(_PREFIX)}
    if FOLDER.is_dir():
        names |= {path.name for path in FOLDER.iterdir() if path.is_dir()}
    return [NamedTestbed(name) for name in sorted(names) if _NAME.fullmatch(name)]


@contextmanager
def addresses(run: NamedTestbed) -> Iterator[IPv4Network]:
    """Reserve 256 addresses that no other testbed has.

    Other testbeds wait until the block ends. By then the first address must be on the run's device.
    """
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = {address.rpartition(".")[0] for found in namespaces.links(_PREFIX).values() for address in found}
        for network in ADDRESSES.subnets(new_prefix=24):
            if str(network[0]).rpartition(".")[0] not in taken:
                yield network
                return
    raise InputError("no free addresses are left", where=run.name, hint="run `kvroute testbed down --all`")
