"""One answer to be computed, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from kvroute.emulator.prompt import Prompt

Stage: TypeAlias = Literal[
    "new", "queued", "computing", "prefilled", "held", "reserving", "reserved", "decoding", "answered", "gone"
]
"""Prefill: queued, computing, prefilled; then held for a partner until answered. Decode: reserving memory, reserved
(the KV may come), decoding, answered. Gone: nobody wants it any more."""


def _nothing() -> None:
    """Nobody listens."""


@dataclass(slots=True, eq=False)
class Job:
    """`news` is called whenever `stage` or `emitted` has changed."""

    number: int
    prompt: Prompt
    output_tokens: int
    arrived_s: float
    streaming: bool = False
    news: Callable[[], None] = _nothing
    stage: Stage = "new"
    cached_tokens: int = 0
    """Of the prompt, not to be computed (prefill) or fetched (decode)."""
    hit_blocks: int = 0
    """Pinned when memory was reserved."""
    total_blocks: int = 0
    """Reserved, hits included."""
    pinned_blocks: int = 0
    """By a hold."""
    emitted: int = 0
    """Tokens of the answer so far; counted while they come only if `streaming`."""
    entry: int = 0
    """Iteration at whose start it joined the batch."""
    traced: int | None = None
    """Its request's number in the trace, if the client says so."""
    name: str = ""
    """Under which its KV may be asked for before it is computed; empty: it may not."""
    begins_s: float = 0.0
    ends_s: float = 0.0
    """Of its prefill, once it is being computed."""

    @property
    def input_tokens(self) -> int:
        """Of the prompt."""
        return len(self.prompt.tokens)

    def move(self, stage: Stage) -> None:
        """Go on, and tell."""
        self.stage = stage
        self.news()


class Door(Protocol):
    """Who hands KV out, and is told what becomes of it."""

    def computing(self, job: Job) -> None:
        """A job that has a name is being computed, from `begins_s` to `ends_s`."""

    def held(self, key: str) -> None:
        """KV is complete, and held under this key."""

    def given_up(self, name: str) -> None:
        """The KV of a named job will not be complete."""
