"""Layers of an LLM and the bytes that they cache: arithmetic only, no file access."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, overload

import numpy as np

from kvroute.compiled import compiled
from kvroute.llm.compute import Compute
from kvroute.types import FloatArray, InputError, IntArray

_NONE: IntArray = np.array(0)
"""An array, because numpy converts a Python number more slowly than it compares a dozen numbers."""

Kind: TypeAlias = Literal["attention", "sliding", "mla", "linear"]


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` equal layers of one kind.

    - `attention`: keys and values of every token (MHA, GQA, MQA).
    - `sliding`: keys and values of the last `window_tokens` tokens.
    - `mla`: one latent of `key_dim` numbers per token, shared by all heads (`kv_heads` 1, `value_dim` 0).
    - `linear`: nothing per token, `state_bytes` per request; `kv_heads` heads share the state evenly.
    """

    kind: Kind
    count: int
    kv_heads: int = 1
    key_dim: int = 0
    value_dim: int = 0
    element_bytes: float = 2.0
    window_tokens: int = 0
    index_bytes: float = 0.0
    """Bytes per token and layer besides keys and values: the key of a sparse-attention indexer, stored on every
    shard."""
    state_bytes: float = 0.0
    """Bytes of state per request and layer."""

    def token_bytes(self, tp: int = 1) -> float:
        """Return bytes per token and layer on the largest of `tp` shards: ceil(kv_heads / tp) heads, a whole MLA
        latent."""
        heads = -(-self.kv_heads // tp)
        return heads * (self.key_dim + self.value_dim) * self.element_bytes + self.index_bytes

    def state_bytes_shard(self, tp: int) -> float:
        """Return bytes per request and layer on the largest of `tp` shards."""
        return self.state_bytes * -(-self.kv_heads // tp) / self.kv_heads


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions that tensor parallelism needs besides the KV cache."""

    hidden: int
    """Numbers of one token between two layers: what an all-reduce sums, and what a pipeline stage sends on."""
    heads: int
    """Query heads; an engine splits them evenly over its tensor-parallel ranks."""
    parameters: float | None = None
    """All parameters, embeddings included; None: not known, as for mixtures of experts."""


@dataclass(frozen=True, slots=True)
class Model:
    """KV cache geometry of an LLM. Sizes are in bytes of one copy, except for the methods of a shard."""

    name: str
    layers: tuple[Layers, ...]
    compute: Compute | None = None
    """Operations of a prefill; None: not known."""
    shape: ModelShape | None = None
    """None: not known."""
    kv_bytes_per_token: float = field(init=False)
    """Bytes per token of a long context: all layers that keep every token (`attention`, `mla`), all shards.

    NetKV eq. 1 for GQA: 2 * layers * kv_heads * head_dim * element_bytes. An MLA latent counts once, although every
    tensor-parallel shard holds a copy. 0 for a model of sliding-window layers only.
    """
    request_state_bytes: float = field(init=False)
    """Bytes of request-level state of the linear-attention layers, independent of the length."""
    _windows: tuple[tuple[int, float], ...] = field(init=False, repr=False)
    _window_arrays: tuple[IntArray, FloatArray] = field(init=False, repr=False, compare=False)
    """The same as two arrays, for compiled code."""

    def __post_init__(self) -> None:
        assert self.layers, "a model has layers"
        windows: dict[int, float] = {}
        for group in self.layers:
            if group.kind == "sliding":
                windows[group.window_tokens] = windows.get(group.window_tokens, 0.0) + group.count * group.token_bytes()
        put = object.__setattr__
        put(self, "kv_bytes_per_token", self.kv_bytes_per_token_shard(1))
        put(self, "request_state_bytes", self.request_state_bytes_shard(1))
        put(self, "_windows", tuple(sorted(windows.items())))
        arrays = np.array([*sorted(windows)], np.int64), np.array([windows[tokens] for tokens in sorted(windows)])
        put(self, "_window_arrays", arrays)

    @property
    def layer_count(self) -> int:
        """Number of layers of all kinds."""
        return sum(group.count for group in self.layers)

    @overload
    def kv_bytes(self, tokens: int, cached_tokens: int = 0) -> float: ...
    @overload
    def kv_bytes(self, tokens: int, cached_tokens: IntArray) -> FloatArray: ...
    @overload
    def kv_bytes(self, tokens: IntArray, cached_tokens: int | IntArray = 0) -> FloatArray: ...
    def kv_bytes(self, tokens: int | IntArray, cached_tokens: int | IntArray = 0) -> float | FloatArray:
        """Return the bytes to send for a context of `tokens` if the receiver caches the first `cached_tokens` (NetKV
        eq. 2).

        Layers that keep every token send tokens - cached_tokens, sliding windows at most their window of these. The
        request-level state is always sent completely, because it belongs to the last token: kv_bytes(l, l) ==
        kv_bytes(0) == request_state_bytes. More cached than tokens counts as all cached. Numbers give a float; arrays
        are broadcast and give an array.
        """
        if isinstance(tokens, int) and isinstance(cached_tokens, np.ndarray) and cached_tokens.ndim == 1:
            nbytes: FloatArray = np.empty(len(cached_tokens))
            state_bytes, windows = self.request_state_bytes, self._window_arrays
            kv_bytes_each(tokens, cached_tokens, self.kv_bytes_per_token, state_bytes, *windows, nbytes)
            return nbytes
        new = tokens - cached_tokens
        if isinstance(new, np.ndarray):
            new = np.maximum(new, _NONE)
            sizes: FloatArray = np.multiply(new, self.kv_bytes_per_token, dtype=np.float64)
            if self.request_state_bytes:
                sizes += self.request_state_bytes
            for window, window_bytes in self._windows:
                sizes += np.minimum(new, window) * window_bytes
            return sizes
        new = max(new, 0)
        size = new * self.kv_bytes_per_token + self.request_state_bytes
        for window, window_bytes in self._windows:
            size += min(new, window) * window_bytes
        return size

    def with_kv_numbers(self, element_bytes: float) -> Model:
        """Return this model with a KV cache of numbers of `element_bytes` bytes; indexer keys and states stay."""
        return replace(self, layers=tuple(replace(group, element_bytes=element_bytes) for group in self.layers))

    def token_flop(self, context_tokens: float) -> float:
        """Return the operations of the prefill of one token that attends to `context_tokens` tokens.

        Raises:
            InputError: the dimensions of the model's matrices are not known.
        """
        if self.compute is None:
            what = f"the operations of a prefill of {self.name} are not known"
            hint = "they are computed for models without linear attention whose feed-forward sizes are given"
            raise InputError(what, hint=hint)
        return self.compute.token_flop(context_tokens)

    def block_bytes(self, block_tokens: int) -> float:
        """Return the bytes of one block of KV memory. A model of sliding windows only keeps no KV per token in the long
        run: the size of its first block is used instead."""
        return self.kv_bytes_per_token * block_tokens or self.kv_bytes(block_tokens)

    def kv_bytes_shard(self, tokens: int, tp: int) -> float:
        """Return the KV bytes of a context of `tokens` on the largest of `tp` shards, windows and state included."""
        size = tokens * self.kv_bytes_per_token_shard(tp) + self.request_state_bytes_shard(tp)
        for group in self.layers:
            if group.kind == "sliding":
                size += group.count * min(tokens, group.window_tokens) * group.token_bytes(tp)
        return size

    def kv_bytes_per_token_shard(self, tp: int) -> float:
        """Return `kv_bytes_per_token` of the largest of `tp` shards.

        KV heads are split; with fewer heads than shards each shard holds one, so heads are replicated. An MLA latent is
        replicated on every shard. In both cases the shards together hold more than `kv_bytes_per_token`.
        """
        _check_tp(tp)
        return float(
            sum(group.count * group.token_bytes(tp) for group in self.layers if group.kind in ("attention", "mla"))
        )

    def request_state_bytes_shard(self, tp: int) -> float:
        """Return `request_state_bytes` of the largest of `tp` shards; the heads of linear attention are split."""
        _check_tp(tp)
        return float(sum(group.count * group.state_bytes_shard(tp) for group in self.layers))

    def kv_bytes_per_token_layer(self, kind: Kind) -> float:
        """Return the bytes that one layer of `kind` writes per token (0 for `linear`); the largest if its groups
        differ.

        Raises:
            InputError: the model has no such layers.
        """
        sizes = [group.token_bytes() for group in self.layers if group.kind == kind]
        if not sizes:
            kinds = ", ".join(dict.fromkeys(group.kind for group in self.layers))
            raise InputError(f"{self.name} has no layers of kind {kind!r}", hint=f"choose one of {kinds}")
        return max(sizes)


@compiled
def kv_bytes_each(
    tokens: int,
    cached_tokens: IntArray,
    bytes_per_token: float,
    state_bytes: float,
    window_tokens: IntArray,
    window_bytes: FloatArray,
    nbytes: FloatArray,
) -> None:
    """Fill `nbytes` [n] with the bytes to send for a context of `tokens`, `cached_tokens` [n] of which the receiver
    caches. `window_bytes` [w] are sent for each of at most `window_tokens` [w] tokens."""
    for i in range(len(nbytes)):
        new = max(tokens - cached_tokens[i], 0)
        nbytes[i] = new * bytes_per_token + state_bytes
        for w in range(len(window_tokens)):
            nbytes[i] += min(new, window_tokens[w]) * window_bytes[w]


def _check_tp(tp: int) -> None:
    if tp < 1:
        raise InputError(f"{tp} tensor-parallel shards are not possible", where="tp", hint="give 1 or more")
