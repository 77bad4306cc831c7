"""Reads the dimensions of a model's matrices from a config.json, as far as its fields give them."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.llm.compute import Compute, Indexer, Latent, Sublayers, attention, feed_forward, latent_attention
from kvroute.llm.config_fields import HEADS, HIDDEN, LAYER_COUNT, Fields
from kvroute.llm.geometry import Layers, ModelShape
from kvroute.types import InputError

_WIDTH = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
_WITHOUT_GATE = {"opt", "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "mpt", "phi", "starcoder2"}
"""Model types whose feed-forward layers have two matrices; their width is four times the hidden size if not given."""
_NOT_MODELLED = ("num_kv_shared_layers", "interleave_moe_layer_step", "layer_group_size", "full_attention_interval")
"""Fields of models whose layers differ in ways that are not modelled here."""

_INDEXER = Indexer()


def compute_of(fields: Fields, layers: Sequence[Layers]) -> Compute | None:
    """Return the operations of a model with these attention layers.

    Returns:
        None if the layers are not all attention or MLA, or if the file does not give the size of the feed-forward
        layers.
    """
    if any(group.kind == "linear" for group in layers) or fields.get(*_NOT_MODELLED):
        return None
    try:
        behind = _feed_forward(fields)
        if not behind:
            return None
        hidden, heads = fields.count(*HIDDEN), fields.count(*HEADS)
        return Compute((*(_attention(fields, group, hidden, heads) for group in layers), *behind))
    except (InputError, OverflowError):  # such as sizes that differ by layer; the KV cache does not depend on them
        return None


def shape_of(fields: Fields, compute: Compute | None) -> ModelShape | None:
    """Return the shape of a model with these operations; None if the file does not give it."""
    if fields.get(*HIDDEN) is None or fields.get(*HEADS) is None:
        return None
    hidden, heads = fields.count(*HIDDEN), fields.count(*HEADS)
    if compute is None or fields.get("vocab_size") is None or fields.get(*_ACTIVE_EXPERTS) is not None:
        return ModelShape(hidden, heads)
    tied = fields.get("tie_word_embeddings") is not False  # Hugging Face's default
    embeddings = (1 if tied else 2) * fields.count("vocab_size") * hidden
    return ModelShape(hidden, heads, compute.active_parameters + embeddings)


def _attention(fields: Fields, group: Layers, hidden: int, heads: int) -> Sublayers:
    if group.kind == "mla":
        latent = Latent(
            kv_rank=fields.count("kv_lora_rank"),
            rope_dim=fields.count("qk_rope_head_dim"),
            nope_dim=fields.count("qk_nope_head_dim", default=128),
            value_dim=fields.count("v_head_dim", default=128),
            query_rank=fields.count("q_lora_rank") if fields.get("q_lora_rank") is not None else None,
        )
        indexer = None
        if fields.get("index_head_dim") is not None:
            most = fields.count("index_topk", default=_INDEXER.top_tokens)
            count = fields.count("index_n_heads", default=_INDEXER.heads)
            indexer = Indexer(count, fields.count("index_head_dim"), most)
        return latent_attention(group.count, hidden, heads, latent, indexer)
    if group.kind == "sliding":
        heads = fields.count("swa_num_attention_heads", default=heads)
    sizes = {"key_dim": group.key_dim, "value_dim": group.value_dim, "window_tokens": group.window_tokens}
    return attention(group.count, hidden, heads, group.kv_heads, **sizes)


def _feed_forward(fields: Fields) -> tuple[Sublayers, ...]:
    """Return the feed-forward sublayers; none if the file does not give their size."""
    kind = str(fields.get("model_type") or "")
    matrices = 2 if kind in _WITHOUT_GATE else 3
    total = fields.count(*LAYER_COUNT)
    if fields.get(*HIDDEN) is None or (fields.get(*_WIDTH, "moe_intermediate_size") is None and matrices == 3):
        return ()
    hidden = fields.count(*HIDDEN)
    if fields.get(*_ACTIVE_EXPERTS) is None:
        return (feed_forward(total, hidden, fields.count(*_WIDTH, default=4 * hidden), matrices=matrices),)
    expert = fields.count("moe_intermediate_size", *_WIDTH)
    shared = fields.count("shared_expert_intermediate_size", default=0) or _shared(fields) * expert
    width = fields.count(*_ACTIVE_EXPERTS) * expert + shared
    dense = min(_dense_layers(fields), total)
    experts = feed_forward(total - dense, hidden, width, matrices=matrices, experts=fields.count(*_EXPERTS, default=0))
    if not dense:
        return (experts,)
    return feed_forward(dense, hidden, fields.count(*_WIDTH), matrices=matrices), experts


def _shared(fields: Fields) -> int:
    return fields.count(*_SHARED_EXPERTS) if fields.get(*_SHARED_EXPERTS) else 0


def _dense_layers(fields: Fields) -> int:
    """Return the number of layers without experts."""
    if fields.get("first_k_dense_replace"):
        return fields.count("first_k_dense_replace")
    only = fields.get("mlp_only_layers")
    return len(only) if isinstance(only, list) else 0
