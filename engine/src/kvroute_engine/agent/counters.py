"""Counters of network cards from Linux's sysfs: bytes of interfaces, and of RDMA, which interfaces do not count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvroute_engine.agent.rates import Total
from kvroute_engine.errors import InputError

_WORD_BYTES = 4
"""InfiniBand's data counters count words of 4 bytes."""
_ETHERNET = ("tx_bytes", "rx_bytes")
_RDMA = ("port_xmit_data", "port_rcv_data")


@dataclass(frozen=True, slots=True)
class WatchedNic:
    """A network interface or RDMA device, and the port of the cluster file that it is."""

    device: str
    port: int

    @classmethod
    def parse(cls, text: str) -> WatchedNic:
        """Return the same as `eth0=0`.

        Raises:
            InputError: it has another form.
        """
        device, _, port = text.rpartition("=")
        if not device or "/" in device or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
            raise InputError(f"{text!r} is not a device and a port", where="--nic", hint="write eth0=0")
        return cls(device, int(port))


def default_nics(sysfs: Path) -> tuple[WatchedNic, ...]:
    """Return all interfaces with hardware of their own, numbered in the order of their names; numbers in names count
    as numbers."""
    found = [path.name for path in (sysfs / "class/net").glob("*") if (path / "device").exists()]
    return tuple(WatchedNic(name, port) for port, name in enumerate(sorted(found, key=_natural)))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True, slots=True)
class _Source:
    """Files of one device, for bytes out and in."""

    files: tuple[Path, Path]
    unit_bytes: int


@dataclass
class PortCounters:
    """Bytes of each port since the first reading. Several devices of a port are added up; counters that wrap around or
    begin again are handled device by device."""

    sysfs: Path
    nics: Sequence[WatchedNic]
    failed: set[Path] = field(default_factory=set)
    """Files that the last reading could not read."""
    _totals: dict[Path, Total] = field(default_factory=dict)
    _sources: dict[int, list[_Source]] = field(init=False)

    def __post_init__(self) -> None:
        self._sources = {}
        for nic in self.nics:
            self._sources.setdefault(nic.port, []).extend(_sources(self.sysfs, nic))

    def read(self) -> dict[int, tuple[int, int]]:
        """Return the bytes that left and entered each port; a counter that cannot be read stays as it was."""
        self.failed = set()
        found = {}
        for port, sources in self._sources.items():
            counted = [[self._read(source.files[way], source.unit_bytes) for source in sources] for way in (0, 1)]
            found[port] = sum(counted[0]), sum(counted[1])
        return found

    def _read(self, path: Path, unit_bytes: int) -> int:
        total = self._totals.setdefault(path, Total())
        try:
            total.read(int(path.read_text()))
        except (OSError, ValueError):
            self.failed.add(path)
        return total.value * unit_bytes


def _sources(sysfs: Path, nic: WatchedNic) -> list[_Source]:
    """Return the counters of a device; those of an interface include its RDMA device's."""
    interface = sysfs / "class/net" / nic.device
    if interface.is_dir():
        beside = sorted((interface / "device/infiniband").glob("*"))
        files = interface / "statistics" / _ETHERNET[0], interface / "statistics" / _ETHERNET[1]
        return [_Source(files, 1), *(source for path in beside for source in _rdma_sources(sysfs, path.name))]
    found = _rdma_sources(sysfs, nic.device)
    if not found:
        what = f"{nic.device} is neither in {sysfs}/class/net nor in {sysfs}/class/infiniband"
        raise InputError(what, where="--nic", hint="`ls` these folders for the names")
    return found


def _rdma_sources(sysfs: Path, device: str) -> list[_Source]:
    folders = sorted((sysfs / "class/infiniband" / device / "ports").glob("*/counters"))
    return [_Source((folder / _RDMA[0], folder / _RDMA[1]), _WORD_BYTES) for folder in folders]
