"""A cell is one run of a comparison: settings, policy and seed. Its key identifies it permanently."""

from __future__ import annotations

from typing import Any

import msgspec

from kvroute.sim.metrics import Summary, Timeline


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep, one policy, one seed."""

    experiment: str
    reading: str
    profile: str
    settings: dict[str, float]
    """Axis values, e.g. {"load": 1.0}."""
    policy: str
    seed: int

    @property
    def key(self) -> str:
        """The cell's name, unique within a results folder and readable; the argument of `--cell`."""
        values = ",".join(f"{name}={value:g}" for name, value in self.settings.items())
        return f"{self.experiment}/{self.reading}/{self.profile}/{values}/{self.policy}/{self.seed}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell, with everything needed to run it again."""

    key: str
    cell: Cell
    config: dict[str, Any]
    """Every parameter of the reading, the trace and the tuned weights."""
    summary: Summary
    timeline: Timeline | None = None
    figures: dict[str, float] = {}
    """Further numbers of this experiment by name with unit; values that were not measured are absent."""
    series: dict[str, tuple[tuple[float, float], ...]] = {}
    """Values that changed during the run: (seconds, value)."""
    code: str = ""
    """Digest of the code that produced the record (`provenance.code_of`); empty if it was not recorded."""


encode = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(Record).decode
