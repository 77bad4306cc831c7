"""Duration of prefills and decode iterations from a spec, as plain floats, because simulators call it very often."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np

from kvroute.compiled import compiled
from kvroute.types import (
    DecodeSpec,
    FloatArray,
    InputError,
    IntArray,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
    QuadraticPrefill,
    TimingSpec,
)


class PrefillTime(Protocol):
    """Duration of one prompt on an instance that computes nothing else."""

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        """Return the seconds to compute the tokens after the first `cached_tokens`; the base is paid in all cases."""
        ...


@dataclass(frozen=True, slots=True)
class _Linear:
    per_token_s: float
    base_s: float

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        return self.base_s + self.per_token_s * max(tokens - cached_tokens, 0)


@dataclass(frozen=True, slots=True)
class _Quadratic:
    base_s: float
    per_token_s: float
    per_token2_s: float

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        if cached_tokens >= tokens:
            return self.base_s
        linear_s = self.per_token_s * (tokens - cached_tokens)
        return self.base_s + linear_s + self.per_token2_s * (tokens * tokens - cached_tokens * cached_tokens)


@dataclass(frozen=True, slots=True)
class _Piecewise:
    tokens: tuple[int, ...]
    points_s: tuple[float, ...]
    slopes_s: tuple[float, ...]
    base_s: float

    def curve_s(self, tokens: int) -> float:
        segment = min(max(bisect_right(self.tokens, tokens) - 1, 0), len(self.slopes_s) - 1)
        return max(self.points_s[segment] + self.slopes_s[segment] * (tokens - self.tokens[segment]), 0.0)

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        if cached_tokens <= 0:
            return self.curve_s(tokens)
        if cached_tokens >= tokens:
            return self.base_s
        return self.curve_s(tokens) - self.curve_s(cached_tokens) + self.base_s


def prefill_each_s(time: PrefillTime, tokens: int, cached_tokens: IntArray) -> FloatArray:
    """Return `time.seconds` of one prompt for each of several cache sizes, [n]; bit-identical to single calls."""
    if isinstance(time, _Linear):
        seconds: FloatArray = np.empty(len(cached_tokens))
        linear_each_s(time.base_s, time.per_token_s, tokens, cached_tokens, seconds)
        return seconds
    # Few instances have cached anything, and many of them have cached the same.
    cached = cached_tokens.tolist()
    known = {count: time.seconds(tokens, count) for count in set(cached)}
    return np.array([known[count] for count in cached])


@compiled
def linear_each_s(base_s: float, per_token_s: float, tokens: int, cached_tokens: IntArray, seconds: FloatArray) -> None:
    """Fill `seconds` [n] for a prompt of `tokens` with `cached_tokens` [n] of them cached."""
    for i in range(len(seconds)):
        seconds[i] = base_s + per_token_s * max(tokens - cached_tokens[i], 0)


def tokens_of_step_s(time: PrefillTime, parts: Sequence[tuple[int, int]]) -> float:
    """Return the time of the tokens that a step computes, without the step's fixed time.

    A step of several prompts takes as long as one prompt of all their tokens: a GPU reads the weights once, and the
    matrix products depend on the number of tokens (docs/fidelity.md has measurements). To this comes, for each prompt,
    what its tokens cost more because of those that are already computed.

    Args:
        parts: for each prompt the tokens that are already computed, and those that the step computes.
    """
    seconds = time.seconds(sum(tokens for _, tokens in parts)) - time.seconds(0)
    for computed, tokens in parts:
        if computed:
            seconds += time.seconds(computed + tokens, computed) - time.seconds(tokens)
    return max(seconds, 0.0)


def step_base_s(timing: TimingSpec) -> float:
    """Return the part of a prefill's base that a step takes once, with prompts or without: the GPU reads the weights.

    A prompt beside a decode batch does not add it, because the batch's step has it (docs/fidelity.md has measurements).
    """
    if timing.scheduler.step_tokens is not None:
        return timing.scheduler.step_s
    return prefill_time(timing.prefill).seconds(0)


def prefill_time(spec: PrefillSpec) -> PrefillTime:
    """Return the function of a spec.

    With l tokens of which c are cached: linear gives base + per_token * (l - c). Quadratic and piecewise give T(l) -
    T(c) + T(0): the new tokens also attend to the cached ones, so they cost as much as at the end of a full prompt. A
    piecewise T is extrapolated with its first and last slope and is never negative.

    Raises:
        InputError: a coefficient is negative or not finite; there are fewer than 2 points, tokens do not ascend, or
            times fall.
    """
    match spec:
        case LinearPrefill(per_token_s=per_token_s, base_s=base_s):
            _check("prefill", per_token=per_token_s, base=base_s)
            return _Linear(per_token_s, base_s)
        case QuadraticPrefill(base_s=base_s, per_token_s=per_token_s, per_token2_s=per_token2_s):
            _check("prefill", base=base_s, per_token=per_token_s, per_token2=per_token2_s)
            return _Quadratic(base_s, per_token_s, per_token2_s)
        case PiecewisePrefill(tokens=tokens, seconds=seconds):
            return _piecewise(tokens, seconds)


def _piecewise(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> _Piecewise:
    if len(tokens) != len(seconds) or len(tokens) < 2:
        what = f"{len(tokens)} token counts but {len(seconds)} times are given"
        raise InputError(what, where="prefill", hint="give two or more points, one time for each token count")
    if tokens[0] < 0 or any(after <= before for before, after in pairwise(tokens)):
        hint = "sort the points, without duplicates"
        raise InputError("the token counts do not ascend from 0 or more", where="prefill", hint=hint)
    for count, second in zip(tokens, seconds, strict=True):
        _check("prefill", **{f"time at {count} tokens": second})
    if any(after < before for before, after in pairwise(seconds)):
        hint = "smooth the measurements, for example with `kvroute timing fit`"
        raise InputError("a longer prompt takes less time than a shorter one", where="prefill", hint=hint)
    slopes_s = tuple(
        (seconds[index + 1] - seconds[index]) / (tokens[index + 1] - tokens[index]) for index in range(len(tokens) - 1)
    )
    base_s = max(seconds[0] - slopes_s[0] * tokens[0], 0.0)
    return _Piecewise(tokens, seconds, slopes_s, base_s)


def _check(where: str, **coefficients: float) -> None:
    for name, value in coefficients.items():
        if not 0 <= value < math.inf:
            raise InputError(f"{name} is {value!r} s", where=where, hint="give a finite time, 0 or more")


class IterationTime(DecodeSpec, frozen=True):
    """Duration of decode iterations. `IterationTime.of` checks the numbers; the constructor does not."""

    @classmethod
    def of(cls, spec: DecodeSpec) -> IterationTime:
        """Create from a spec. Raises InputError if a number is negative or not finite, or an iteration would take no
        time."""
        _check("decode", base=spec.base_s, per_request=spec.per_request_s, per_context_token=spec.per_context_token_s)
        if spec.base_s + spec.per_request_s <= 0:
            raise InputError("an iteration takes no time", where="decode", hint="give `base` or `per_request`")
        return cls(**msgspec.structs.asdict(spec))

    def span_s(self, steps: int, batch: int, context_tokens: float) -> float:
        """Return the seconds of `steps` iterations of a constant batch whose context grows by `batch` tokens in each
        (closed form)."""
        growth_s = 0.5 * self.per_context_token_s * batch
        return steps * self.seconds(batch, context_tokens) + growth_s * (steps * (steps - 1))

    def steps_until(self, elapsed_s: float, batch: int, context_tokens: float) -> int:
        """Return the least number of iterations, 0 or more, whose `span_s` is at least `elapsed_s` (finite)."""
        if elapsed_s <= 0:
            return 0
        first_s = self.seconds(batch, context_tokens)
        growth_s = 0.5 * self.per_context_token_s * batch
        assert first_s > 0, "an iteration takes time"
        slope_s = first_s - growth_s
        if growth_s > 0:  # the root of growth * n^2 + slope * n = elapsed, in the form without cancellation
            root = math.sqrt(slope_s * slope_s + 4 * growth_s * elapsed_s)
            guess = 2 * elapsed_s / (slope_s + root) if slope_s >= 0 else (root - slope_s) / (2 * growth_s)
        else:
            guess = elapsed_s / first_s
        steps = math.ceil(guess)
        while self.span_s(steps, batch, context_tokens) < elapsed_s:
            steps += 1
        while self.span_s(steps - 1, batch, context_tokens) >= elapsed_s:
            steps -= 1
        return steps
