"""File in which a running switch says how many slots are free, for agents and monitoring on the same machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

STALE_S = 5.0
"""Age above which a status counts as that of a switch that has ended; it is written once a second."""


class SwitchStatus(msgspec.Struct, frozen=True):
    """State of a switch."""

    written_unix_s: float
    address: str
    data_plane: str
    slots: int
    free_slots: int
    packets: int
    chunks: int


def write_status(path: Path, status: SwitchStatus) -> None:
    """Replace the file as a whole.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(msgspec.json.encode(status) + b"\n")
    part.replace(path)


def read_status(path: Path, now_unix_s: float) -> SwitchStatus | None:
    """Return the status of a switch that is running; None if the file is absent, damaged or too old."""
    try:
        status = msgspec.json.decode(path.read_bytes(), type=SwitchStatus)
    except (OSError, msgspec.DecodeError):
        return None
    return status if now_unix_s - status.written_unix_s <= STALE_S else None
