"""Write-back of full blocks to the store: which blocks of which requests are written, and the KV events of the written
ones. The scheduler's half; no I/O.

A block is written at the first step that begins after its tokens are known and its KV is computed. The worker copies it
at the beginning of that step, while the request still owns it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvroute_engine.block_keys import NO_PARENT, block_keys, root_key

_UNCONFIRMED_MAX = 1 << 14
"""Largest number of blocks whose writing has not been confirmed. Older ones are not reported."""
_REPORTED_MAX = 1 << 18
"""Largest number of blocks remembered as reported. Above it, all are forgotten, so that some are reported again."""


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One block to write."""

    key: bytes
    parent: bytes
    """Key of the block before it; empty for the first one."""
    block: int
    """Number of the local block."""


@dataclass(frozen=True, slots=True)
class Writes:
    """Blocks of one request to write, in the order of its tokens."""

    request_id: str
    blocks: tuple[BlockWrite, ...]
    ends: bool = False
    """True: the request is over, and vLLM keeps its blocks only until these are copied."""


@dataclass(frozen=True, slots=True)
class StoredChain:
    """Blocks that are in the store, for a KV event: consecutive blocks of one prompt."""

    hashes: tuple[int, ...]
    parent: int | None
    """Hash of the block before them."""
    tokens: tuple[int, ...]
    salt: str = ""
    """Cache salt, if the chain begins with the first block of the prompt."""


@dataclass(slots=True, eq=False)
class _Chain:
    """Tokens and keys of one request."""

    live_tokens: Sequence[int]
    """vLLM's own list, which grows with every generated token."""
    salt: str
    planned: int
    """Position of the first block that has not been planned. Others write the blocks before the first planned one."""
    keys: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens of the blocks that have keys."""


class WriteBack:
    """Chains by request. vLLM calls, in this order: arrived, computed (in every step), finished."""

    def __init__(self, block_tokens: int, ranks: int = 1) -> None:
        """Args: `ranks`: tensor-parallel workers, all of which must have written a block."""
        self._block_tokens, self._ranks = block_tokens, ranks
        self._chains: dict[str, _Chain] = {}
        self._unconfirmed: OrderedDict[bytes, tuple[_Chain, int]] = OrderedDict()
        """Chain and position of planned blocks, by key."""
        self._confirmed: Counter[bytes] = Counter()
        self._reported: set[bytes] = set()
        self._events: list[StoredChain] = []

    def arrived(self, request_id: str, tokens: Sequence[int], *, salt: str = "", written_tokens: int = 0) -> None:
        """Write the blocks of a new request. Args: `tokens` grows with it; another instance writes the blocks of the
        first `written_tokens` tokens."""
        self._chains[request_id] = _Chain(tokens, salt, written_tokens // self._block_tokens)

    def loaded(self, request_id: str, tokens: int) -> None:
        """Record that the first `tokens` tokens of a request are in the store."""
        chain = self._chains.get(request_id)
        if chain is not None:
            chain.planned = max(chain.planned, tokens // self._block_tokens)

    def is_due(self, request_id: str, computed_tokens: int) -> bool:
        """Return whether `computed` would return blocks."""
        chain = self._chains.get(request_id)
        return chain is not None and self._whole(chain, computed_tokens) > chain.planned

    def computed(self, request_id: str, computed_tokens: int, blocks: Sequence[int]) -> Writes | None:
        """Return the blocks that are full for the first time; None if there is none.

        Args:
            request_id: the request.
            computed_tokens: tokens whose KV is in the cache when the step begins.
            blocks: the request's local blocks.
        """
        chain = self._chains.get(request_id)
        return None if chain is None else self._writes(request_id, chain, computed_tokens, blocks, ends=False)

    def finished(
        self, request_id: str, computed_tokens: int, blocks: Sequence[int], *, kept: bool = False
    ) -> Writes | None:
        """Return the blocks of a request that is over and that have not been written; None if there is none.

        Args: as for `computed`; `kept`: another component reports when the blocks may be freed.
        """
        chain = self._chains.pop(request_id, None)
        return None if chain is None else self._writes(request_id, chain, computed_tokens, blocks, ends=not kept)

    def _writes(
        self, request_id: str, chain: _Chain, computed_tokens: int, blocks: Sequence[int], *, ends: bool
    ) -> Writes | None:
        whole = min(self._whole(chain, computed_tokens), len(blocks))
        if whole <= chain.planned:
            return None
        self._extend(chain, whole)
        writes = []
        for position in range(chain.planned, whole):
            key = chain.keys[position]
            writes.append(BlockWrite(key, chain.keys[position - 1] if position else NO_PARENT, blocks[position]))
            self._unconfirmed[key] = (chain, position)
        chain.planned = whole
        while len(self._unconfirmed) > _UNCONFIRMED_MAX:
            self._unconfirmed.popitem(last=False)
        return Writes(request_id, tuple(writes), ends)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Record that one worker reports blocks as stored."""
        for key in keys:
            self._confirmed[key] += 1
            if self._confirmed[key] < self._ranks:
                continue
            del self._confirmed[key]
            found = self._unconfirmed.pop(key, None)
            if found is not None:
                self._report(*found)

    def take_events(self) -> list[StoredChain]:
        """Return the blocks that are stored and have not been reported by this instance."""
        events, self._events = self._events, []
        return events

    def _whole(self, chain: _Chain, computed_tokens: int) -> int:
        """Return the number of blocks whose KV is computed and whose tokens are known."""
        return min(computed_tokens, len(chain.live_tokens)) // self._block_tokens

    def forget_unconfirmed(self) -> None:
        """Record that no planned block will be confirmed any more."""
        self._unconfirmed.clear()
        self._confirmed.clear()

    def _extend(self, chain: _Chain, whole: int) -> None:
        """Compute keys up to the first `whole` blocks."""
        size = self._block_tokens
        more = list(chain.live_tokens[len(chain.tokens) : whole * size])
        parent = chain.keys[-1] if chain.keys else root_key(chain.salt)
        chain.keys.extend(block_keys(more, size, parent=parent))
        chain.tokens.extend(more)

    def _report(self, chain: _Chain, position: int) -> None:
        """Report a block and its ancestors, which are stored if it is."""
        if len(self._reported) > _REPORTED_MAX:
            self._reported.clear()
        first = position
        while first and chain.keys[first - 1] not in self._reported:
            first -= 1
        keys, size = chain.keys[first : position + 1], self._block_tokens
        if keys[-1] in self._reported:
            return
        self._reported.update(keys)
        self._events.append(
            StoredChain(
                tuple(_hash(key) for key in keys),
                _hash(chain.keys[first - 1]) if first else None,
                tuple(chain.tokens[first * size : (position + 1) * size]),
                "" if first else chain.salt,
            )
        )


def _hash(key: bytes) -> int:
    """Return the name of a block in KV events."""
    return int.from_bytes(key[:8], "big")
