"""The hybrid prefix cache pool of one place (PrfaaS 3.2): reusable prefixes, in blocks that all groups share.

It has no clock and moves no bytes: the caller reports what is filled, sent and finished, and the order of calls is
time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvroute.cachepool.arena import Arena
from kvroute.cachepool.catalogue import Blocks, Catalogue, Evicted
from kvroute.cachepool.layout import Layout
from kvroute.cachepool.lease import NOTHING, BlockNumbers, HeldState, Lease
from kvroute.types import InputError, IntArray


class CachePool:
    """Prefix-cache blocks and transfer-cache blocks within one capacity.

    A prompt's full-attention blocks match block by block, a request-level state only at its exact length, which is a
    number of whole blocks. So a prefix can be reused up to the longest length at which all full-attention blocks are
    stored and every request-level group has its state. Prefix-cache blocks match once they are fully populated
    (`fill`). Transfer-cache blocks never match; `sent` or `end` discards them.

    Order of eviction: only entries that are not held, least recently released first; within one release the deepest
    first, and states before their block. A lease holds its whole chain, so a block never stays longer than those before
    it, nor a state longer than its block: what is stored is closed under prefixes. Every step is O(1) per block, the
    depth of a chain O(log n). Hashes are assumed to be chained (an equal hash means an equal prefix).
    """

    def __init__(self, layout: Layout, capacity_blocks: int) -> None:
        """Create an empty pool. Raises InputError for a negative capacity."""
        self.layout = layout
        self._arena = Arena(capacity_blocks)
        self._catalogue = Catalogue(layout, self.capacity_blocks)
        self._leases: set[Lease] = set()
        self._era = 0

    @property
    def capacity_blocks(self) -> int:
        """Total number of blocks."""
        return self._arena.capacity_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that are not held and have no content."""
        return self._arena.free_blocks

    @property
    def idle_blocks(self) -> int:
        """Prefix-cache blocks that are not held: reusable, and evicted when blocks are needed."""
        return self._arena.idle_blocks

    @property
    def leases(self) -> int:
        """Number of leases that have not ended."""
        return len(self._leases)

    def match_tokens(self, blocks: Blocks, block_tokens: int, most_tokens: int | None = None) -> int:
        """Longest prefix of this chain that can be reused, in tokens, at most `most_tokens`. Changes nothing.

        A prefill must compute its last token, so it passes input_tokens - 1: a state at the very end is of no use to
        it. Raises InputError if the hashes are of blocks of another size than the pool's.
        """
        self._check_size(block_tokens)
        return self._catalogue.reusable(self._cut(blocks, most_tokens)) * block_tokens

    def missing_bytes(self, blocks: Blocks) -> float:
        """Bytes to transfer here to make this whole chain reusable; `Model.kv_bytes` of it if nothing is stored. A
        state is transferred whole: a state of a shorter prefix is of no use."""
        layout, end = self.layout, len(blocks) * self.layout.block_tokens
        _, wanted = self._states(blocks, 0, [len(blocks)] if blocks else [])
        new_tokens = end - self._catalogue.depth(blocks) * layout.block_tokens
        return new_tokens * layout.token_bytes + sum(layout.states[state.group - 1].nbytes(end) for state in wanted)

    def begin(
        self,
        blocks: Blocks,
        *,
        tokens: int | None = None,
        states_at: Sequence[int] | None = None,
        most_tokens: int | None = None,
    ) -> Lease | None:
        """Hold the stored part of this chain and allocate blank blocks for the rest; None, without a change, if they do
        not fit.

        Args:
            tokens: of the whole prompt, if its cache is to be sent: transfer-cache blocks are allocated for the
                tokens after the last whole block and for the states at the exact end.
            states_at: lengths in tokens (whole blocks of the chain) at which request-level groups keep a state;
                default: the chain's end. Lengths up to the reused one are skipped: no prefill computes them.
            most_tokens: as in `match_tokens`.

        Raises:
            InputError: a negative number, or a state elsewhere than at the end of a block of the chain.
        """
        catalogue, arena, layout = self._catalogue, self._arena, self.layout
        found = np.array(catalogue.heads(blocks), np.int64)
        depth = len(found) if layout.token_bytes else len(blocks)
        reused = catalogue.reusable(self._cut(blocks[:depth], most_tokens))
        kept, wanted = self._states(blocks, reused, self._depths(blocks, states_at))
        new_blocks = len(blocks) - depth
        extents = self._extents(new_blocks, wanted, self._tail_blocks(blocks, tokens))
        held = np.concatenate((found, np.array([state.head for state in kept], np.int64)))
        needed = int(extents.sum())
        if needed > arena.free_blocks + arena.idle_blocks - arena.idle_among(held):
            return None
        arena.hold(held)
        evicted = self._evict(needed)
        heads = arena.take(extents)
        tail = new_blocks + len(wanted)
        for state, head in zip(wanted, heads[new_blocks:tail].tolist(), strict=True):
            state.head = head
        lease = Lease(
            blocks=blocks,
            cached_tokens=reused * layout.block_tokens,
            new_blocks=new_blocks,
            evicted=evicted,
            chain=np.concatenate((found, heads[:new_blocks])),
            states=sorted(kept + wanted, key=lambda state: (state.depth, state.group)),
            tail=heads[tail:],
            filled=depth,
            era=self._era,
        )
        self._leases.add(lease)
        return lease

    def fill(self, lease: Lease, tokens: int) -> None:
        """Record that the first `tokens` tokens of the chain, and the states within them, are computed or have arrived.

        Their whole blocks can then be reused. If another lease has stored a block first, its copy is held and the own
        one is freed. A lease from before a `clear` fills nothing. Raises InputError for a lease that has ended and for
        more tokens than the chain has.
        """
        self._check(lease)
        depth, end = _checked(tokens, "tokens") // self.layout.block_tokens, len(lease.blocks)
        if depth > end:
            what = f"{tokens} tokens exceed the chain of {end * self.layout.block_tokens}"
            raise InputError(what, where="tokens", hint="give the tokens of whole blocks")
        if lease.era != self._era:
            return
        if self.layout.token_bytes and depth > lease.filled:
            self._store_chain(lease, depth)
        lease.filled = max(depth, lease.filled)
        for state in lease.states:
            if state.depth <= depth and not state.stored:
                self._store_state(state, lease.blocks[state.depth - 1])

    def sent(self, lease: Lease) -> None:
        """Discard the transfer-cache blocks after a complete transfer. Raises InputError for an ended lease."""
        self._check(lease)
        self._arena.release(lease.tail)
        lease.tail = NOTHING

    def end(self, lease: Lease) -> None:
        """Release everything: populated blocks stay as cache; the others and the transfer-cache blocks are freed.

        A prefill or copy that has failed ends the same way. Raises InputError for a lease that has ended.
        """
        self._check(lease)
        self._leases.remove(lease)
        self._arena.release(lease.backwards())

    def clear(self) -> None:
        """Make nothing reusable any more, because the memory was lost. Leases keep their blocks until they end."""
        self._evict(self.capacity_blocks)
        self._arena.mark_stored(np.array(list(self._catalogue), np.int64), False)
        self._catalogue.clear()
        self._era += 1

    def numbers(self, lease: Lease) -> BlockNumbers:
        """The blocks that a lease holds. Raises InputError for a lease that has ended."""
        self._check(lease)
        members, size, names = self._arena.members, self.layout.block_tokens, self._catalogue.names
        states = {(names[state.group], state.depth * size): members(state.head) for state in lease.states}
        transfer = members(int(lease.tail[0])) if len(lease.tail) else NOTHING
        return BlockNumbers(lease.chain.copy(), states, transfer)

    def _cut(self, blocks: Blocks, most_tokens: int | None) -> Blocks:
        if most_tokens is None:
            return blocks
        return blocks[: _checked(most_tokens, "most_tokens") // self.layout.block_tokens]

    def _depths(self, blocks: Blocks, states_at: Sequence[int] | None) -> list[int]:
        """Depths in blocks at which states are wanted."""
        size = self.layout.block_tokens
        lengths = [len(blocks) * size] if states_at is None else sorted(set(states_at))
        for tokens in lengths:
            if tokens % size or not 0 <= tokens <= len(blocks) * size:
                what = f"no block of a chain of {len(blocks)} ends at {tokens} tokens"
                raise InputError(what, where="states_at", hint=f"give multiples of {size}")
        return [tokens // size for tokens in lengths]

    def _states(self, blocks: Blocks, reused: int, depths: list[int]) -> tuple[list[HeldState], list[HeldState]]:
        """States to hold (those at the reused length, and wanted ones that are stored), and states to allocate."""
        kept: list[HeldState] = []
        wanted: list[HeldState] = []
        for depth in ([reused] if reused else []) + [depth for depth in depths if depth > reused]:
            for group in range(1, len(self.layout.states) + 1):
                head = self._catalogue.state(group, blocks[depth - 1])
                if head is None:
                    wanted.append(HeldState(group, depth, -1, False))
                else:
                    kept.append(HeldState(group, depth, head, True))
        return kept, wanted

    def _tail_blocks(self, blocks: Blocks, tokens: int | None) -> int:
        if tokens is None:
            return 0
        whole = len(blocks) * self.layout.block_tokens
        return self.layout.tail_blocks(_checked(tokens, "tokens"), min(whole, tokens))

    def _extents(self, new_blocks: int, wanted: list[HeldState], tail_blocks: int) -> IntArray:
        """Number of blocks of every new entry: those of the chain, the states, the transfer cache."""
        layout = self.layout
        states = [layout.state_blocks(state.group - 1, state.depth * layout.block_tokens) for state in wanted]
        return np.array([*[1] * new_blocks, *states, *[tail_blocks] * bool(tail_blocks)], np.int64)

    def _store_chain(self, lease: Lease, depth: int) -> None:
        """Store blocks from `filled` to `depth`; hold another lease's block instead where one is stored already."""
        own = lease.chain[lease.filled : depth].copy()
        standing = np.array(self._catalogue.put_chain(lease.blocks[lease.filled : depth], own.tolist()), np.int64)
        double = standing != own
        self._arena.mark_stored(own[~double])
        self._arena.hold(standing[double])
        self._arena.release(own[double])
        lease.chain[lease.filled : depth] = standing

    def _store_state(self, state: HeldState, block: int) -> None:
        """Like `_store_chain`, for one state."""
        own, stored_head = state.head, self._catalogue.put_state(state.group, block, state.depth, state.head)
        state.head, state.stored = stored_head, True
        if stored_head == own:
            self._arena.mark_stored(np.array([own], np.int64))
        else:
            self._arena.hold(np.array([stored_head], np.int64))
            self._arena.release(np.array([own], np.int64))

    def _evict(self, free_blocks: int) -> Evicted:
        return self._catalogue.drop(self._arena.evict(free_blocks))

    def _check(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise InputError(
                "the lease has ended or belongs to another pool", where="lease", hint="end every lease only once"
            )

    def _check_size(self, block_tokens: int) -> None:
        if block_tokens != self.layout.block_tokens:
            what = f"the hashes are of blocks of {block_tokens} tokens, but the pool has {self.layout.block_tokens}"
            raise InputError(what, where="block_tokens", hint="use the pool's block size")


def _checked(count: int, where: str) -> int:
    if count < 0:
        raise InputError(f"{count} is negative", where=where, hint="give 0 or more")
    return count
