"""HeroServe's grouping and equations as published: the package kvroute-studies brings them by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import msgspec

from kvroute.types import InputError


class LiteralPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of the published equations."""

    prefill: str
    """Such as `TP8 PP1 on a100`."""
    decode: str
    ttft_s: float
    """T_pre of eq. 3."""
    tpot_s: float
    """T_dec of eq. 4."""
    transfer_s: float
    """T_f of eq. 14."""
    scalability_per_s: float
    """H of eq. 1 at the rate that kvroute found; negative queueing times are kept."""
    corrected_rate_per_s: float
    """Rate that the same parallelism sustains by the corrected equations, with as many instances as GPUs allow."""


def from_studies(name: str, option: str) -> Any:
    """Return a function that kvroute-studies brings.

    Args:
        name: `grouping` or `equations`.
        option: the one of the command that needs it.

    Raises:
        InputError: kvroute-studies is not installed.
    """
    entries = tuple(entry_points(group="kvroute.placement", name=name))
    if not entries:
        what = "what HeroServe published is part of the package kvroute-studies, which is not installed"
        raise InputError(what, where=option, hint="pip install kvroute-studies, or ./studies of the repository")
    return entries[0].load()
