"""Further terms of a choice that no policy has: they rank the candidates of any prefill or decode policy again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvroute.types import Choice, FloatArray, Terms


def preferred(choice: Choice, further_s: Mapping[str, FloatArray]) -> Choice:
    """Return the choice with these terms, in seconds by name, each of length n; the first of equals.

    A policy that prices in seconds gets their sum added to its cost. With any other unit the sum decides only between
    feasible candidates of equal cost.
    """
    terms, sum_s = choice.terms, np.sum([*further_s.values()], axis=0)
    parts = terms.parts | dict(further_s)
    if terms.unit == "s":
        cost = terms.cost + sum_s
        index = int(np.where(terms.feasible, cost, np.inf).argmin())
        return Choice(index, Terms(terms.names, cost, terms.feasible, parts, terms.unit))
    equal = terms.feasible & (terms.cost == terms.cost[choice.index])
    index = choice.index
    if sum_s[equal].min() < sum_s[index]:
        index = int(np.where(equal, sum_s, np.inf).argmin())
    return Choice(index, Terms(terms.names, terms.cost, terms.feasible, parts, terms.unit))
