"""Recorded sessions of coding agents, one JSON object each: as kv-cache-tester writes them, or with runs of block ids.

Both formats hold the same data. The main turns of a session follow each other. The entry of a sub-agent is at the place
where its result returned, `duration` after its start; a sub-agent without a duration ran in parallel to the session.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from kvroute.sim.workload.agents import Session, Turn

_LONGEST_TOKENS = 100_000_000
_LARGEST_ID = (1 << 63) - 1

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_ID)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_LONGEST_TOKENS)]
_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LONGEST_TOKENS)]
_LENGTHS = {"input_tokens": "in", "output_tokens": "out"}
_Runs: TypeAlias = tuple[tuple[int, int], ...]


class _Entry(msgspec.Struct, rename=_LENGTHS | {"runs": "h", "duration_ms": "dur_ms", "nested": "sub"}):
    """A turn, or a sub-agent with its own turns."""

    t: _Seconds
    input_tokens: _Size = 0
    output_tokens: _Length = 0
    runs: list[_Id] = []
    """Alternating first ids and counts."""
    api: _Seconds | None = None
    think: _Seconds | None = None
    duration_ms: _Seconds | None = None
    nested: list[_Entry] | None = None

    def blocks(self) -> _Runs:
        if len(self.runs) % 2 or not all(self.runs[1::2]):
            raise ValueError("field h: the ids are not pairs of a first id and a count above 0")
        return tuple(zip(self.runs[::2], self.runs[1::2], strict=True))


class _RawEntry(msgspec.Struct, rename=_LENGTHS | {"api": "api_time", "think": "think_time", "nested": "requests"}):
    """The same entry in the format of the capture."""

    t: _Seconds
    input_tokens: _Size = 0
    output_tokens: _Length = 0
    hash_ids: list[_Id] = []
    api: _Seconds | None = None
    think: _Seconds | None = None
    duration_ms: _Seconds | None = None
    nested: list[_RawEntry] | None = None

    def blocks(self) -> _Runs:
        return tuple((hash_id, 1) for hash_id in self.hash_ids)


class _Line(msgspec.Struct, rename={"name": "id", "block_tokens": "bs", "entries": "req"}):
    name: str
    block_tokens: _Size
    entries: Annotated[list[_Entry], msgspec.Meta(min_length=1)]
    scope: str = "local"


class _RawLine(
    msgspec.Struct,
    rename={"name": "id", "block_tokens": "block_size", "entries": "requests", "scope": "hash_id_scope"},
):
    name: str
    block_tokens: _Size
    entries: Annotated[list[_RawEntry], msgspec.Meta(min_length=1)]
    scope: str = "local"


class _Keys(msgspec.Struct):
    req: msgspec.Raw = msgspec.Raw()
    requests: msgspec.Raw = msgspec.Raw()


_keys = msgspec.json.Decoder(_Keys).decode
_line = msgspec.json.Decoder(_Line).decode
_raw_line = msgspec.json.Decoder(_RawLine).decode


def is_session(line: bytes) -> bool:
    """Return True if a line is meant as a session, valid or not."""
    try:
        keys = _keys(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return bool(bytes(keys.req) or bytes(keys.requests))


def session(line: bytes) -> Session:
    """Parse the session of one line. Raises ValueError with the reason for an invalid session, and msgspec's error for
    a wrong field."""
    keys = _keys(line)
    found = _line(line) if bytes(keys.req) else _raw_line(line)
    if found.scope not in ("local", "global"):
        raise ValueError(f"field hash_id_scope: {found.scope!r} is neither local nor global")
    turns = _Turns(found.block_tokens)
    turns.add(found.entries, 0.0, None)
    if not turns.made:
        raise ValueError("the session has no turns")
    return Session(found.name, found.block_tokens, tuple(turns.made), found.scope == "global")


@dataclass(frozen=True, slots=True)
class _Branch:
    """A sub-agent that the session's next turn may wait for."""

    last: int
    began_s: float
    back: bool
    """True if its result returned at the place of its entry."""


class _Turns:
    """Builds the turns of a session, each after those that it waits for."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chains = _Chains()
        self._end_s: list[float] = []
        self.made: list[Turn] = []

    def add(self, entries: Sequence[_Entry | _RawEntry], from_s: float, parent: int | None) -> int | None:
        """Add the turns of a session, or of a sub-agent that started at `from_s` after `parent`; return the last of
        them."""
        before, branches = parent, list[int]()
        for place, entry in enumerate(entries):
            if entry.nested is None:
                after = branches if before is None else [before, *branches]
                # The recorded pause starts at the turn before, so it does not apply if the turn also waits for
                # branches.
                pause_s = entry.think if before != parent and not branches else None
                before, branches = self._turn(entry, from_s + entry.t, after, pause_s, _gap_s(entries, place)), []
                continue
            began_s = _began_s(entry, from_s)
            # Times within a sub-agent are relative to its start, in some files to the start of the session.
            within = 0.0 if entry.nested and 0.0 < began_s <= entry.nested[0].t + 1.0 else began_s
            last = self.add(entry.nested, within, before)
            if last is not None and last != before and entry.duration_ms is not None:
                branches.append(last)
        return before

    def _turn(
        self, entry: _Entry | _RawEntry, at_s: float, after: Sequence[int], pause_s: float | None, gap_s: float | None
    ) -> int:
        number = len(self.made)
        try:
            if not entry.input_tokens:
                raise ValueError("field in: the prompt has no tokens")
            runs = self._chains.checked(entry.blocks(), entry.input_tokens, self._block_tokens)
        except ValueError as error:
            raise ValueError(f"turn {number}, {error}") from None
        ready_s = max((self._end_s[turn] for turn in after), default=0.0)
        think_s = max(at_s - ready_s, 0.0) if pause_s is None else pause_s
        answer_s = entry.api if entry.api is not None else gap_s or 0.0
        self.made.append(Turn(entry.input_tokens, entry.output_tokens, runs, tuple(after), think_s, answer_s))
        self._end_s.append(at_s + answer_s)
        return number


def _began_s(entry: _Entry | _RawEntry, from_s: float) -> float:
    """Return the start of a sub-agent. Its entry has the time of its result, or of its start if it has no duration."""
    return max(from_s + entry.t - (entry.duration_ms or 0.0) / 1e3, from_s)


def _gap_s(entries: Sequence[_Entry | _RawEntry], place: int) -> float | None:
    """Return the time that the next turn leaves for an output of unknown duration; None if the next turn does not give
    it."""
    if place + 1 == len(entries) or (after := entries[place + 1]).nested is not None or after.think is None:
        return None
    return max(after.t - entries[place].t - after.think, 0.0)


class _Chains:
    """Checks the block ids of one session. An id also stands for all blocks before it, which must be equal in every
    prompt."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        """Ids whose predecessor in the prompt is not the number below, ascending."""
        self._before: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def checked(self, pairs: _Runs, input_tokens: int, block_tokens: int) -> _Runs:
        """Merge runs to as few as possible. Raises ValueError for ids that do not fit."""
        runs, count = list[tuple[int, int]](), sum(length for _, length in pairs)
        due = -(-input_tokens // block_tokens)
        if count not in (0, input_tokens // block_tokens, due):
            what = f"{count} ids instead of {due} for {input_tokens} tokens in blocks of {block_tokens}"
            raise ValueError(f"field hash_ids: {what}")
        for first, length in pairs:
            if runs and sum(runs[-1]) == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((first, length))
        before = -1
        for first, length in runs:
            self._note(first, first + length, before)
            before = first + length - 1
        return tuple(runs)

    def _note(self, first: int, end: int, before: int) -> None:
        place = bisect_left(self._firsts, first)
        known = self._before.get(first)
        if known is None:
            if place and self._ends[self._firsts[place - 1]] > first:
                known = first - 1
            self._firsts.insert(place, first)
            self._before[first] = before
        if known is not None and known != before:
            raise _unchained(first, before, known)
        if place + 1 < len(self._firsts) and (other := self._firsts[place + 1]) < end:
            raise _unchained(other, other - 1, self._before[other])
        self._ends[first] = max(end, self._ends.get(first, 0))


def _unchained(block: int, here: int, there: int) -> ValueError:
    before = [f"follows {turn}" if turn >= 0 else "comes first" for turn in (here, there)]
    what = f"block {block} {before[0]} in one prompt and {before[1]} in another, but an id identifies the whole prefix"
    return ValueError(f"field hash_ids: {what}")
