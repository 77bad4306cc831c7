"""Callbacks that do not keep their owner alive, so that an object can call back its owner without a reference cycle.

The gateway raises the thresholds of Python's garbage collector, so the memory of a cycle is freed late or never.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a callback for a bound method; it does nothing once the method's object is freed."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments, **named)

    return call
