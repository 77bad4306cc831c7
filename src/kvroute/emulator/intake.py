"""The beginning of a prompt that comes from another instance before the rest is computed: its room, and what is cached
of it. It moves no bytes; whoever does says whether they are here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvroute.emulator.prompt import Prompt
from kvroute.prefix import Evicted
from kvroute.sim.instances import KvMemory


@dataclass(slots=True, eq=False)
class Intake:
    """The first `blocks` of a prompt on their way; ends by the first of `land` and `give_up`."""

    prompt: Prompt
    blocks: tuple[int, ...]
    memory: KvMemory
    on_change: Callable[[Prompt | None, int, int, list[Evicted]], None]
    """As the engine's `on_kv`."""
    on_end: Callable[[], None]
    """Room is free again."""
    hit: int = field(init=False)
    """Blocks that are here already."""
    _open: bool = field(init=False)

    def __post_init__(self) -> None:
        self.hit = self.memory.index.match_one(0, self.blocks)
        self._open = len(self.blocks) > self.hit and self.memory.has_room(0, self.blocks, self.hit)
        if self._open:
            self._dropped(self.memory.reserve(0, self.blocks, self.hit, len(self.blocks)))

    @property
    def lacking(self) -> int:
        """Blocks that are to come: none where all are here, or where there is no room for them."""
        return len(self.blocks) - self.hit if self._open else 0

    def land(self) -> None:
        """All of them are here: cached from now on, like any other."""
        if self._open:
            self._open = False
            index = self.memory.index
            before = index.match_one(0, self.blocks)
            evicted = self.memory.land(0, self.blocks, self.hit)
            evicted += self.memory.release(0, self.blocks, len(self.blocks))
            self.on_change(self.prompt, before, index.match_one(0, self.blocks), evicted)
            self.on_end()

    def give_up(self) -> None:
        """They will not come."""
        if self._open:
            self._open = False
            self._dropped(self.memory.give_up(0, self.blocks, self.hit, len(self.blocks)))
            self.on_end()

    def _dropped(self, evicted: list[Evicted]) -> None:
        if evicted:
            self.on_change(None, 0, 0, evicted)
