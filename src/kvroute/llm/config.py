"""Reads a Hugging Face config.json into a `Model`; rejects models that it would have to guess (Mamba, per-layer
heads)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from kvroute.llm.config_compute import compute_of, shape_of
from kvroute.llm.config_fields import HEADS, LAYER_COUNT, Fields, head_dim, kv_heads
from kvroute.llm.geometry import Layers, Model
from kvroute.types import InputError

_Span: TypeAlias = Literal["full", "sliding", "chunked", "linear"]

_NESTED = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_LAYER_TYPES: dict[str, _Span] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}
_WINDOW_PERIOD = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Period of full-attention layers by model type, for files with or without their own value."""
_REFUSED = {
    "block_configs": "its layers have different numbers of heads",
    "hybrid_override_pattern": "it has Mamba layers",
    "attn_layer_period": "it has Mamba layers",
    "ssm_cfg": "it has Mamba layers",
    "mamba_d_state": "it has Mamba layers",
}
_INDEX_SCALE_BYTES = 4  # the indexer of DeepSeek-V3.2 keeps FP8 keys with one float32 scale per 128 numbers
_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def from_config(config: Mapping[str, Any] | Path, *, name: str = "", element_bytes: float | None = None) -> Model:
    """Return the geometry described by a config.json (a mapping, a file or the folder that contains it).

    Args:
        config: Llama-, Qwen-, Mistral-, DeepSeek-, GPT-OSS-, Gemma-, MiniMax-, Kimi-, OPT-, GPT-2-like fields; the text
            part of a multimodal model. Draft layers for speculative decoding are not counted.
        name: name of the model; default: `_name_or_path`, `model_type` or the file's folder.
        element_bytes: bytes of one number in the KV cache; default: the file's quantisation of the cache, else 2.

    Raises:
        InputError: a file that cannot be read, a field that is missing or wrong, an architecture that is not modelled.
    """
    where = "config"
    if isinstance(config, Path):
        path = config / "config.json" if config.is_dir() else config
        where, config = str(path), _load(path)
        name = name or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    fields = _text_part(Fields(config, where))
    size = element_bytes if element_bytes is not None else _element_bytes(config, fields)
    if not 0 < size <= 8:
        raise fields.error(f"{size!r} bytes per KV value is not possible", "give 0.5, 1, 2 or 4")
    name = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
    layers = _layers(fields, size)
    compute = compute_of(fields, layers)
    return Model(name, layers, compute, shape_of(fields, compute))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
        if not content.strip():
            raise InputError("the file is empty", where=str(path), hint="give a Hugging Face config.json")
        document = msgspec.json.decode(content)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint="give a config.json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"is not JSON ({error})", where=str(path), hint="give a Hugging Face config.json") from error
    if not isinstance(document, dict):
        raise InputError("is not a JSON object", where=str(path), hint="give a Hugging Face config.json")
    return document


def _text_part(fields: Fields) -> Fields:
    """Return the fields of the language model, which multimodal files nest."""
    while fields.get(*LAYER_COUNT) is None:
        nested = next((name for name in _NESTED if isinstance(fields.get(name), Mapping)), None)
        if nested is None:
            break
        fields = fields.inner(nested)
    for name, reason in _REFUSED.items():
        if fields.get(name) is not None:
            raise fields.error(f"{fields.prefix}{name} says that {reason}, which is not modelled")
    if fields.get("is_encoder_decoder"):
        raise fields.error("encoder-decoder models are not modelled", "give a decoder-only model")
    return fields


def _element_bytes(config: Mapping[str, Any], fields: Fields) -> float:
    """Return the bytes per number of the KV cache.

    The type of the weights does not decide: servers use a 16-bit cache unless configured otherwise.
    """
    for quantisation in (config.get("quantization_config"), fields.get("quantization_config")):
        if not isinstance(quantisation, Mapping):
            continue
        scheme = quantisation.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and isinstance(bits := scheme.get("num_bits"), int):
            return bits / 8
        if "FP8" in str(quantisation.get("kv_cache_quant_algo", "")).upper():
            return 1.0
    return 2.0


def _layers(fields: Fields, element_bytes: float) -> tuple[Layers, ...]:
    total = fields.count(*LAYER_COUNT)
    spans = _spans(fields, total)
    shared = fields.get("num_kv_shared_layers") or 0
    if shared:  # these layers read the cache of earlier layers
        fields.count("num_kv_shared_layers")
        spans = spans[: max(total - shared, 1)]
    groups: list[Layers] = []
    for span, count in Counter(spans).items():
        if span == "linear":
            groups.append(_linear(fields, count, element_bytes))
        elif span == "full" and fields.get("kv_lora_rank") is not None:
            groups.append(_latent(fields, count, element_bytes))
        else:
            groups.append(_attention(fields, span, count, element_bytes))
    return tuple(groups)


def _spans(fields: Fields, total: int) -> list[_Span]:
    """Return the attention span of each layer, from the first known field that the file has."""
    if fields.get("layer_types") is not None:
        spans = [_span(fields, kind) for kind in fields.sequence("layer_types", total)]
    elif fields.get("linear_attn_config") is not None:
        full = fields.inner("linear_attn_config").get("full_attn_layers")
        if not isinstance(full, list):
            raise fields.error(f"the field {fields.prefix}linear_attn_config.full_attn_layers is missing")
        spans = ["full" if layer + 1 in full else "linear" for layer in range(total)]
    elif fields.get("attn_type_list") is not None:
        spans = ["full" if kind else "linear" for kind in fields.sequence("attn_type_list", total)]
    elif fields.get("hybrid_layer_pattern") is not None:
        spans = ["sliding" if kind else "full" for kind in fields.sequence("hybrid_layer_pattern", total)]
    elif fields.get("layer_group_size", "full_attention_interval") is not None:
        period = fields.count("layer_group_size", "full_attention_interval")
        tail = total // period * period  # an incomplete last group has full attention only
        spans = ["full" if (layer + 1) % period == 0 or layer >= tail else "linear" for layer in range(total)]
    else:
        spans = _windows(fields, total)
    if fields.get("use_sliding_window") is False:
        spans = ["full" if span == "sliding" else span for span in spans]
    return spans


def _span(fields: Fields, kind: object) -> _Span:
    if not isinstance(kind, str) or kind not in _LAYER_TYPES:
        raise fields.error(f"{fields.prefix}layer_types contains {kind!r}, which is not modelled")
    return _LAYER_TYPES[kind]


def _windows(fields: Fields, total: int) -> list[_Span]:
    """Return the spans of files older than `layer_types`."""
    kind = str(fields.get("model_type") or "")
    used = fields.get("use_sliding_window")
    if fields.get("sliding_window") is None or used is False or (used is None and kind.startswith("qwen")):
        return ["full"] * total
    if kind.startswith("qwen"):
        first = fields.get("max_window_layers") or 0
        return ["full" if layer < first else "sliding" for layer in range(total)]
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    period = fields.count(*names, default=_WINDOW_PERIOD.get(kind, total + 1))
    return ["full" if (layer + 1) % period == 0 else "sliding" for layer in range(total)]


def _attention(fields: Fields, span: _Span, count: int, element_bytes: float) -> Layers:
    heads = fields.count(*HEADS)
    shared, key_dim = kv_heads(fields, heads), head_dim(fields, heads)
    value_dim = fields.count("v_head_dim", default=key_dim)
    if span == "full":
        return Layers("attention", count, shared, key_dim, value_dim, element_bytes)
    window = (
        fields.count("sliding_window", "sliding_window_size")
        if span == "sliding"
        else fields.count("attention_chunk_size")
    )
    shared = fields.count("swa_num_key_value_heads", default=shared)
    key_dim = fields.count("swa_head_dim", default=key_dim)
    value_dim = fields.count("swa_v_head_dim", default=value_dim)
    return Layers("sliding", count, shared, key_dim, value_dim, element_bytes, window_tokens=window)


def _latent(fields: Fields, count: int, element_bytes: float) -> Layers:
    """Return MLA layers: compressed keys and values, and one rotary key that all heads share (DeepSeek-V2 2.1)."""
    key_dim = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
    index_bytes = 0.0
    if fields.get("index_head_dim") is not None:
        index_dim = fields.count("index_head_dim")
        index_bytes = float(index_dim + _INDEX_SCALE_BYTES * -(-index_dim // 128))
    return Layers("mla", count, key_dim=key_dim, element_bytes=element_bytes, index_bytes=index_bytes)


def _linear(fields: Fields, count: int, element_bytes: float) -> Layers:
    """Return linear-attention layers.

    Their state is a matrix per head (float32 unless `mamba_ssm_dtype` is set) and the last steps of a convolution.
    """
    conv_bytes = max(element_bytes, 2.0)  # a quantised KV cache does not change the state
    number_bytes = _STATE_BYTES.get(str(fields.get("mamba_ssm_dtype") or "float32"), 4)
    if fields.get("linear_attn_config") is not None:  # KDA: q, k and v are convolved
        inner = fields.inner("linear_attn_config")
        heads, dim = inner.count("num_heads"), inner.count("head_dim")
        steps = inner.count("short_conv_kernel_size") - 1
        state = heads * dim * dim * number_bytes + 3 * heads * dim * steps * conv_bytes
    elif fields.get("linear_num_value_heads") is not None:  # gated delta net: fewer key heads than value heads
        heads, dim = fields.count("linear_num_value_heads"), fields.count("linear_value_head_dim")
        key_dim = fields.count("linear_key_head_dim")
        steps = fields.count("linear_conv_kernel_dim") - 1
        width = 2 * fields.count("linear_num_key_heads") * key_dim + heads * dim
        state = heads * dim * key_dim * number_bytes + width * steps * conv_bytes
    elif fields.get("layer_group_size", "attn_type_list") is not None or "minimax" in str(fields.get("model_type")):
        heads = fields.count(*HEADS)  # lightning attention
        state = heads * head_dim(fields, heads) ** 2 * number_bytes
    else:
        what = "linear-attention layers are given without the size of their state"
        raise fields.error(what, "add `linear_attn_config` or `linear_num_value_heads` and its dimensions")
    return Layers("linear", count, kv_heads=heads, state_bytes=float(state))
