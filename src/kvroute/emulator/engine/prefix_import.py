"""A prompt prefix whose KV comes from another instance before the rest is computed: its memory and its cached blocks.

It moves no bytes. Its owner reports whether they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.prefix import Evicted
from kvroute.sim.instances import KvMemory


@dataclass(slots=True, eq=False)
class PrefixImport:
    """Import of the first `blocks` of a prompt. The first call of `transfer_done` or `give_up` ends it."""

    prompt: EmulatedPrompt
    blocks: tuple[int, ...]
    memory: KvMemory
    on_change: Callable[[EmulatedPrompt | None, int, int, list[Evicted]], None]
    """Takes the same arguments as the engine's `on_kv`."""
    on_end: Callable[[], None]
    """Called when the reserved memory is free again."""
    hit: int = field(init=False)
    """Number of blocks that are already cached."""
    _open: bool = field(init=False)

    def __post_init__(self) -> None:
        self.hit = self.memory.index.match_one(0, self.blocks)
        self._open = len(self.blocks) > self.hit and self.memory.has_room(0, self.blocks, self.hit)
        if self._open:
            self._dropped(self.memory.reserve(0, self.blocks, self.hit, len(self.blocks)))

    @property
    def lacking(self) -> int:
        """Number of blocks to import; 0 if all are cached or there is no memory for them."""
        return len(self.blocks) - self.hit if self._open else 0

    def transfer_done(self) -> None:
        """Cache the blocks, all of which have arrived."""
        if self._open:
            self._open = False
            index = self.memory.index
            before = index.match_one(0, self.blocks)
            evicted = self.memory.transfer_done(0, self.blocks, self.hit)
            evicted += self.memory.release(0, self.blocks, len(self.blocks))
            self.on_change(self.prompt, before, index.match_one(0, self.blocks), evicted)
            self.on_end()

    def give_up(self) -> None:
        """End the import without the blocks."""
        if self._open:
            self._open = False
            self._dropped(self.memory.give_up(0, self.blocks, self.hit, len(self.blocks)))
            self.on_end()

    def _dropped(self, evicted: list[Evicted]) -> None:
        if evicted:
            self.on_change(None, 0, 0, evicted)
