"""Agent sessions in the PrfaaS experiments: a closed loop with the number of users that requests a given share of the
planned throughput."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from kvroute.planner.throughput.lengths import Lengths, grouped
from kvroute.planner.throughput.search import PlannedDeployment
from kvroute.sim.metrics import Outcomes
from kvroute.sim.workload import THINK_MAX_S, Agents, Trace, User
from kvroute_studies.prfaas.case_study import ITERATION_S, MOST

RAMP_S, FROM_S, END_S = 300.0, 600.0, 1_500.0
"""Times of `prfaas-case-study`: users start before RAMP_S, the measurement starts at FROM_S, and the run ends at
END_S."""

_SPARE = 3.0
"""Number of sessions per user relative to the number that fills a run at recorded duration; some sessions are short."""


def in_profile(agents: Agents) -> Agents:
    """Cut each session before its first prompt that is longer than any in the published profile."""
    return agents.within(MOST)


def agent_lengths(agents: Agents, step_tokens: int = 100) -> Lengths:
    """Return the tokens of every prompt that an unlimited cache leaves to compute."""
    tokens = [max(prompt_tokens, 1) for session in agents.sessions for prompt_tokens in session.uncached_tokens()]
    whole = sum(turn.input_tokens for session in agents.sessions for turn in session.turns)
    about = f"{agents.name}, {1 - sum(tokens) / whole:.1%} of its tokens cached"
    return grouped(np.array(tokens, dtype=np.float64), np.ones(len(tokens)), step_tokens, about)


def answer_tokens(agents: Agents) -> float:
    """Return the mean length of a response."""
    return float(np.mean([turn.output_tokens for session in agents.sessions for turn in session.turns]))


def cycle_s(agents: Agents, found: PlannedDeployment) -> float:
    """Return the mean time between two turns of a user when nothing queues: prefill, response and pause."""
    return found.ttft_s.mean + answer_tokens(agents) * ITERATION_S + agents.think_s()


def users_for(agents: Agents, found: PlannedDeployment, load: float) -> int:
    """Return the number of users that requests `load` times the planned throughput if nothing queues (Little's law)."""
    return max(round(load * found.lambda_max_per_s * cycle_s(agents, found)), 1)


@dataclass(frozen=True, slots=True)
class UserGroup:
    """Users that start at random times within `ramp_s` seconds after `from_s` and stop at `until_s`."""

    users: int
    from_s: float
    ramp_s: float
    until_s: float


def trace_of_groups(agents: Agents, groups: tuple[UserGroup, ...], seed: int, *, places: int) -> Trace:
    """Return a closed loop of these users, with the same sessions for every policy of a seed.

    Sessions are distributed to `places` users, so the first users get the same sessions however many users follow. When
    all sessions have been played, each is played again, independent of its earlier play.
    """
    lasts_s = float(np.mean([max(session.starts_s(THINK_MAX_S, answered=True)) for session in agents.sessions]))
    to_s = max(group.until_s for group in groups)
    laps = ceil(places * (_SPARE * to_s / max(lasts_s, 1.0) + 2.0) / len(agents.sessions))
    deck = replace(agents, sessions=agents.sessions * laps)
    order, users = deck.shuffled(seed), list[User]()
    for number, group in enumerate(groups):
        begins = np.sort(np.random.default_rng([seed, 2, number]).uniform(0.0, group.ramp_s, group.users))
        for begins_s in (group.from_s + begins).tolist():
            users.append(User(begins_s, order[len(users) :: places], group.until_s))
    assert len(users) <= places, "more users than places"
    return deck.varying_users(users)


def answered_per_s(rows: Outcomes, from_s: float, to_s: float) -> float:
    """Return first tokens per second in [from_s, to_s)."""
    inside = (rows.first_token_s >= from_s) & (rows.first_token_s < to_s)
    return float(inside.sum()) / (to_s - from_s)
