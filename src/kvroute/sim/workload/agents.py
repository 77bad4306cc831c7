"""Sessions of agents that call a model turn by turn, in an open loop (on a schedule) or a closed loop (each turn starts
when the outputs that it needs are complete).

A turn waits for other turns of its session: the previous one, and the sub-agents whose results its prompt contains.
This module reads no files and does not depend on clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvroute.sim.workload.trace import Loop, Trace, TracedRequest
from kvroute.types import InputError

SESSION_EVERY_S = 30.0
"""Mean time between the starts of two sessions, if no rate is given."""
THINK_MAX_S = 60.0
"""Maximum pause. Longer ones are cut: users leave in the middle of a session, and a run would last for days."""
RAMP_S = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model."""

    input_tokens: int
    output_tokens: int
    runs: tuple[tuple[int, int], ...]
    """Blocks of the prompt as (first id, count); an id identifies the prompt up to and including its block."""
    after: tuple[int, ...]
    """Earlier turns of the session that this one waits for; empty: it starts with the session."""
    think_s: float
    """Time from the last of these outputs to this turn: tools run, or a user reads."""
    answer_s: float
    """Recorded duration of the output; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session: its turns, each after those that it waits for."""

    name: str
    block_tokens: int
    turns: tuple[Turn, ...]
    shares_ids: bool = False
    """True if equal ids of other such sessions mean equal prompts; otherwise ids belong to this session only."""

    def starts_s(self, think_max_s: float, *, answered: bool) -> list[float]:
        """Return the start of each turn from the session's start, with recorded output durations (`answered`) or with
        none."""
        starts: list[float] = []
        for turn in self.turns:
            ends = (starts[awaited] + self.turns[awaited].answer_s * answered for awaited in turn.after)
            starts.append(max(ends, default=0.0) + min(turn.think_s, think_max_s))
        return starts

    @property
    def last(self) -> tuple[int, ...]:
        """Turns that no other turn waits for."""
        awaited = {number for turn in self.turns for number in turn.after}
        return tuple(number for number in range(len(self.turns)) if number not in awaited)

    def uncached_tokens(self) -> list[int]:
        """Tokens of each prompt that an infinite cache would not contain, with the turns in order."""
        ends: dict[int, int] = {}
        uncached = []
        for turn in self.turns:
            hit, whole = 0, True
            for first, count in turn.runs:
                seen = min(max(ends.get(first, first) - first, 0), count)
                hit += seen if whole else 0
                whole = whole and seen == count
                ends[first] = max(ends.get(first, 0), first + count)
            uncached.append(max(turn.input_tokens - hit * self.block_tokens, 0))
        return uncached

    def within(self, input_tokens: int) -> Session:
        """Return the session up to its first longer prompt, without that turn and the turns that wait for it."""
        kept: dict[int, int] = {}
        turns: list[Turn] = []
        for number, turn in enumerate(self.turns):
            if turn.input_tokens <= input_tokens and all(awaited in kept for awaited in turn.after):
                kept[number] = len(turns)
                turns.append(replace(turn, after=tuple(kept[awaited] for awaited in turn.after)))
        return replace(self, turns=tuple(turns))

    @property
    def id_end(self) -> int:
        """Smallest number above all block ids."""
        return max((first + count for turn in self.turns for first, count in turn.runs), default=0)


@dataclass(frozen=True, slots=True)
class User:
    """A user that plays sessions one after the other, from a start time on."""

    from_s: float
    sessions: tuple[int, ...]
    """Positions in `Agents.sessions`."""
    until_s: float = math.inf
    """Latest start of a turn."""


@dataclass(frozen=True, slots=True)
class Agents:
    """Recorded sessions. Each becomes requests once, in an order and at a rate that the caller chooses."""

    name: str
    sessions: tuple[Session, ...]
    remarks: tuple[str, ...] = field(default=(), compare=False)
    """Corrections made when the sessions were read, in sentences for the user."""

    @property
    def turns(self) -> int:
        """Number of turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    def within(self, input_tokens: int) -> Agents:
        """Return every session up to its first prompt of more tokens, without the sessions that start with a longer
        prompt.

        Raises:
            InputError: none is left.
        """
        cut = (session.within(input_tokens) for session in self.sessions)
        sessions = tuple(session for session in cut if session.turns)
        if not sessions:
            what = f"the first prompt of every session has more than {input_tokens} tokens"
            raise InputError(what, where=self.name, hint="allow longer prompts")
        return replace(self, sessions=sessions)

    def think_s(self, think_max_s: float = THINK_MAX_S) -> float:
        """Mean pause before a turn, in seconds."""
        pauses = [min(turn.think_s, think_max_s) for session in self.sessions for turn in session.turns]
        return float(np.mean(pauses))

    def shuffled(self, seed: int, turns: int | None = None) -> tuple[int, ...]:
        """Return positions of the sessions in random order; with `turns`, the shortest prefix that has at least so many
        turns."""
        order = np.random.default_rng([seed, 0]).permutation(len(self.sessions)).tolist()
        if turns is None:
            return tuple(order)
        ends = np.cumsum([len(self.sessions[session].turns) for session in order])
        return tuple(order[: int(np.searchsorted(ends, turns)) + 1])

    def open_loop(
        self, *, seed: int, rate_per_s: float | None = None, think_max_s: float = THINK_MAX_S, turns: int | None = None
    ) -> Trace:
        """Play the sessions in an open loop: they start at independent random times, and their turns start as recorded,
        regardless of when earlier outputs end.

        Args:
            seed: seed of order and starts.
            rate_per_s: turns per second of all sessions together, in the long run; None: SESSION_EVERY_S.
            think_max_s: longer pauses are cut to this.
            turns: number of turns, the first ones to arrive; None: all.

        Raises:
            InputError: a rate or a number that is not positive, a pause below zero.
        """
        _check(("rate_per_s", rate_per_s), ("turns", turns))
        _check_think(think_max_s)
        order = self.shuffled(seed)
        every_s = SESSION_EVERY_S if rate_per_s is None else self.turns / len(order) / rate_per_s
        starts = np.cumsum(np.random.default_rng([seed, 1]).exponential(every_s, len(order)))
        starts -= starts[0]
        rows = sorted(
            (start_s + at_s, position, number)
            for position, start_s in zip(order, starts.tolist(), strict=True)
            for number, at_s in enumerate(self.sessions[position].starts_s(think_max_s, answered=True))
        )
        requests = self._requests(rows[:turns])
        return Trace(self.name, tuple(requests), self.remarks)

    def closed_loop(
        self,
        users: int,
        *,
        seed: int,
        think_max_s: float = THINK_MAX_S,
        ramp_s: float = RAMP_S,
        turns: int | None = None,
    ) -> Trace:
        """Play the sessions in a closed loop: each user begins its next session when the outputs of the previous one
        are complete.

        Args:
            users: number of concurrent sessions.
            seed: seed of the order of sessions and of the users' first starts.
            think_max_s: longer pauses are cut to this; 0: turns follow at once.
            ramp_s: time within which all users begin.
            turns: minimum number of turns, rounded up to whole sessions; None: all.

        Raises:
            InputError: a number that is not positive, a time below zero.
        """
        _check(("users", users), ("turns", turns))
        _check_think(ramp_s, "ramp_s")
        order = self.shuffled(seed, turns)
        begins = np.sort(np.random.default_rng([seed, 1]).uniform(0.0, ramp_s, users)).tolist()
        return self.varying_users(
            [User(at_s, order[k::users]) for k, at_s in enumerate(begins)], think_max_s=think_max_s
        )

    def varying_users(self, users: Sequence[User], *, think_max_s: float = THINK_MAX_S) -> Trace:
        """Return a closed loop of these users, who share no session.

        A request's time in the trace is its start if outputs took no time; turns that would be too late even then are
        left out.
        """
        _check_think(think_max_s)
        rows: list[tuple[float, int, int, int]] = []
        waits: dict[tuple[int, int], tuple[list[tuple[int, int]], float, float]] = {}
        for user in users:
            begins_s, before = user.from_s, list[tuple[int, int]]()
            for position in user.sessions:
                assert (position, 0) not in waits, "a session can be played only once"
                session = self.sessions[position]
                starts = session.starts_s(think_max_s, answered=False)
                for number, turn in enumerate(session.turns):
                    if begins_s + starts[number] > user.until_s:
                        continue
                    pause_s = min(turn.think_s, think_max_s)
                    rows.append((begins_s + starts[number], len(rows), position, number))
                    if turn.after:
                        waits[position, number] = (
                            [(position, awaited) for awaited in turn.after],
                            pause_s,
                            user.until_s,
                        )
                    else:
                        waits[position, number] = (before, pause_s if before else begins_s + pause_s, user.until_s)
                before = [(position, number) for number in session.last]
                begins_s += max(starts[number] for number in session.last)
                if begins_s > user.until_s:
                    break
        rows.sort()  # turns of a user keep their order if zero output durations make them start at once
        where = {(position, number): place for place, (_, _, position, number) in enumerate(rows)}
        loop = Loop(
            after=tuple(tuple(where[awaited] for awaited in waits[p, n][0]) for _, _, p, n in rows),
            think_s=tuple(waits[p, n][1] for _, _, p, n in rows),
            until_s=tuple(waits[p, n][2] for _, _, p, n in rows),
        )
        requests = self._requests([(at_s, position, number) for at_s, _, position, number in rows])
        return Trace(self.name, tuple(requests), self.remarks, loop)

    def _requests(self, rows: Sequence[tuple[float, int, int]]) -> list[TracedRequest]:
        """Return the requests of (time, session, turn); block ids of one session are the same objects."""
        first_ids = self._first_ids()
        ids: dict[int, list[int]] = {}
        requests = []
        for at_s, position, number in rows:
            session = self.sessions[position]
            if position not in ids:
                ids[position] = list(range(first_ids[position], first_ids[position] + session.id_end))
            known, turn = ids[position], session.turns[number]
            chain = tuple(block_id for first, count in turn.runs for block_id in known[first : first + count])
            requests.append(TracedRequest(at_s, turn.input_tokens, turn.output_tokens, chain, session.block_tokens))
        return requests

    def _first_ids(self) -> list[int]:
        """Return the offset of each session's ids: shared ids stay, the others come after them."""
        end = max((session.id_end for session in self.sessions if session.shares_ids), default=0)
        firsts = []
        for session in self.sessions:
            firsts.append(0 if session.shares_ids else end)
            end += 0 if session.shares_ids else session.id_end
        return firsts


def _check(*numbers: tuple[str, float | None]) -> None:
    for name, number in numbers:
        if number is not None and not 0 < number < math.inf:
            raise InputError(f"{number} is not positive", where=name, hint="give more than 0")


def _check_think(seconds: float, name: str = "think_max_s") -> None:
    if not seconds >= 0:
        raise InputError(f"{seconds} is not a valid time", where=name, hint="give seconds, 0 or more")
