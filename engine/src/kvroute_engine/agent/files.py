"""Files by which the agent of a server and the ranks on it exchange tables and traffic.

The agent writes `table.json`. Rank 0 of each group writes `traffic-GROUP.json`. Files are replaced as a whole, so a
reader never sees a part of one, and the last table stays when agent or scheduler are away.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from kvroute_engine.agent.schemes import Scheme

TABLE = "table.json"
_TRAFFIC = "traffic-"
T = TypeVar("T")


class SchemeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheme of tensors up to a size; the first rule that fits a tensor applies."""

    scheme: Scheme
    up_to_bytes: int | None = None
    """Largest tensor to which the rule applies; None: any."""


class GroupEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler's choice for one group."""

    version: int
    """Increases with every change of the rules, also over restarts of the scheduler."""
    rules: tuple[SchemeRule, ...]


class TableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last table of the scheduler that an agent has received."""

    version: int
    """Increases with every change of an entry, also over restarts of the scheduler."""
    received_unix_s: float
    """Time at which the agent last heard from the scheduler that this table is current."""
    groups: dict[str, GroupEntry]


class GroupTraffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduces of a group since its rank 0 has started."""

    group: str
    incarnation: int
    """Differs after every start of the rank; counts begin with 0 then."""
    table_version: int
    """Version of the group's entry that is in use; 0: none."""
    calls: dict[Scheme, dict[int, int]]
    """All-reduces that have ended, by scheme and by the exponent of the smallest power of two that is not below the
    tensor's size."""
    nbytes: dict[Scheme, dict[int, int]]
    """Bytes of their tensors on one rank."""


def replace_file(path: Path, content: msgspec.Struct) -> None:
    """Write a file as JSON, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(msgspec.json.encode(content))
    part.replace(path)


def read_file(path: Path, form: type[T]) -> T | None:
    """Return the content of a file; None if it does not exist or is not of this form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, msgspec.DecodeError):
        return None


def traffic_path(folder: Path, group: str) -> Path:
    """Return the path of a group's traffic."""
    return folder / f"{_TRAFFIC}{quote(group, safe='')}.json"


def traffic_files(folder: Path) -> list[GroupTraffic]:
    """Return the traffic of all groups of a server, by file name; files that cannot be read are left out."""
    found = (read_file(path, GroupTraffic) for path in sorted(folder.glob(f"{_TRAFFIC}*.json")))
    return [traffic for traffic in found if traffic is not None]


def size_exponent(nbytes: int) -> int:
    """Return the exponent of the smallest power of two that is not below `nbytes`."""
    return max(nbytes - 1, 0).bit_length()
