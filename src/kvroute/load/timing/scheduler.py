"""What an engine's scheduler costs, from times of prompts alone and together. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.timing import Fit, Profile, fit_decode, fit_prefill, prefill_time, tokens_of_step_s
from kvroute.timing.fit import PrefillKind
from kvroute.types import DecodeSpec, FloatArray, InputError, PrefillSpec, SchedulerSpec, TransferStart

_ROUNDS = 4
"""Fits of the prefill: each subtracts the step times that the one before has found."""


@dataclass(frozen=True, slots=True)
class Together:
    """Prompts of equal length that were sent at the same time."""

    prompts: int
    tokens: int
    """Tokens of each."""
    seconds: float
    """Until the last response."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Measurements of an engine's scheduler."""

    step_tokens: int
    one_prompt_s: float
    """Time of a prompt of `step_tokens` tokens alone."""
    full: Together
    """Prompts of `step_tokens` tokens: each fills a step."""
    short: Together
    """Prompts that share steps; they determine nothing and check the result."""

    @property
    def request_s(self) -> float:
        """The part of a prompt's time in which the engine computes other prompts, if there are any."""
        step_s = (self.full.seconds - self.one_prompt_s) / (self.full.prompts - 1)
        return max(self.one_prompt_s - step_s, 0.0)


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt of which all but a few tokens were cached on the decode engine."""

    tokens: int
    new_tokens: int
    """Tokens that were computed."""
    seconds: float
    """Until the response of one token."""


@dataclass(frozen=True, slots=True)
class FittedEngine:
    """The timing of an engine, and what its scheduler costs."""

    prefill: Fit[PrefillSpec]
    decode: Fit[DecodeSpec]
    scheduler: SchedulerSpec
    shared_s: float | None = None
    """Predicted time of `Scheduling.short`; None: not measured."""


def fit_engine(
    profile: Profile,
    kind: PrefillKind,
    scheduling: Scheduling | None,
    cached: Sequence[CachedPrompt],
    transfers: TransferStart,
) -> FittedEngine:
    """Fit a measured engine.

    Args:
        profile: prompts alone, and decode steps.
        kind: form of the prefill model.
        scheduling: None: not measured, so the result has no steps.
        cached: repeats of one prompt; empty: unknown.
        transfers: when the engine begins to pull a KV cache.

    Raises:
        InputError: see `fit_prefill` and `fit_decode`.
    """
    try:
        decode = fit_decode(profile.batch, profile.iteration_s, profile.context_tokens)
        prefill, step_s = _fit_steps(profile.tokens, profile.prefill_s, kind, scheduling)
    except InputError as error:
        raise InputError(error.what, where=profile.where, hint=error.hint) from error
    request_s = _decode_request_s(cached, prefill.spec, decode.spec)
    scheduler = SchedulerSpec(
        step_tokens=scheduling.step_tokens if scheduling is not None else None,
        step_s=step_s,
        decode_request_s=request_s,
        transfers=transfers,
    )
    shared_s = None if scheduling is None else shared_time_s(prefill.spec, scheduler, scheduling.short)
    return FittedEngine(prefill, decode, scheduler, shared_s)


def _fit_steps(
    tokens: FloatArray, seconds: FloatArray, kind: PrefillKind, scheduling: Scheduling | None
) -> tuple[Fit[PrefillSpec], float]:
    """Fit prompts of one or several steps; return also the fixed time of a step."""
    fit, step_s = fit_prefill(tokens, seconds, kind), 0.0
    if scheduling is None:
        return fit, step_s
    steps = -(-tokens // scheduling.step_tokens)
    for _ in range(_ROUNDS):
        fit = fit_prefill(tokens, seconds - (steps - 1) * step_s, kind)
        found_s = prefill_time(fit.spec).seconds(0) - scheduling.request_s
        # Less than the mean step of every prompt, so that no time becomes negative.
        step_s = min(max(found_s, 0.0), 0.9 * float((seconds / steps).min()))
    return fit, step_s


def _decode_request_s(cached: Sequence[CachedPrompt], prefill: PrefillSpec, decode: DecodeSpec) -> float:
    """Return the median time of a response of one token, less its step and the tokens computed beyond one."""
    if not cached:
        return 0.0
    time = prefill_time(prefill)
    rest_s = []
    for prompt in cached:
        step_s = decode.base_s + decode.per_request_s + decode.per_context_token_s * prompt.tokens
        more_s = time.seconds(prompt.tokens, prompt.tokens - prompt.new_tokens + 1) - time.seconds(0)
        rest_s.append(prompt.seconds - step_s - more_s)
    return max(statistics.median(rest_s), 0.0)


def shared_time_s(prefill: PrefillSpec, scheduler: SchedulerSpec, together: Together) -> float:
    """Return the predicted time of prompts that are sent at the same time: the first one has a step of its own."""
    assert scheduler.step_tokens is not None
    time, seconds = prefill_time(prefill), 0.0
    queue = [(0, together.tokens)] * (together.prompts - 1)
    while queue:
        left, parts = scheduler.step_tokens, []
        while queue and left:
            computed, rest = queue.pop(0)
            tokens = min(rest, left)
            parts.append((computed, tokens))
            left -= tokens
            if tokens < rest:
                queue.insert(0, (computed + tokens, rest - tokens))
        seconds += scheduler.step_s + tokens_of_step_s(time, parts)
    return time.seconds(together.tokens) + seconds
