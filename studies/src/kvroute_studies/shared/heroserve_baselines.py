"""Baselines of HeroServe's evaluation: all-reduce schemes that groups may use, and waits of the switch's workers."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute_engine.agent.schemes import SCHEMES, Scheme


@dataclass(frozen=True, slots=True)
class Baseline:
    """A system as the all-reduce schemes that its groups may use."""

    schemes: tuple[Scheme, ...]
    """`ring` is one of them: groups on one server always use it."""
    scheme: Scheme | None
    """Scheme of a group that spans servers in a fixed placement; None: the fastest one."""
    fallback_share: float = 0.0
    """Share of the packets that find no slot."""
    stays: bool = True
    """Whether groups stay on one server if the weights fit (DistServe)."""


BASELINES = {
    "ring": Baseline(("ring",), "ring"),
    "multi-rail-ring": Baseline(("ring", "multi-rail-ring"), "multi-rail-ring"),
    "switchml": Baseline(("ring", "ina"), "ina"),
    "atp-5": Baseline(("ring", "ina"), "ina", 0.05),
    "atp-25": Baseline(("ring", "ina"), "ina", 0.25),
    "hierarchical-ring": Baseline(("ring", "hierarchical-ring"), "hierarchical-ring", stays=False),
    "heroserve": Baseline(SCHEMES, None, stays=False),
}
"""By name. DistServe with a ring over one NIC and with one ring per NIC; the same with flat aggregation, without
fallback and with 5 and 25 % of the packets; HeroServe's placement without aggregation, and with all schemes."""
HERO, WITHOUT = "heroserve", "hierarchical-ring"
RETRY_S = {"retry-100us": 1e-4, "retry-1ms": 1e-3}
"""Least times after which a worker of the switch sends a packet again, by the name of the policy."""
