"""Blocks that a prefill instance keeps for others to fetch: until released, or until their time is over. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["held", "unknown", "gone"]
_GONE_MAX = 4096


@dataclass(slots=True)
class _Hold:
    blocks: tuple[int, ...]
    until: float
    readers: int = 0
    released: bool = False


@dataclass(frozen=True, slots=True)
class Freed:
    """A request whose blocks are vLLM's again."""

    request_id: str
    expired: bool
    """Nobody said that they were done with them."""


class Holds:
    """Who holds what until when. A request that is being read is never freed under the reader's hands."""

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, request_id: str, blocks: Sequence[int], until: float) -> None:
        """Keep `blocks`, in the order of the prompt, until the time `until`. A release may have come before."""
        self._holds[request_id] = _Hold(tuple(blocks), until, released=request_id in self._gone)

    def state(self, request_id: str) -> State:
        """`unknown`: not yet heard of; `gone`: freed already."""
        if request_id in self._holds:
            return "gone" if self._holds[request_id].released else "held"
        return "gone" if request_id in self._gone else "unknown"

    def read(self, request_id: str, first: int, count: int) -> tuple[int, ...] | None:
        """Begin to read `count` blocks from position `first`; None if the request holds fewer. End with `leave`."""
        hold = self._holds[request_id]
        if first < 0 or count < 1 or first + count > len(hold.blocks):
            return None
        hold.readers += 1
        return hold.blocks[first : first + count]

    def leave(self, request_id: str) -> None:
        """A reader has ended, well or not."""
        self._holds[request_id].readers -= 1

    def release(self, request_id: str) -> None:
        """Nobody will fetch the request (any more)."""
        if request_id in self._holds:
            self._holds[request_id].released = True
        else:
            self._forget(request_id)

    def freed(self, now: float) -> list[Freed]:
        """Take what is released or over its time; each request once."""
        free = [
            Freed(request_id, expired=not hold.released)
            for request_id, hold in self._holds.items()
            if not hold.readers and (hold.released or now >= hold.until)
        ]
        for one in free:
            del self._holds[one.request_id]
            self._forget(one.request_id)
        return free

    def _forget(self, request_id: str) -> None:
        self._gone[request_id] = None
        if len(self._gone) > _GONE_MAX:
            self._gone.popitem(last=False)
