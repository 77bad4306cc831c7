"""Prefill times of many caches at once, compiled; `kvroute.timing.formulas` says which formula is whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

from kvroute.types import FloatArray, IntArray

Function = TypeVar("Function", bound=Callable[..., object])


def _compiled(function: Function) -> Function:
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


@_compiled
def linear_each_s(base_s: float, per_token_s: float, tokens: int, cached_tokens: IntArray, seconds: FloatArray) -> None:
    """Fill `seconds` [n] for a prompt of `tokens` of which so many are cached, [n]."""
    for i in range(len(seconds)):
        seconds[i] = base_s + per_token_s * max(tokens - cached_tokens[i], 0)
