"""Times of whole prompts and of decode steps, from the times at which an engine's tokens arrive."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvroute.load.timing.client import EngineApi
from kvroute.load.timing.plan import MeasuredBatch, MeasurementLimits
from kvroute.load.timing.scheduler import CachedPrompt, Scheduling, Together
from kvroute.timing import Profile
from kvroute.types import InputError, TransferStart

TOKEN_IDS = range(32, 256)
"""Ids that every tokenizer has and none uses as control tokens."""
_LONGER = (1, 4, 16)
"""Factors of the length of the responses, until the requests of a batch decode at the same time."""
FULL = 8
"""Prompts that fill a step each and are sent together."""
SHARING = 8
"""Short prompts that fill a step together."""
CACHED_TOKENS = 128
"""A multiple of every usual block size."""
LEAST_STEPS = 8
"""Fewest steps of all requests together from which a step time is computed."""


@dataclass(frozen=True, slots=True)
class PrefixCheck:
    """A prompt whose first tokens were cached."""

    tokens: int
    cached_tokens: int
    seconds: float


@dataclass(slots=True)
class MeasuredTimes:
    """Medians over the repeats."""

    prefill: list[tuple[int, float]] = field(default_factory=list)
    """Prompt tokens, seconds."""
    decode: list[tuple[int, float, float]] = field(default_factory=list)
    """Requests in the batch, tokens of all their contexts, seconds of a step."""
    prefixes: list[PrefixCheck] = field(default_factory=list)
    scheduling: Scheduling | None = None
    cached: list[CachedPrompt] = field(default_factory=list)
    """On the decode engine."""
    transfers: TransferStart = "at-once"
    """When the decode engine begins to pull a KV cache, by what kind of engine it is."""

    def profile(self, where: str) -> Profile:
        """Return the measurements for `fit_profile`. Args: `where`: the engine, for messages."""
        tokens, prefill_s = _columns(self.prefill, 2)
        batch, contexts, iteration_s = _columns(self.decode, 3)
        return Profile(where, tokens, prefill_s, batch, iteration_s, contexts, times="measured time")


async def measure_prefill(
    engine: EngineApi,
    lengths: Sequence[int],
    limits: MeasurementLimits,
    draw: random.Random,
    tell: Callable[[str], None],
) -> MeasuredTimes:
    """Measure prompts that are not cached, one at a time, and prompts whose first half is cached.

    Args:
        engine: it should be idle.
        lengths: prompt lengths in tokens.
        limits: bounds of the measurement.
        draw: for the prompts.
        tell: takes a sentence on the progress.
    """
    found = MeasuredTimes()
    await engine.first_token(_prompt(draw, lengths[0]))  # an engine's first request is slow
    for length in lengths:
        seconds, halves = [], []
        for _ in range(limits.repeats):
            prompt = _prompt(draw, length)
            seconds.append((await engine.first_token(prompt)).seconds)
            again = await engine.first_token(prompt[: length // 2] + _prompt(draw, length - length // 2))
            if again.cached_tokens:
                halves.append(PrefixCheck(length, again.cached_tokens, again.seconds))
        found.prefill.append((length, statistics.median(seconds)))
        if halves:
            found.prefixes.append(sorted(halves, key=lambda check: check.seconds)[len(halves) // 2])
        tell(f"prompt of {length} tokens: {found.prefill[-1][1]:.4g} s")
    return found


async def measure_decode(
    engine: EngineApi,
    batches: Sequence[MeasuredBatch],
    limits: MeasurementLimits,
    draw: random.Random,
    tell: Callable[[str], None],
) -> MeasuredTimes:
    """Measure the steps of requests that decode together.

    Args:
        engine: it should be idle.
        batches: batches to measure.
        limits: bounds of the measurement.
        draw: for the prompts.
        tell: takes a sentence on the progress.

    Raises:
        InputError: the requests of a batch hardly decode at the same time.
    """
    found = MeasuredTimes()
    await engine.batch_times_s([_prompt(draw, batches[0].prompt_tokens)], LEAST_STEPS)
    for batch in batches:
        known = [await _step(engine, batch, limits, draw) for _ in range(limits.repeats)]
        seconds = statistics.median(step[0] for step in known)
        context = statistics.median(step[1] for step in known)
        found.decode.append((batch.requests, batch.requests * context, seconds))
        tell(f"{batch.requests} requests with {context:.0f} tokens each: {seconds:.4g} s per step")
    return found


async def measure_scheduling(
    engine: EngineApi, step_tokens: int, limits: MeasurementLimits, draw: random.Random, tell: Callable[[str], None]
) -> Scheduling:
    """Measure prompts that are sent together: some that fill a step each, and short ones that share steps.

    Args:
        engine: it should be idle.
        step_tokens: most tokens of a step.
        limits: bounds of the measurement.
        draw: for the prompts.
        tell: takes a sentence on the progress.

    Raises:
        InputError: no prompt of the engine fills a step.
    """
    if engine.context_tokens and step_tokens >= engine.context_tokens:
        what = f"a prompt of {step_tokens} tokens does not fit into a context of {engine.context_tokens}"
        raise InputError(what, where="--step-tokens", hint="measure without it, or an engine with a longer context")
    short = max(step_tokens // SHARING, 1)
    one_prompt = [(await engine.first_token(_prompt(draw, step_tokens))).seconds for _ in range(limits.repeats + 2)]
    full_s, short_s = [], []
    for _ in range(limits.repeats):
        full_s.append(await engine.first_tokens_s([_prompt(draw, step_tokens) for _ in range(FULL)]))
        short_s.append(await engine.first_tokens_s([_prompt(draw, short) for _ in range(2 * SHARING + 1)]))
    found = Scheduling(
        step_tokens,
        statistics.median(one_prompt),
        Together(FULL, step_tokens, statistics.median(full_s)),
        Together(2 * SHARING + 1, short, statistics.median(short_s)),
    )
    tell(
        f"{FULL} prompts of {step_tokens} tokens together: {found.full.seconds:.4g} s, "
        f"one alone {found.one_prompt_s:.4g} s"
    )
    return found


async def measure_cached(engine: EngineApi, limits: MeasurementLimits, draw: random.Random) -> list[CachedPrompt]:
    """Measure a prompt whose blocks are all cached but the last; empty if the engine caches none or does not say."""
    prompt, found = _prompt(draw, CACHED_TOKENS + 1), []
    await engine.first_token(prompt)
    for _ in range(2 * limits.repeats + 1):
        again = await engine.first_token(prompt)
        if again.cached_tokens:
            found.append(CachedPrompt(len(prompt), len(prompt) - again.cached_tokens, again.seconds))
    return found


async def _step(
    engine: EngineApi, batch: MeasuredBatch, limits: MeasurementLimits, draw: random.Random
) -> tuple[float, float]:
    """Return the seconds of a step and the mean context. Short responses may end before the last request begins; then
    longer ones are requested."""
    for factor in _LONGER:
        tokens = limits.output_tokens * factor
        if factor > 1 and engine.context_tokens and batch.prompt_tokens + tokens > engine.context_tokens:
            break
        prompts = [_prompt(draw, batch.prompt_tokens) for _ in range(batch.requests)]
        found = step_time(await engine.batch_times_s(prompts, tokens), tokens, batch.prompt_tokens)
        if found is not None:
            return found
    raise InputError(
        f"{batch.requests} requests of {batch.prompt_tokens} tokens do not decode at the same time on {engine.url}",
        where="--max-batch",
        hint="give a smaller batch or more --output-tokens; the engine's own limit may be lower",
    )


def step_time(times_s: Sequence[Sequence[float]], output_tokens: int, prompt_tokens: int) -> tuple[float, float] | None:
    """Return the mean time of a step while all requests decode, and the mean context of a request then.

    Args:
        times_s: arrival of each event, in seconds, ascending, by request. An event may have several tokens.
        output_tokens: tokens of each response.
        prompt_tokens: tokens of each prompt.

    Returns:
        seconds and tokens; None if fewer than `LEAST_STEPS` steps of each request lie between the last first token and
        the first last one.
    """
    if not all(times_s):
        return None
    start, end = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    seconds = tokens = weight = 0.0
    for times in times_s:
        inside = [index for index, at in enumerate(times) if start <= at <= end]
        if len(inside) < 2:
            continue
        per_event = output_tokens / len(times)
        steps = (inside[-1] - inside[0]) * per_event
        seconds += times[inside[-1]] - times[inside[0]]
        tokens += steps * (prompt_tokens + per_event * (inside[0] + inside[-1] + 1) / 2)
        weight += steps
    if weight < LEAST_STEPS * len(times_s) or seconds <= 0.0:
        return None
    return seconds / weight, tokens / weight


def profile_csv(found: MeasuredTimes) -> tuple[str, str]:
    """Return the measurements as two CSV files, prompts and decode steps, that `read_profile` reads."""
    prefill = [f"{tokens},{seconds:.9g}" for tokens, seconds in found.prefill]
    decode = [f"{batch},{context:.9g},{seconds:.9g}" for batch, context, seconds in found.decode]
    heads = "tokens,seconds", "batch,context_tokens,seconds"
    return "\n".join([heads[0], *prefill, ""]), "\n".join([heads[1], *decode, ""])


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return draw.choices(TOKEN_IDS, k=tokens)


def _columns(rows: Sequence[tuple[float, ...]], count: int) -> list[np.ndarray]:
    table = np.array(rows, dtype=np.float64).reshape(len(rows), count)
    return [table[:, column] for column in range(count)]
