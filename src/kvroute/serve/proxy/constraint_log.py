"""Logs, at most once a second and with a count, decisions that send KV outside the constraint's domain because no
instance inside can accept it."""

from __future__ import annotations

from kvroute.serve.observe.logs import log_event
from kvroute.types import Decision, Decode, Terms

_EVERY_S = 1.0


class ConstraintFallbackLog:
    """Log of constraint fallbacks; it receives every decision under one constraint."""

    def __init__(self, constraint: str) -> None:
        """Args: `constraint` as written in the settings."""
        self._constraint = constraint
        self._count = 0
        """Number of fallbacks since the last log line."""
        self._told_at = float("-inf")

    def decided(self, at: float, decision: Decision) -> None:
        """Check a decision, and log it if it is a fallback and a log line is due."""
        if not isinstance(decision, Decode) or decision.terms is None or not _outside(decision.target, decision.terms):
            return
        self._count += 1
        if at - self._told_at < _EVERY_S:
            return
        log_event(
            "warning",
            "constraint_fallback",
            source=decision.source,
            target=decision.target,
            tier=decision.tier,
            count=self._count,
            reason=f"no instance inside the constraint can take the KV cache ({self._constraint})",
        )
        self._count, self._told_at = 0, at


def _outside(target: str, terms: Terms) -> bool:
    """Whether the target is outside the constraint's domain and no instance inside is feasible."""
    inside = terms.parts.get("same_domain")
    return inside is not None and not inside[terms.names.index(target)] and not terms.feasible[inside > 0].any()
