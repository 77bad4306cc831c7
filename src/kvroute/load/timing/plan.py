"""Which prompts and batches to measure. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.types import InputError

LEAST_PROMPT_TOKENS = 32
MARGIN_TOKENS = 16
"""Tokens of the context that are left free."""


@dataclass(frozen=True, slots=True)
class MeasurementLimits:
    """Bounds of a measurement."""

    prompt_tokens: int = 8_192
    """Longest prompt."""
    batch: int = 32
    """Largest number of requests at the same time."""
    output_tokens: int = 64
    """Tokens of each response while decode steps are measured."""
    repeats: int = 3
    """Measurements of each prompt length and each batch; their median counts."""


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """Requests that decode together."""

    requests: int
    prompt_tokens: int
    """Prompt length of each request, in tokens."""


def lengths_of(limits: MeasurementLimits, context_tokens: int) -> list[int]:
    """Return the prompt lengths to measure, ascending: powers of two from 64 tokens on, and the longest one.

    Args:
        limits: bounds of the measurement.
        context_tokens: longest sequence of the engine; 0: unknown.

    Raises:
        InputError: fewer than three lengths fit.
    """
    longest = _longest(limits, context_tokens, output_tokens=1)
    lengths = [length for length in (1 << power for power in range(6, 21)) if length < longest]
    if len(lengths) < 2:
        raise InputError(
            f"prompts of at most {longest} tokens do not determine a curve",
            where="--max-prompt-tokens",
            hint="give 256 or more, on an engine with a context of at least that",
        )
    return [*lengths, longest]


def batches_of(limits: MeasurementLimits, context_tokens: int) -> list[MeasuredBatch]:
    """Return the batches to measure: all sizes with short prompts, and the smaller half with long prompts, so that the
    time per request and the time per token of its context can be told apart.

    Args:
        limits: bounds of the measurement.
        context_tokens: longest sequence of the engine; 0: unknown.

    Raises:
        InputError: fewer than two sizes fit.
    """
    if limits.batch < 2:
        what = f"batches of at most {limits.batch} request do not determine the time per request"
        raise InputError(what, where="--max-batch", hint="give 2 or more")
    sizes = [size for size in (1 << power for power in range(16)) if size < limits.batch] + [limits.batch]
    longest = _longest(limits, context_tokens, limits.output_tokens)
    long = min(longest, 1_024)
    found = [MeasuredBatch(size, min(LEAST_PROMPT_TOKENS, longest)) for size in sizes]
    if long >= 4 * LEAST_PROMPT_TOKENS:
        found += [MeasuredBatch(size, long) for size in sizes[: max(2, (len(sizes) + 1) // 2)]]
    return found


def _longest(limits: MeasurementLimits, context_tokens: int, output_tokens: int) -> int:
    room = context_tokens - output_tokens - MARGIN_TOKENS if context_tokens else limits.prompt_tokens
    if room < LEAST_PROMPT_TOKENS:
        what = f"the engine's context of {context_tokens} tokens has no room for {output_tokens} output tokens"
        raise InputError(what, where="--output-tokens", hint="give fewer")
    return min(limits.prompt_tokens, room)
