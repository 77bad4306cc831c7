"""Tables of a scheduler for one group of ranks, and what the group reports, in the folder of the server's agent."""

from __future__ import annotations

from pathlib import Path

from kvroute_engine.agent.files import (
    TABLE,
    GroupEntry,
    GroupTraffic,
    SchemeRule,
    TableFile,
    read_file,
    replace_file,
    traffic_path,
)
from kvroute_engine.agent.schemes import Scheme

GROUP = "decode-0"


def put(folder: Path, version: int, *rules: tuple[Scheme, int | None]) -> None:
    """Write a table of rules: scheme, and largest tensor in bytes."""
    entry = GroupEntry(version, tuple(SchemeRule(*rule) for rule in rules))
    replace_file(folder / TABLE, TableFile(version, 0.0, {GROUP: entry}))


def _traffic(folder: Path) -> GroupTraffic:
    found = read_file(traffic_path(folder, GROUP), GroupTraffic)
    return found or GroupTraffic(GROUP, 0, 0, {}, {})


def in_use(folder: Path) -> int:
    """Return the version of the entry that the group uses."""
    return _traffic(folder).table_version


def used(folder: Path, scheme: Scheme) -> int:
    """Return the number of all-reduces by a scheme."""
    return sum(_traffic(folder).calls.get(scheme, {}).values())
