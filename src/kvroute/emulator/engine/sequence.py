"""One output sequence to compute, and its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from kvroute.emulator.clock import Alarm
from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.prefix import Evicted

Stage: TypeAlias = Literal[
    "new",
    "queued",
    "computing",
    "prefilled",
    "held",
    "reserving",
    "reserved",
    "chunked",
    "decoding",
    "answered",
    "gone",
]
"""Prefill: queued, computing, prefilled, then held for the decode leg until answered. Decode: reserving memory,
reserved (the KV may arrive), decoding, answered; chunked before decoding if the prompt is computed beside the batch.
Gone: cancelled."""


def _nothing() -> None:
    """Do nothing."""


OnKv: TypeAlias = Callable[[EmulatedPrompt | None, int, int, list[Evicted]], None]
"""Called when the cache changes: (prompt, its blocks cached before, its blocks cached now, evicted blocks)."""


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One output sequence. `on_change` is called after every change of `stage` or `emitted`."""

    number: int
    prompt: EmulatedPrompt
    output_tokens: int
    arrived_s: float
    streaming: bool = False
    on_change: Callable[[], None] = _nothing
    stage: Stage = "new"
    cached_tokens: int = 0
    """Prompt tokens that are not computed (prefill) or not fetched (decode)."""
    hit_blocks: int = 0
    """Cached blocks that were pinned when memory was reserved."""
    total_blocks: int = 0
    """Reserved blocks, hits included."""
    kv_stored: bool = False
    """Whether the KV of the prompt is in the reserved blocks."""
    pinned_blocks: int = 0
    """Blocks that are pinned while the KV is held."""
    emitted: int = 0
    """Output tokens so far. Updated in the batch only if `streaming`."""
    entry: int = 0
    """Iteration at whose start the sequence joined the batch."""
    traced: int | None = None
    """Number of the request in the trace, if the client sends it."""
    name: str = ""
    """Key under which the KV may be requested before it is computed; empty: it may not."""
    begins_s: float = 0.0
    ends_s: float = 0.0
    """End of the prefill; set, like `begins_s`, when the prefill starts."""

    @property
    def input_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt.tokens)

    def set_stage(self, stage: Stage) -> None:
        """Set the stage and call `on_change`."""
        self.stage = stage
        self.on_change()

    @property
    def computed(self) -> bool:
        """Whether the prompt of a sequence that was in stage `chunked` is complete."""
        return self.stage != "chunked"


class KvListener(Protocol):
    """Serves KV and is notified when the state of the KV changes."""

    def computing(self, sequence: EngineSequence) -> None:
        """Notify that the prefill of a named sequence runs from `begins_s` to `ends_s`."""

    def held(self, key: str) -> None:
        """Notify that KV is complete and held under this key."""

    def given_up(self, name: str) -> None:
        """Notify that the KV of a named sequence will not be complete."""


@dataclass(slots=True, eq=False)
class HeldKv:
    """KV that is held until a decode leg fetches it."""

    job: EngineSequence
    expiry: Alarm | None = None
