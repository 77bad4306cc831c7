"""Sessions of agents in the PrfaaS experiments: a closed loop of so many users that they ask for a share of what the
plan promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from kvroute.experiments.prfaas_case import ITERATION_S, MOST
from kvroute.planner.lengths import Lengths, grouped
from kvroute.planner.search import Deployment
from kvroute.sim.metrics import Outcomes
from kvroute.sim.workload import THINK_MAX_S, Agents, Trace, User

RAMP_S, FROM_S, END_S = 300.0, 600.0, 1_500.0
"""Of `prfaas-case-study`: users begin until the first, the second begins what is measured, the last ends the run."""

_SPARE = 3.0
"""A user has so many times the sessions that last as long as a run, as recorded, since some are short."""


def in_profile(agents: Agents) -> Agents:
    """Sessions up to their first prompt that is longer than any of the published profile."""
    return agents.within(MOST)


def agent_lengths(agents: Agents, step_tokens: int = 100) -> Lengths:
    """What a cache without limit leaves to compute of every prompt."""
    tokens = [max(each, 1) for session in agents.sessions for each in session.uncached_tokens()]
    whole = sum(turn.input_tokens for session in agents.sessions for turn in session.turns)
    about = f"{agents.name}, {1 - sum(tokens) / whole:.1%} of its tokens cached"
    return grouped(np.array(tokens, dtype=np.float64), np.ones(len(tokens)), step_tokens, about)


def answer_tokens(agents: Agents) -> float:
    """Mean length of an answer."""
    return float(np.mean([turn.output_tokens for session in agents.sessions for turn in session.turns]))


def cycle_s(agents: Agents, found: Deployment) -> float:
    """From one turn of a user to the next, where nothing waits: prefill, answer and pause, mean."""
    return found.ttft_s.mean + answer_tokens(agents) * ITERATION_S + agents.think_s()


def users_for(agents: Agents, found: Deployment, load: float) -> int:
    """As many as ask for `load` times the planned throughput as long as nothing waits (Little's law)."""
    return max(round(load * found.lambda_max_per_s * cycle_s(agents, found)), 1)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Users who begin at random times of `ramp_s` seconds from `from_s` on and stop at `until_s`."""

    users: int
    from_s: float
    ramp_s: float
    until_s: float


def played(agents: Agents, crowds: tuple[Crowd, ...], seed: int, *, places: int) -> Trace:
    """A closed loop of these users, the same sessions for every policy of a seed.

    Sessions are dealt out to `places` users, so that the first ones have theirs whoever comes after; each comes again,
    as nobody's continuation, when all have been played.
    """
    lasts_s = float(np.mean([max(each.starts_s(THINK_MAX_S, answered=True)) for each in agents.sessions]))
    to_s = max(crowd.until_s for crowd in crowds)
    laps = ceil(places * (_SPARE * to_s / max(lasts_s, 1.0) + 2.0) / len(agents.sessions))
    deck = replace(agents, sessions=agents.sessions * laps)
    order, users = deck.shuffled(seed), list[User]()
    for number, crowd in enumerate(crowds):
        begins = np.sort(np.random.default_rng([seed, 2, number]).uniform(0.0, crowd.ramp_s, crowd.users))
        for begins_s in (crowd.from_s + begins).tolist():
            users.append(User(begins_s, order[len(users) :: places], crowd.until_s))
    assert len(users) <= places, "more users than places"
    return deck.played(users)


def answered_per_s(rows: Outcomes, from_s: float, to_s: float) -> float:
    """First tokens per second of this time."""
    inside = (rows.first_token_s >= from_s) & (rows.first_token_s < to_s)
    return float(inside.sum()) / (to_s - from_s)
