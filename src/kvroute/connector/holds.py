"""Blocks that a prefill instance keeps for others to fetch, computed or being computed: until released, or until their
time is over. Pure; the caller locks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvroute.connector.stripes import Stripe
from kvroute.types import InputError

State = Literal["held", "unknown", "gone"]
Fence: TypeAlias = Callable[[], None]
"""Returns when the device has written what it was told to write before the fence was made."""
_GONE_MAX = 4096


@dataclass(slots=True, eq=False)
class Hold:
    """One request's blocks in the order of its prompt. While they are being computed, only what is `ready` is sent."""

    blocks: tuple[int, ...]
    owner: str
    """vLLM's name of the request; peers may know it by another."""
    until: float = 0.0
    ready: list[int] | None = None
    """Blocks that are computed, by region; None: all."""
    fences: dict[int, Fence] = field(default_factory=dict)
    """By region; none where a computed block is written already."""
    prompt: str = ""
    """Digest of the prompt, to be compared with the peers'; empty: not known."""
    stripes: dict[str, Stripe] = field(default_factory=dict)
    """By the transfer's name."""
    readers: int = 0
    released: bool = False
    stopped: bool = False
    """The content is not to be trusted: readers must leave."""

    @property
    def computing(self) -> bool:
        """Whether vLLM still works on it."""
        return self.ready is not None


@dataclass(frozen=True, slots=True)
class Computing:
    """A request that is being computed, as of one step: the prompt's first `ready` blocks are complete after it."""

    name: str
    """By which peers ask for it."""
    owner: str
    blocks: tuple[int, ...]
    ready: int
    prompt: str = ""
    """Digest of the prompt, for peers that ask before they are told."""


@dataclass(frozen=True, slots=True)
class Freed:
    """A request whose blocks are vLLM's again."""

    request_id: str
    expired: bool
    """Nobody said that they were done with them."""


class Holds:
    """Who holds what until when. A request that is being read is never freed under the reader's hands."""

    def __init__(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._not_kept: list[Freed] = []
        """Requests whose name another one has; their blocks are vLLM's again at once."""

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, request_id: str, blocks: Sequence[int], until: float, owner: str = "", prompt: str = "") -> None:
        """All of `blocks`, in the order of the prompt, are computed; keep them until the time `until`.

        A release may have come before. Where another request holds the same prompt under this name, its blocks serve
        for both, and these are freed.

        Args:
            owner: vLLM's name of the request, where that is another.
            prompt: digest of the prompt.

        Raises:
            InputError: something else is held under this name; it stays, and these blocks are freed.
        """
        hold = self._holds.get(request_id)
        if hold is None:
            hold = self._new(request_id, owner)
        elif hold.owner != (owner or request_id):
            self._not_kept.append(Freed(owner or request_id, expired=False))
            if not prompt or prompt != hold.prompt:
                raise _taken(request_id, hold)
            hold.until = max(hold.until, until)
            return
        elif not hold.computing and hold.blocks != tuple(blocks):
            raise _taken(request_id, hold)
        hold.blocks, hold.until, hold.ready, hold.prompt = tuple(blocks), until, None, prompt
        hold.fences.clear()  # the request's last step has ended before vLLM says that it is over

    def computed(self, step: Computing, regions: int, done: Iterable[int], fence: Fence | None = None) -> None:
        """Of `regions` regions, the step has computed those that are `done`, on a device once `fence` is passed."""
        hold = self._holds.get(step.name)
        if hold is None:
            hold = self._new(step.name, step.owner)
            hold.ready, hold.prompt = [0] * regions, step.prompt
        if hold.ready is None or hold.owner != step.owner:
            return
        if len(step.blocks) > len(hold.blocks):
            hold.blocks = step.blocks
        for region in done:
            if step.ready > hold.ready[region]:
                hold.ready[region] = step.ready
                if fence:
                    hold.fences[region] = fence

    def state(self, request_id: str) -> State:
        """`unknown`: not yet heard of; `gone`: freed already."""
        if request_id in self._holds:
            hold = self._holds[request_id]
            return "gone" if hold.released or hold.stopped else "held"
        return "gone" if request_id in self._gone else "unknown"

    def read(self, request_id: str, first: int, count: int) -> Hold | None:
        """Begin to read `count` blocks from position `first`; None if the request holds fewer. End with `leave`."""
        hold = self._holds[request_id]
        if first < 0 or count < 1 or (first + count > len(hold.blocks) and not hold.computing):
            return None
        hold.readers += 1
        return hold

    def leave(self, hold: Hold) -> None:
        """A reader has ended, well or not."""
        hold.readers -= 1

    def release(self, request_id: str) -> None:
        """Nobody will fetch the request (any more)."""
        if request_id in self._holds:
            self._holds[request_id].released = True
        else:
            self._forget(request_id)

    def drop(self, request_id: str, owner: str) -> None:
        """vLLM has given the request up; it wants the blocks back when the readers have left."""
        hold = self._holds.get(request_id) or self._new(request_id, owner)
        if hold.owner != owner:
            self._not_kept.append(Freed(owner, expired=False))
            return
        hold.released = hold.stopped = True
        hold.ready = None

    def withdraw(self, request_id: str) -> Hold | None:
        """vLLM has taken the blocks back already: forget the request. The caller must see to it that readers leave."""
        hold = self._holds.pop(request_id, None)
        if hold:
            hold.stopped = True
            self._forget(request_id)
        return hold

    def freed(self, now: float) -> list[Freed]:
        """Take what is released or over its time; each request once."""
        free = [
            (request_id, hold)
            for request_id, hold in self._holds.items()
            if not hold.readers and not hold.computing and (hold.released or now >= hold.until)
        ]
        for request_id, _ in free:
            del self._holds[request_id]
            self._forget(request_id)
        not_kept, self._not_kept = self._not_kept, []
        return not_kept + [Freed(hold.owner, expired=not hold.released) for _, hold in free]

    def _new(self, request_id: str, owner: str) -> Hold:
        hold = Hold((), owner or request_id, released=request_id in self._gone)
        self._holds[request_id] = hold
        return hold

    def _forget(self, request_id: str) -> None:
        self._gone[request_id] = None
        if len(self._gone) > _GONE_MAX:
            self._gone.popitem(last=False)


def _taken(request_id: str, hold: Hold) -> InputError:
    return InputError(
        f"the KV of another prompt is held under this name, by request {hold.owner}",
        where=f"KV of {request_id}",
        mend="give every request a name of its own (transfer_id, X-Request-Id)",
    )
