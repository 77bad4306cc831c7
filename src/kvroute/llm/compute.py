"""Operations that the prefill of one token takes, from the dimensions of a model's matrices: arithmetic only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sublayers:
    """`count` equal sublayers: attention, or feed-forward."""

    count: int
    parameters: float
    """Numbers of the matrices by which each token is multiplied: of a mixture of experts, those of the active ones."""
    attended_flop: float = 0.0
    """Operations for each token to which a query attends."""
    attended_max: float = math.inf
    """Tokens to which a query attends at most: a window, or the top-k of an indexer."""
    indexed_flop: float = 0.0
    """Operations of an indexer for each token of the context."""

    def token_flop(self, context_tokens: float) -> float:
        """Return the operations of all `count` sublayers for one token at this context."""
        attended = self.attended_flop * min(context_tokens, self.attended_max) if self.attended_flop else 0.0
        return self.count * (2.0 * self.parameters + attended + self.indexed_flop * context_tokens)


@dataclass(frozen=True, slots=True)
class Compute:
    """All sublayers of a model."""

    sublayers: tuple[Sublayers, ...]

    @property
    def active_parameters(self) -> float:
        """Parameters by which each token of a prompt is multiplied: without embeddings and without the output layer,
        which a prefill applies to the last token only."""
        return sum(sublayer.count * sublayer.parameters for sublayer in self.sublayers)

    def token_flop(self, context_tokens: float) -> float:
        """Return the operations for one token that attends to `context_tokens` tokens.

        A multiplication and an addition are two operations: 2 per active parameter, and for each attended token 2 per
        number of the query's score and 2 per number of the weighted value (Kaplan et al. 2020, section 2.1; without
        its average over a causal mask, because the context of an appended token is known). Norms, rotary embeddings and
        the softmax are not counted.
        """
        return sum(sublayer.token_flop(context_tokens) for sublayer in self.sublayers)


@dataclass(frozen=True, slots=True)
class Latent:
    """Dimensions of MLA (DeepSeek-V2 2.1). `query_rank` None: queries are not compressed."""

    kv_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    query_rank: int | None = 1536


@dataclass(frozen=True, slots=True)
class Indexer:
    """Dimensions of the sparse attention of DeepSeek-V3.2: its own queries choose `top_tokens` tokens."""

    heads: int = 64
    dim: int = 128
    top_tokens: int = 2048


def attention(
    count: int, hidden: int, heads: int, kv_heads: int, *, key_dim: int, value_dim: int, window_tokens: int = 0
) -> Sublayers:
    """Return MHA, GQA or MQA: projections of queries, keys, values and output; scores and weighted values."""
    parameters = hidden * (heads * key_dim + kv_heads * (key_dim + value_dim) + heads * value_dim)
    attended = 2.0 * heads * (key_dim + value_dim)
    return Sublayers(count, float(parameters), attended, window_tokens or math.inf)


def latent_attention(count: int, hidden: int, heads: int, latent: Latent, indexer: Indexer | None = None) -> Sublayers:
    """Return MLA in its absorbed form: every head attends to the cached latents and rotary keys as they are.

    A score takes `kv_rank + rope_dim` multiplications and a weighted value `kv_rank`. An engine that expands latents to
    keys and values takes fewer for these, but has to expand the whole context in each forward pass.
    """
    query_dim = heads * (latent.nope_dim + latent.rope_dim)
    query_rank = latent.query_rank or hidden
    parameters = hidden * (latent.kv_rank + latent.rope_dim) + heads * latent.value_dim * hidden
    parameters += latent.kv_rank * heads * (latent.nope_dim + latent.value_dim) + query_rank * query_dim
    if latent.query_rank:
        parameters += hidden * latent.query_rank
    attended = 2.0 * heads * (2 * latent.kv_rank + latent.rope_dim)
    if indexer is None:
        return Sublayers(count, float(parameters), attended)
    parameters += query_rank * indexer.heads * indexer.dim + hidden * (indexer.dim + indexer.heads)
    indexed = 2.0 * indexer.heads * indexer.dim
    return Sublayers(count, float(parameters), attended, indexer.top_tokens, indexed)


def feed_forward(count: int, hidden: int, width: int, *, matrices: int = 3, experts: int = 0) -> Sublayers:
    """Return feed-forward sublayers.

    Args:
        count: number of layers.
        hidden: hidden size.
        width: intermediate size; of a mixture of experts, of all active experts together.
        matrices: 3 with a gate, 2 without.
        experts: experts among which a router chooses.
    """
    return Sublayers(count, float(matrices * hidden * width + hidden * experts))
