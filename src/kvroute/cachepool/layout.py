"""How the KV cache of a model lies in equal blocks: block-level groups, request-level groups, the tail that is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvroute.llm import Model
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers whose cache belongs to one exact length: linear attention (`window_tokens` 0), or one sliding window."""

    name: str
    fixed_bytes: float = 0.0
    """Per request, whatever its length."""
    token_bytes: float = 0.0
    """Per token of the window."""
    window_tokens: int = 0

    def nbytes(self, tokens: int) -> float:
        """Bytes of the state after `tokens` tokens; from the window on they no longer grow."""
        return self.fixed_bytes + min(tokens, self.window_tokens) * self.token_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups with aligned blocks, so that all of them allocate from one pool (PrfaaS 3.2).

    The layers that keep every token are one group: `block_tokens` tokens of all of them are one block. Every state
    takes as many blocks of the same size as it needs. One copy of everything; a pool is not cut into shards.
    """

    block_tokens: int
    block_bytes: float
    """Memory of one block of the pool."""
    token_bytes: float
    """Per token of the full-attention group; 0: the model has no such layers."""
    states: tuple[StateGroup, ...]
    """Request-level groups, linear attention before the windows, these ascending."""

    @classmethod
    def of(cls, model: Model, block_tokens: int = 16) -> Layout:
        """The layout of a model. A model of windows only gets blocks that hold its largest state.

        Raises:
            InputError: blocks of less than one token, or a model that caches nothing.
        """
        if block_tokens < 1:
            raise InputError(f"a block of {block_tokens} tokens", where="block_tokens", mend="give 1 or more")
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
            raise InputError(f"{model.name} caches nothing", where="model", mend="give a model with attention layers")
        return cls(block_tokens, block_bytes, token_bytes, tuple(states))

    def capacity_blocks(self, capacity_bytes: float) -> int:
        """Whole blocks in so much memory."""
        return int(capacity_bytes // self.block_bytes)

    def state_blocks(self, group: int, tokens: int) -> int:
        """Blocks of the state of `states[group]` after `tokens` tokens."""
        return math.ceil(self.states[group].nbytes(tokens) / self.block_bytes)

    def tail_blocks(self, tokens: int, cached_tokens: int) -> int:
        """Blocks of what a prefill of `tokens` tokens sends beside its prefix-cache blocks, which end at
        `cached_tokens`: the tokens after them and every state at the exact end."""
        beyond = -(-max(tokens - cached_tokens, 0) // self.block_tokens) if self.token_bytes else 0
        return beyond + sum(self.state_blocks(group, tokens) for group in range(len(self.states)))
