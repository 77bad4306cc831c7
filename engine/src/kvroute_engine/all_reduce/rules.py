"""Rules by which a group chooses the scheme of an all-reduce, of its settings or of the scheduler's table."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Literal, TypeAlias

import msgspec

from kvroute_engine.agent.files import SchemeRule

LiveScheme: TypeAlias = Literal["ring", "hierarchical-ring", "ina", "hierarchical-ina"]
"""Those of `collectives.Scheme` that a process can choose. PyTorch has no ring over several NICs of one process."""
SWITCHED: frozenset[LiveScheme] = frozenset({"ina", "hierarchical-ina"})
HIERARCHICAL: frozenset[LiveScheme] = frozenset({"hierarchical-ring", "hierarchical-ina"})
_OWN_RINGS = ("ring", "multi-rail-ring")
"""Schemes of a table that are the backend's own all-reduce."""


class Rule(msgspec.Struct, frozen=True):
    """Scheme of tensors up to a size."""

    scheme: LiveScheme
    up_to_bytes: int | None = None
    """Largest tensor to which the rule applies; None: any."""


class GroupRules(msgspec.Struct, frozen=True):
    """What all ranks of a group use from one operation on."""

    rules: tuple[Rule, ...]
    """The first rule that fits a tensor applies; a ring if none does."""
    version: int = 0
    """Version of the group's entry in the scheduler's table; 0: the rules of the settings."""
    generation: int = 0
    """Number of returns to the switch after a failure."""

    def scheme_of(self, nbytes: int) -> LiveScheme:
        """Return the scheme of a tensor."""
        for rule in self.rules:
            if rule.up_to_bytes is None or nbytes <= rule.up_to_bytes:
                return rule.scheme
        return "ring"

    @property
    def switched(self) -> bool:
        """Whether a rule names a scheme through the switch."""
        return any(rule.scheme in SWITCHED for rule in self.rules)


def prepared_rules(rules: Iterable[SchemeRule], prepared: Set[LiveScheme]) -> tuple[tuple[Rule, ...], frozenset[str]]:
    """Return the rules of a table with a ring in place of schemes that a group has not prepared, and these schemes."""
    live: dict[str, LiveScheme] = {scheme: scheme for scheme in prepared} | dict.fromkeys(_OWN_RINGS, "ring")
    given = tuple(rules)
    found = tuple(Rule(live.get(rule.scheme, "ring"), rule.up_to_bytes) for rule in given)
    return found, frozenset(rule.scheme for rule in given if rule.scheme not in live)
