"""Callbacks that do not keep their owner alive: what an owner holds may call it back without a reference cycle.

The gateway runs with the cyclic collector's thresholds raised, so that a cycle is memory that comes back late or never.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """A bound method as a callback that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments, **named)

    return call
