"""Synthetic traces: arrivals, lengths and shared prefixes drawn from published statistics with a seed.

They repeat the distributions of Mooncake's conversation trace (FAST'25), not its rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, isfinite
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvroute.sim.workload.trace import Trace, TracedRequest
from kvroute.types import FloatArray, InputError, IntArray

Quantiles = tuple[tuple[float, float], ...]
"""Pairs of (percent, value), ascending from 0 to 100 percent; interpolated on a logarithmic scale in between."""


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Statistics of a generated trace; the defaults are those of Mooncake's conversation trace."""

    rate_per_s: float = 3.4
    batch_every_s: float = 3.0
    """Time between batches at `rate_per_s`; another rate changes the distance of batches and keeps their sizes."""
    batch_jitter_s: float = 0.001
    """Delay of a batch: 0 or this value."""
    batch_drift: float = 0.1
    """Coefficient of variation of the expected batch size; sizes are Poisson around it."""
    input_tokens: Quantiles = (
        (0, 891), (1, 894), (5, 901), (10, 964), (15, 1_261), (20, 1_662), (25, 2_306), (30, 3_263), (40, 4_993),
        (50, 6_909), (60, 9_570), (70, 13_196), (75, 15_367), (80, 17_869), (85, 21_464), (90, 27_367), (95, 39_550),
        (97.5, 58_977), (99, 85_400), (99.5, 100_810), (99.9, 121_301), (100, 126_195),
    )  # fmt: skip
    output_tokens: Quantiles = (
        (0, 1), (1, 3), (5, 10), (10, 24), (15, 46), (20, 100), (25, 156), (30, 213), (40, 291), (50, 350), (60, 399),
        (70, 447), (75, 472), (80, 504), (85, 543), (90, 597), (95, 698), (97.5, 835), (99, 1_119), (99.5, 1_568),
        (99.9, 2_000), (100, 2_000),
    )  # fmt: skip
    block_tokens: int = 512
    system_blocks: int = 1
    """Number of first blocks that all prompts share: the system prompt."""
    appended_tokens: Quantiles = ((0, 128), (5, 256), (25, 500), (50, 700), (75, 2_500), (95, 13_000), (100, 40_000))
    """Tokens that a later turn of a conversation adds to the previous prompt."""
    kept_share: Quantiles = ((0, 0.05), (5, 0.2), (15, 1.0), (100, 1.0))
    """Share of the previous prompt that the later one starts with; less than 1 if a user edits or branches."""
    followup_share: tuple[tuple[int, float], ...] = (
        (1_200, 0.05),
        (2_560, 0.5),
        (9_000, 0.56),
        (16_000, 0.47),
        (60_000, 0.46),
    )
    """(prompt tokens, probability) that a prompt of that length continues a conversation, if one is open."""
    pause_s: Quantiles = ((0, 12), (5, 15), (25, 25), (50, 45), (75, 110), (95, 500), (100, 1_500))
    """Time from a turn to the earliest next one."""
    open_s: float = 200.0
    """Time after its pause during which a conversation can continue; then it ends."""


MOONCAKE_CONVERSATION = TraceShape()


def generate(
    n: int | None = None,
    *,
    duration_s: float | None = None,
    rate_per_s: float = MOONCAKE_CONVERSATION.rate_per_s,
    seed: int,
    shape: TraceShape = MOONCAKE_CONVERSATION,
) -> Trace:
    """Generate `n` requests, or as many as arrive within `duration_s` seconds; the same arguments give an equal trace.

    The mean batch size is shape.rate_per_s * shape.batch_every_s, independent of `rate_per_s`. All prompts share a
    system prompt; some continue a conversation and share its earlier prompt; the rest of a prompt is unique. Another
    rate is the same trace with other times, as with `rescale`.

    Raises:
        InputError: both or neither of `n` and `duration_s`, or one that is not positive; a rate that is not.
    """
    if (n is None) == (duration_s is None):
        raise InputError("give either a number of requests or a duration", where="generate")
    for name, number in (("n", n), ("duration_s", duration_s), ("rate_per_s", rate_per_s)):
        if number is not None and not (isfinite(number) and number > 0):
            raise InputError(f"{number} is not positive", where=name, hint="give more than 0")
    if seed < 0:
        raise InputError(f"{seed} is not a valid seed", where="seed", hint="give 0 or more")
    draw = np.random.default_rng(seed)
    stretch = shape.rate_per_s / rate_per_s
    at_s = _arrivals(draw, n, None if duration_s is None else duration_s / stretch, shape)
    inputs = np.rint(_draw(draw, shape.input_tokens, len(at_s))).astype(np.int64)
    outputs = np.rint(_draw(draw, shape.output_tokens, len(at_s))).astype(np.int64)
    chains = _chains(draw, at_s, inputs, shape)
    rows = zip((at_s * stretch).tolist(), inputs.tolist(), outputs.tolist(), chains, strict=True)
    return Trace(f"generated-{seed}", tuple(TracedRequest(*row, shape.block_tokens) for row in rows))


def _arrivals(draw: np.random.Generator, n: int | None, duration_s: float | None, shape: TraceShape) -> FloatArray:
    """Return ascending arrival times at the shape's own rate, the first one at 0.

    Given their number, Poisson sizes are a multinomial draw: every request draws its batch.
    """
    if duration_s is None:
        assert n is not None
        batches = max(1, round(n / (shape.rate_per_s * shape.batch_every_s)))
    else:
        batches = max(1, ceil(duration_s / shape.batch_every_s))
        n = max(1, int(draw.poisson(shape.rate_per_s * shape.batch_every_s * batches)))
    weights = draw.gamma(1 / shape.batch_drift**2, size=batches)
    sizes = draw.multinomial(n, weights / weights.sum())
    # An integer number of jitters, divided once, is an exact decimal: a trace at its own rate is on whole milliseconds.
    per_s = round(1 / shape.batch_jitter_s)
    ticks = np.arange(batches) * round(shape.batch_every_s * per_s) + draw.integers(2, size=batches)
    at_ticks = np.repeat(ticks, sizes)
    return np.asarray((at_ticks - at_ticks[0]) / per_s, dtype=np.float64)


def _draw(draw: np.random.Generator, quantiles: Quantiles, size: int) -> FloatArray:
    """Draw from the inverse of the cumulative distribution through the quantiles."""
    percent, value = zip(*quantiles, strict=True)
    return np.asarray(np.exp(np.interp(draw.random(size) * 100, percent, np.log(value))), dtype=np.float64)


class _Turn(NamedTuple):
    """Last prompt of a conversation; ordered by length, then by age."""

    input_tokens: int
    number: int
    chain: tuple[int, ...]


@dataclass(slots=True)
class _Conversations:
    """Last turns of conversations that can continue. They pause first, then they are open, then they end or are
    resumed."""

    open_s: float
    _pausing: list[tuple[float, _Turn]] = field(default_factory=list)
    _open: list[_Turn] = field(default_factory=list)
    _ending: deque[tuple[float, _Turn]] = field(default_factory=deque)

    def add(self, ready_s: float, turn: _Turn) -> None:
        heappush(self._pausing, (ready_s, turn))

    def advance(self, now_s: float) -> None:
        """Open the turns whose pause is over, and end those that were not continued in time."""
        while self._pausing and self._pausing[0][0] <= now_s:
            ready_s, turn = heappop(self._pausing)
            insort(self._open, turn)
            self._ending.append((ready_s + self.open_s, turn))
        while self._ending and self._ending[0][0] < now_s:
            _, turn = self._ending.popleft()
            position = bisect_left(self._open, turn)
            if self._open[position : position + 1] == [turn]:
                del self._open[position]

    def resume(self, input_tokens: int) -> _Turn | None:
        """Return the longest open turn of at most `input_tokens` and remove it."""
        position = bisect_right(self._open, input_tokens, key=itemgetter(0))
        return self._open.pop(position - 1) if position else None


def _chains(draw: np.random.Generator, at_s: FloatArray, inputs: IntArray, shape: TraceShape) -> list[tuple[int, ...]]:
    """Return block ids of every prompt, with a partial last block as in Mooncake's traces; new ids count upwards."""
    size = len(at_s)
    length_at, share_at = zip(*shape.followup_share, strict=True)
    follows = draw.random(size) < np.interp(inputs, length_at, share_at)
    appended = np.rint(_draw(draw, shape.appended_tokens, size)).astype(np.int64)
    kept = _draw(draw, shape.kept_share, size)
    ready_s = at_s + _draw(draw, shape.pause_s, size)
    conversations = _Conversations(shape.open_s)
    unused = shape.system_blocks
    chains: list[tuple[int, ...]] = []
    columns = (at_s, inputs, follows, appended, kept, ready_s)
    for now_s, tokens, is_followup, more, share, ready in zip(*(column.tolist() for column in columns), strict=True):
        conversations.advance(now_s)
        before = conversations.resume(tokens - more) if is_followup else None
        due = -(-tokens // shape.block_tokens)
        known = _kept(before, share, shape) if before else tuple(range(min(shape.system_blocks, due)))
        chain = (*known, *range(unused, unused + due - len(known)))
        unused += due - len(known)
        conversations.add(ready, _Turn(tokens, len(chains), chain))
        chains.append(chain)
    return chains


def _kept(turn: _Turn, share: float, shape: TraceShape) -> tuple[int, ...]:
    """Return the full blocks of the first `share` of a prompt, but at least the system prompt."""
    return turn.chain[: max(int(share * turn.input_tokens) // shape.block_tokens, shape.system_blocks)]
