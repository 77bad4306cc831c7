"""How a model's KV cache is stored in equal blocks: block-level groups, request-level groups, and the tail to send."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvroute.llm import Model
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers whose cache is valid at one exact length: linear attention (`window_tokens` 0), or one sliding window."""

    name: str
    fixed_bytes: float = 0.0
    """Bytes per request, independent of its length."""
    token_bytes: float = 0.0
    """Bytes per token of the window."""
    window_tokens: int = 0

    def nbytes(self, tokens: int) -> float:
        """Bytes of the state after `tokens` tokens; constant beyond the window."""
        return self.fixed_bytes + min(tokens, self.window_tokens) * self.token_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups with aligned blocks that are all allocated from one pool (PrfaaS 3.2).

    The layers that keep every token form one group: one block holds `block_tokens` tokens of all of them. Every state
    takes as many blocks of the same size as it needs. Everything is stored once; a pool is not divided into shards.
    """

    block_tokens: int
    block_bytes: float
    """Memory of one block of the pool."""
    token_bytes: float
    """Bytes per token of the full-attention group; 0: the model has no such layers."""
    states: tuple[StateGroup, ...]
    """Request-level groups: linear attention first, then the windows by ascending size."""

    @classmethod
    def of(cls, model: Model, block_tokens: int = 16) -> Layout:
        """The layout of a model. For a model with only windows, a block holds its largest state.

        Raises:
            InputError: blocks of less than one token, or a model that caches nothing.
        """
        if block_tokens < 1:
            raise InputError(f"a block of {block_tokens} tokens", where="block_tokens", hint="give 1 or more")
        windows: dict[int, float] = {}
        for layers in model.layers:
            if layers.kind == "sliding":
                nbytes = layers.count * layers.token_bytes()
                windows[layers.window_tokens] = windows.get(layers.window_tokens, 0.0) + nbytes
        states = [StateGroup("linear", fixed_bytes=model.request_state_bytes)] if model.request_state_bytes else []
        states += [
            StateGroup(f"sliding-{window}", token_bytes=nbytes, window_tokens=window)
            for window, nbytes in sorted(windows.items())
            if nbytes
        ]
        token_bytes = model.kv_bytes_per_token
        block_bytes = token_bytes * block_tokens or max((s.nbytes(s.window_tokens) for s in states), default=0.0)
        if not block_bytes:
            raise InputError(f"{model.name} has no KV cache", where="model", hint="give a model with attention layers")
        return cls(block_tokens, block_bytes, token_bytes, tuple(states))

    def capacity_blocks(self, capacity_bytes: float) -> int:
        """Number of whole blocks in this much memory."""
        return int(capacity_bytes // self.block_bytes)

    def state_blocks(self, group: int, tokens: int) -> int:
        """Number of blocks of the state of `states[group]` after `tokens` tokens."""
        return math.ceil(self.states[group].nbytes(tokens) / self.block_bytes)

    def tail_blocks(self, tokens: int, cached_tokens: int) -> int:
        """Number of blocks that a prefill of `tokens` tokens sends besides its prefix-cache blocks, which end at
        `cached_tokens`: the tokens after them, and every state at the exact end."""
        beyond = -(-max(tokens - cached_tokens, 0) // self.block_tokens) if self.token_bytes else 0
        return beyond + sum(self.state_blocks(group, tokens) for group in range(len(self.states)))
