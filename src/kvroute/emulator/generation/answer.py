"""One answer: its tokens, its end and the tool that it calls. All of it follows from the prompt and the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from kvroute.emulator.generation.constraint import Constraint
from kvroute.emulator.generation.words import Draws, generated_ids, generated_tokens, pieces
from kvroute.emulator.prompt import EmulatedPrompt

Reason: TypeAlias = Literal["stop", "length", "tool_calls"]
SHORTEST_TOKENS, LONGEST_TOKENS = 32, 96
"""Bounds of the number of tokens after which free text ends by itself."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request says about the text of its answers."""

    limit: int | None
    """Most output tokens; None: as many as fit."""
    ignore_eos: bool = False
    """Whether free text goes on to the limit."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    """Whether the text has the stop string or token that ends it."""
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; the text of the answer is its arguments."""

    id: str
    name: str
    named: bool
    """Whether the request names the tool."""


@dataclass(frozen=True, slots=True)
class GeneratedOutput:
    """Output of one choice."""

    prompt: EmulatedPrompt
    choice: int
    tokens: int
    reason: Reason
    stop_reason: str | int | None = None
    """Stop string or token id that ended it."""
    call: ToolCall | None = None
    script: tuple[tuple[bytes, int], ...] | None = None
    """Text and id of each token; None: the words that follow from the prompt."""

    def texts(self) -> Iterator[bytes]:
        """Yield the text of each token."""
        if self.script is not None:
            return iter([text for text, _ in self.script])
        return islice(generated_tokens(self.prompt.seed, self.choice, self.prompt.generated), self.tokens)

    def ids(self) -> Iterator[int]:
        """Yield the id of each token."""
        if self.script is not None:
            return iter([token for _, token in self.script])
        return islice(generated_ids(self.prompt.seed, self.choice, self.prompt.generated), self.tokens)

    def text(self) -> str:
        """Return the text of all tokens."""
        return b"".join(self.texts()).decode()


def natural_tokens(prompt: EmulatedPrompt, choice: int) -> int:
    """Return the number of tokens that are left until free text ends by itself, at least 1."""
    whole = SHORTEST_TOKENS + Draws.of(prompt.seed, choice).below(LONGEST_TOKENS - SHORTEST_TOKENS + 1)
    return max(whole - prompt.generated, 1)


def answer_to(prompt: EmulatedPrompt, choice: int, sampling: Sampling, room: Callable[[int], int]) -> GeneratedOutput:
    """Return answer `choice` to a prompt. `room` returns how many of a number of output tokens fit.

    Raises:
        ApiError: no text satisfies the constraint.
    """
    if sampling.constraint is not None:
        return _constrained(prompt, choice, sampling, sampling.constraint, room)
    limit = sampling.limit
    if sampling.ignore_eos:
        answer = GeneratedOutput(prompt, choice, room(1 << 31) if limit is None else limit, "length")
    else:
        wanted = max(natural_tokens(prompt, choice), sampling.min_tokens)
        limit = room(wanted) if limit is None else limit
        answer = GeneratedOutput(prompt, choice, min(wanted, limit), "stop" if wanted <= limit else "length")
    if sampling.stop or sampling.stop_token_ids:
        return _stopped(answer, zip(answer.texts(), answer.ids(), strict=True), sampling)
    return answer


def _constrained(
    prompt: EmulatedPrompt, choice: int, sampling: Sampling, constraint: Constraint, room: Callable[[int], int]
) -> GeneratedOutput:
    draws, tool = Draws.of(prompt.seed, choice), constraint.tool
    script = pieces(constraint.text(draws).encode())
    call: ToolCall | None = None
    if tool is not None:
        call_id = f"call_{draws.below(1 << 31):08x}{draws.below(1 << 31):08x}"
        call = ToolCall(call_id, tool.name, constraint.named)
        script = [(b"", pieces(tool.name.encode() or b"-")[0][1]), *script]
    limit = room(len(script)) if sampling.limit is None else sampling.limit
    kept = tuple(script[:limit]) or ((b"", pieces(b"\n")[0][1]),)
    complete: Reason = "stop" if call is None else "tool_calls"
    reason = complete if len(script) <= limit else "length"
    answer = GeneratedOutput(prompt, choice, len(kept), reason, call=call, script=kept)
    if call is None and (sampling.stop or sampling.stop_token_ids):
        return _stopped(answer, kept, sampling)
    return answer


def _stopped(answer: GeneratedOutput, tokens: Iterable[tuple[bytes, int]], sampling: Sampling) -> GeneratedOutput:
    """Return the answer up to its first stop string or token."""
    kept, text, checked = list[tuple[bytes, int]](), "", 0
    longest = max(map(len, sampling.stop), default=0)
    for piece, token in tokens:
        kept.append((piece, token))
        text += piece.decode()
        if len(kept) <= sampling.min_tokens:
            checked = len(text)
            continue
        if token in sampling.stop_token_ids:
            shown = text if sampling.include_stop else text[: len(text) - len(piece.decode())]
            return _ended(answer, kept, shown, token)
        places = [(text.find(stop, max(checked - longest + 1, 0)), stop) for stop in sampling.stop]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is not None:
            at, stop = found
            return _ended(answer, kept, text[: at + len(stop) * sampling.include_stop], stop)
        checked = len(text)
    return answer


def _ended(
    answer: GeneratedOutput, kept: list[tuple[bytes, int]], shown: str, stop_reason: str | int
) -> GeneratedOutput:
    """Return the answer with these tokens and only the beginning of their text."""
    left, script = len(shown), list[tuple[bytes, int]]()
    for piece, token in kept:
        part = piece.decode()[:left]
        left -= len(part)
        script.append((part.encode(), token))
    return GeneratedOutput(answer.prompt, answer.choice, len(script), "stop", stop_reason, answer.call, tuple(script))
