"""Blocks that a prefill instance keeps for others to fetch, computed or being computed, until they are released or
expire. No I/O; the caller locks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvroute_engine.connector.blocks import Fence
from kvroute_engine.connector.transfer.chunk_scheduler import ChunkScheduler
from kvroute_engine.errors import InputError

State = Literal["held", "unknown", "gone"]
_GONE_MAX = 4096


@dataclass(slots=True, eq=False)
class BlockLease:
    """One request's blocks in the order of its prompt. While they are being computed, only `ready` blocks are sent."""

    blocks: tuple[int, ...]
    owner: str
    """vLLM's name of the request; peers may use another one."""
    until: float = 0.0
    ready: list[int] | None = None
    """Number of computed blocks, by region; None: all."""
    fences: dict[int, Fence] = field(default_factory=dict)
    """Fence of the computed blocks, by region; no entry if they have already been written."""
    prompt: str = ""
    """Digest of the prompt, to be compared with the peers'; empty: not known."""
    stripes: dict[str, ChunkScheduler] = field(default_factory=dict)
    """Chunks of the transfers, by the transfer's name."""
    readers: int = 0
    released: bool = False
    stopped: bool = False
    """True if the content is no longer valid, so readers must stop."""

    @property
    def computing(self) -> bool:
        """True while vLLM computes the prompt."""
        return self.ready is not None


@dataclass(frozen=True, slots=True)
class Computing:
    """A request that is being computed, at one step. After it, the prompt's first `ready` blocks are complete."""

    name: str
    """Name by which peers request it."""
    owner: str
    blocks: tuple[int, ...]
    ready: int
    prompt: str = ""
    """Digest of the prompt, for peers that request the blocks while they are being computed."""


@dataclass(frozen=True, slots=True)
class Freed:
    """A request whose blocks are returned to vLLM."""

    request_id: str
    expired: bool
    """True if the blocks expired without a release."""


class BlockLeases:
    """Which blocks are held until when. A request is never freed while a reader uses it."""

    def __init__(self) -> None:
        self._holds: dict[str, BlockLease] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._not_kept: list[Freed] = []
        """Requests whose name another request already has. Their blocks are returned to vLLM at once."""

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, request_id: str, blocks: Sequence[int], until: float, owner: str = "", prompt: str = "") -> None:
        """Hold all of `blocks`, computed and in the order of the prompt, until the time `until`.

        A release may have arrived before. If another request holds the same prompt under this name, its blocks serve
        both requests, and these blocks are freed.

        Args:
            owner: vLLM's name of the request, if it is another.
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
        hold.fences.clear()  # the request's last step has ended before vLLM reports its end

    def computed(self, step: Computing, regions: int, done: Iterable[int], fence: Fence | None = None) -> None:
        """Record that, of `regions` regions, the step has computed those in `done`; on a device, once `fence` has
        passed."""
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
        """Return the state of a request. `unknown`: not seen yet; `gone`: already freed."""
        if request_id in self._holds:
            hold = self._holds[request_id]
            return "gone" if hold.released or hold.stopped else "held"
        return "gone" if request_id in self._gone else "unknown"

    def read(self, request_id: str, first: int, count: int) -> BlockLease | None:
        """Start to read `count` blocks from position `first`; None if the request holds fewer. End with `leave`."""
        hold = self._holds[request_id]
        if first < 0 or count < 1 or (first + count > len(hold.blocks) and not hold.computing):
            return None
        hold.readers += 1
        return hold

    def leave(self, hold: BlockLease) -> None:
        """End a read, successful or not."""
        hold.readers -= 1

    def release(self, request_id: str) -> None:
        """Release a request that will not be fetched (again)."""
        if request_id in self._holds:
            self._holds[request_id].released = True
        else:
            self._forget(request_id)

    def drop(self, request_id: str, owner: str) -> None:
        """Drop a request that vLLM has given up. Its blocks are freed when the readers have left."""
        hold = self._holds.get(request_id) or self._new(request_id, owner)
        if hold.owner != owner:
            self._not_kept.append(Freed(owner, expired=False))
            return
        hold.released = hold.stopped = True
        hold.ready = None

    def withdraw(self, request_id: str) -> BlockLease | None:
        """Remove a request whose blocks vLLM has already taken back. The caller must make sure that readers stop."""
        hold = self._holds.pop(request_id, None)
        if hold:
            hold.stopped = True
            self._forget(request_id)
        return hold

    def freed(self, now: float) -> list[Freed]:
        """Remove and return the requests that are released or expired; each request once."""
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

    def _new(self, request_id: str, owner: str) -> BlockLease:
        hold = BlockLease((), owner or request_id, released=request_id in self._gone)
        self._holds[request_id] = hold
        return hold

    def _forget(self, request_id: str) -> None:
        self._gone[request_id] = None
        if len(self._gone) > _GONE_MAX:
            self._gone.popitem(last=False)


def _taken(request_id: str, hold: BlockLease) -> InputError:
    return InputError(
        f"the KV of another prompt is held under this name, by request {hold.owner}",
        where=f"KV of {request_id}",
        hint="give every request its own name (transfer_id, X-Request-Id)",
    )
