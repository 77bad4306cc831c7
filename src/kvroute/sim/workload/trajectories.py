"""Generates trajectories of agents with the statistics of DualPath's traces (its table 2).

Trajectories differ: each has its own number of tokens per turn. So the mean of append and generated tokens is the mean
over trajectories of their means, and less than total tokens divided by turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import betaincinv, ndtri

from kvroute.sim.workload.agents import THINK_MAX_S, Agents
from kvroute.types import FloatArray, IntArray

TRAJECTORIES = 500
"""Size of each published trace."""
_STEPS = 60
_TOLERANCE = 0.002
_FULL_MIN, _PARTIAL = 0.97, (0.2, 0.97)
"""Shares of the maximum length: of trajectories that run to the end, at least; and of those that stop earlier."""
_APPEND_SPREAD, _GENERATED_SPREAD = 1.0, 0.7
"""Sigma of the log-normal noise of appended and generated tokens within a trajectory."""
_SHARE_CONCENTRATION = 12.0
"""Sum of the parameters of the beta distribution of the generated share."""


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Turns of agents, trajectory by trajectory, [turns] unless given."""

    prompt: IntArray
    """Tokens of each prompt."""
    cached: IntArray
    """Tokens at the beginning of the prompt that an earlier turn has had; whole blocks of them are in storage."""
    generated: IntArray
    think_s: FloatArray
    """Time from the end of the turn before, or from the agent's start, in seconds."""
    start: IntArray
    """First turn of each trajectory, and the number of all turns, [trajectories + 1]."""

    @classmethod
    def growing(cls, appended: IntArray, generated: IntArray, start: IntArray) -> Trajectories:
        """Return trajectories without pauses in which each turn appends tokens to the whole context before it, and then
        generates tokens."""
        added = appended + generated
        total = np.cumsum(added)
        before = np.concatenate([[0], total])[start[:-1]]
        context = total - added - np.repeat(before, np.diff(start))
        return cls(context + appended, context, generated, np.zeros(len(added)), start)

    @classmethod
    def of_sessions(cls, agents: Agents, think_max_s: float = THINK_MAX_S) -> Trajectories:
        """Return recorded sessions as trajectories; longer pauses than `think_max_s` are cut to it.

        Turns follow each other in the order of the file, also those of sub-agents. What an earlier turn of the session
        has had is cached, in the blocks of the recording; at least one token of each prompt is computed.
        """
        turns = [turn for session in agents.sessions for turn in session.turns]
        prompt = np.array([max(turn.input_tokens, 1) for turn in turns], dtype=np.int64)
        uncached = np.array([tokens for session in agents.sessions for tokens in session.uncached_tokens()])
        return cls(
            prompt=prompt,
            cached=prompt - np.clip(uncached, 1, prompt),
            generated=np.array([max(turn.output_tokens, 1) for turn in turns], dtype=np.int64),
            think_s=np.array([min(turn.think_s, think_max_s) for turn in turns]),
            start=np.concatenate([[0], np.cumsum([len(session.turns) for session in agents.sessions])]),
        )

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt with its output."""
        return int((self.prompt + self.generated).max(initial=0))

    def scaled(self, append: float, generate: float, tokens_max: int) -> Trajectories:
        """Return growing trajectories with `append` times the appended and `generate` times the generated tokens, cut
        before the turn that would exceed `tokens_max` tokens."""
        appended = np.maximum(1, np.round((self.prompt - self.cached) * append)).astype(np.int64)
        generated = np.maximum(1, np.round(self.generated * generate)).astype(np.int64)
        whole = Trajectories.growing(appended, generated, self.start)
        fits = whole.prompt + whole.generated <= tokens_max
        fits[self.start[:-1]] = True
        turns = np.add.reduceat(fits.astype(np.int64), self.start[:-1])
        return Trajectories.growing(appended[fits], generated[fits], np.concatenate([[0], np.cumsum(turns)]))


@dataclass(frozen=True, slots=True)
class TrajectoryStatistics:
    """A row of DualPath's table 2."""

    tokens_max: int
    """Maximum length of a trajectory."""
    turns: float
    """Mean turns of a trajectory."""
    appended: float
    """Mean over trajectories of the mean appended tokens of a turn."""
    generated: float
    """Mean over trajectories of the mean generated tokens of a turn."""
    total: float
    """Mean tokens of a trajectory."""
    context: float
    """Mean context of a turn, over all turns."""


TABLE_2: dict[str, TrajectoryStatistics] = {
    "32K": TrajectoryStatistics(32_768, 60, 608, 148, 28_639, 17_183),
    "48K": TrajectoryStatistics(49_152, 106, 474, 172, 42_607, 25_120),
    "64K": TrajectoryStatistics(65_536, 157, 429, 176, 55_958, 32_721),
}


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters of the generator."""

    log_tokens: float
    """Mean of the logarithm of a trajectory's tokens per turn."""
    spread: float
    """Sigma of that logarithm."""
    full: float
    """Share of trajectories that run to the maximum length."""
    generated: float
    """Mean share of generated tokens."""
    growth: float
    """Exponent of the growth of the context over the turns; below 1 it grows faster at the beginning."""


@dataclass(frozen=True, slots=True)
class _Draws:
    """Random numbers of each trajectory, which stay the same while the parameters are fitted, [trajectories].

    They are stratified, so that a few extreme trajectories do not shift the means."""

    turn_tokens: FloatArray
    runs_full: FloatArray
    length: FloatArray
    generated_share: FloatArray
    noise_seed: int


def generate_trajectories(wanted: TrajectoryStatistics, seed: int = 0, count: int = TRAJECTORIES) -> Trajectories:
    """Return `count` trajectories whose statistics are within 1 % of `wanted`, by damped moment matching.

    Raises AssertionError if the fit does not converge, which happens for statistics that no such mix has.
    """
    generator = np.random.default_rng(seed)
    draws = _Draws(
        turn_tokens=ndtri(_stratified(generator, count)),
        runs_full=_stratified(generator, count),
        length=_stratified(generator, count),
        generated_share=_stratified(generator, count),
        noise_seed=int(generator.integers(2**32)),
    )
    parameters = _first_guess(wanted)
    best, best_error = None, np.inf
    for _ in range(_STEPS):
        trajectories = _draw(wanted.tokens_max, parameters, draws)
        measured = statistics_of(trajectories, wanted.tokens_max)
        error = _error(measured, wanted)
        if error < best_error:
            best, best_error = trajectories, error
        if error < _TOLERANCE:
            break
        parameters = _corrected(parameters, measured, wanted)
    assert best is not None
    assert best_error < 0.01, f"the statistics differ by {best_error:.1%}"
    return best


def _stratified(generator: np.random.Generator, count: int) -> FloatArray:
    """Return a number from each of `count` equal parts of (0, 1), in random order."""
    return (generator.permutation(count) + 0.5) / count


def statistics_of(trajectories: Trajectories, tokens_max: int) -> TrajectoryStatistics:
    """Return the columns of table 2 for trajectories."""
    turns = np.diff(trajectories.start)
    first, last = trajectories.start[:-1], trajectories.start[1:] - 1
    appended = trajectories.prompt - trajectories.cached
    return TrajectoryStatistics(
        tokens_max=tokens_max,
        turns=float(turns.mean()),
        appended=float((np.add.reduceat(appended, first) / turns).mean()),
        generated=float((np.add.reduceat(trajectories.generated, first) / turns).mean()),
        total=float((trajectories.prompt + trajectories.generated)[last].mean()),
        context=float(trajectories.cached.mean()),
    )


def _first_guess(wanted: TrajectoryStatistics) -> _Parameters:
    """Return parameters that would be right without rounding and noise."""
    tokens = wanted.appended + wanted.generated
    spread = float(np.sqrt(np.log(tokens * wanted.turns / wanted.total)))
    return _Parameters(
        log_tokens=float(np.log(tokens)) - spread**2 / 2,
        spread=spread,
        full=(wanted.total / wanted.tokens_max - 0.585) / 0.4,
        generated=wanted.generated / tokens,
        growth=wanted.total / wanted.context - 1,
    )


def _corrected(now: _Parameters, measured: TrajectoryStatistics, wanted: TrajectoryStatistics) -> _Parameters:
    """Return the parameters after one damped step towards the wanted statistics."""
    tokens, measured_tokens = wanted.appended + wanted.generated, measured.appended + measured.generated
    log_tokens = float(np.log(tokens / measured_tokens))
    log_turns = float(np.log(wanted.turns / measured.turns))
    return replace(
        now,
        log_tokens=now.log_tokens + 0.7 * log_tokens,
        spread=max(0.1, now.spread + 0.5 * (log_turns + log_tokens) / (2 * now.spread)),
        full=min(max(now.full + 0.8 * (wanted.total - measured.total) / wanted.tokens_max / 0.4, 0.0), 1.0),
        generated=now.generated + 0.8 * (wanted.generated / tokens - measured.generated / measured_tokens),
        growth=now.growth * (measured.context / wanted.context) ** 1.2,
    )


def _error(measured: TrajectoryStatistics, wanted: TrajectoryStatistics) -> float:
    """Return the largest relative difference of a column."""
    names = ("turns", "appended", "generated", "total", "context")
    return max(abs(float(getattr(measured, name)) / float(getattr(wanted, name)) - 1) for name in names)


def _draw(tokens_max: int, parameters: _Parameters, draws: _Draws) -> Trajectories:
    """Return the trajectories of these parameters."""
    full = draws.runs_full < parameters.full
    low, high = _PARTIAL
    share = np.where(full, _FULL_MIN + (1 - _FULL_MIN) * draws.length, low + (high - low) * draws.length)
    total = tokens_max * share
    turn_tokens = np.exp(parameters.log_tokens + parameters.spread * draws.turn_tokens)
    turns = np.clip(np.round(total / turn_tokens), 2, 4000).astype(np.int64)
    mean = parameters.generated
    generated_share = betaincinv(_SHARE_CONCENTRATION * mean, _SHARE_CONCENTRATION * (1 - mean), draws.generated_share)
    noise = np.random.default_rng(draws.noise_seed).spawn(len(turns))
    pairs = [
        _turns(noise[number], int(turns[number]), float(total[number]), float(generated_share[number]), parameters)
        for number in range(len(turns))
    ]
    start = np.concatenate([[0], np.cumsum(turns)])
    appended, generated = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return Trajectories.growing(appended, generated, start)


def _turns(
    noise: np.random.Generator, turns: int, total: float, generated_share: float, parameters: _Parameters
) -> tuple[IntArray, IntArray]:
    """Return appended and generated tokens of the turns of one trajectory."""
    growth = np.diff(np.linspace(0, 1, turns + 1) ** parameters.growth)
    appended = growth * np.exp(_APPEND_SPREAD * noise.standard_normal(turns))
    generated = np.exp(_GENERATED_SPREAD * noise.standard_normal(turns))
    return (
        _whole(appended / appended.sum() * total * (1 - generated_share)),
        _whole(generated / generated.sum() * total * generated_share),
    )


def _whole(tokens: FloatArray) -> IntArray:
    return np.maximum(1, np.round(tokens)).astype(np.int64)
