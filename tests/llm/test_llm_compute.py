"""Operations of a prefill: laws, published parameter counts, configurations as published, DualPath's table 1."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llm.test_llm import (
    DEEPSEEK_V32,
    GPT_OSS_120B,
    MINIMAX_M2,
    MIXTRAL,
    OPT_13B,
    QWEN_2_5_32B,
    QWEN_3_235B,
)

from kvroute.llm import MODELS, Layers, Model, from_config
from kvroute.planner.throughput.cache_compute import cache_compute, mean_context
from kvroute.types import InputError

KNOWN = {name: preset for name, preset in MODELS.items() if preset.compute is not None}
known = st.sampled_from(list(KNOWN.values()))
lengths = st.integers(0, 1_000_000)


@settings(deadline=None)
@given(known, lengths, lengths)
def test_a_longer_context_takes_no_fewer_operations(preset: Model, context: int, more: int) -> None:
    assert preset.token_flop(context) <= preset.token_flop(context + more)


@settings(deadline=None)
@given(known)
def test_without_a_context_two_operations_per_active_parameter_remain(preset: Model) -> None:
    assert preset.compute is not None
    assert preset.token_flop(0) == pytest.approx(2 * preset.compute.active_parameters)


@settings(deadline=None)
@given(known, lengths, st.integers(1, 10_000), st.sampled_from([0.5, 1.0, 4.0]))
def test_the_ratio_is_proportional_to_the_bytes_of_a_number(
    preset: Model, cached: int, appended: int, size: float
) -> None:
    """Except for indexer keys."""
    layers = tuple(Layers(g.kind, g.count, g.kv_heads, g.key_dim, g.value_dim) for g in preset.layers)
    bare = Model(preset.name, layers, preset.compute)
    ratio = cache_compute(bare, cached, appended).cached_bytes_per_flop
    assert cache_compute(bare.with_kv_numbers(size), cached, appended).cached_bytes_per_flop == pytest.approx(
        ratio * size / 2
    )


@pytest.mark.parametrize(
    ("name", "embeddings", "published"),
    [
        # Parameters in billions: of the embedding and output matrices that the published number includes; published.
        ("deepseek-v2", 2 * 102_400 * 5120, 21),
        ("deepseek-v3", 129_280 * 7168, 37),
        ("gpt-oss-120b", 201_088 * 2880, 5.13),
        ("gpt-oss-20b", 201_088 * 2880, 3.61),
        ("kimi-k2", 163_840 * 7168, 32),
        ("llama-3.1-405b", 2 * 128_256 * 16_384, 405),
        ("llama-3.1-8b", 2 * 128_256 * 4096, 8.03),
        ("minimax-m2.5", 0, 10),
        ("mixtral-8x22b", 2 * 32_768 * 6144, 39.1),
        ("mixtral-8x7b", 2 * 32_000 * 4096, 12.9),
        ("opt-175b", 50_272 * 12_288, 175),
        ("qwen2.5-32b", 0, 31.0),
        ("qwen2.5-72b", 0, 70.0),
        ("qwen2.5-7b", 0, 6.53),
        ("qwen3-235b", 2 * 151_936 * 4096, 22),
        ("qwen3-30b", 2 * 151_936 * 2048, 3.3),
        ("qwen3-32b", 0, 31.2),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, embeddings: float, published: float) -> None:
    compute = MODELS[name].compute
    assert compute is not None
    assert (compute.active_parameters + embeddings) / 1e9 == pytest.approx(published, rel=0.025)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen2.5-32b", QWEN_2_5_32B | {"intermediate_size": 27_648}),
        (
            "qwen3-235b",
            QWEN_3_235B
            | {
                "intermediate_size": 12_288,
                "moe_intermediate_size": 1536,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "mlp_only_layers": [],
            },
        ),
        ("mixtral-8x7b", MIXTRAL | {"intermediate_size": 14_336, "num_experts_per_tok": 2, "num_local_experts": 8}),
        ("minimax-m2.5", MINIMAX_M2 | {"intermediate_size": 1536, "num_experts_per_tok": 8, "num_local_experts": 256}),
        ("opt-13b", OPT_13B | {"ffn_dim": 20_480}),
        (
            "gpt-oss-120b",
            GPT_OSS_120B | {"intermediate_size": 2880, "num_experts_per_tok": 4, "num_local_experts": 128},
        ),
        (
            "deepseek-v3.2",
            DEEPSEEK_V32
            | {
                "first_k_dense_replace": 3,
                "index_topk": 2048,
                "intermediate_size": 18_432,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "q_lora_rank": 1536,
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_presets_compute_what_their_configurations_say(name: str, config: dict[str, Any]) -> None:
    for context in (0, 100, 5000, 100_000):
        assert from_config(config).token_flop(context) == pytest.approx(MODELS[name].token_flop(context))


def test_the_operations_of_deepseek_v32_by_hand() -> None:
    """Latents of 512 and rotary keys of 64 on 128 heads for 2,048 tokens, 64 indexer heads of 128 for all tokens."""
    compute = MODELS["deepseek-v3.2"].compute
    assert compute is not None
    attended, indexed = 2 * 128 * (512 + 64 + 512), 2 * 64 * 128
    context = mean_context(32_271, 429)
    assert context == 32_486
    by_hand = 2 * compute.active_parameters + 61 * (2048 * attended + context * indexed)
    assert MODELS["deepseek-v3.2"].token_flop(context) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(141e9, rel=0.01)


def test_the_27b_model_of_dualpath() -> None:
    """Appendix A.2; the dimensions of MLA are those of DeepSeek-V3, without compression of queries."""
    config = {
        "first_k_dense_replace": 1,
        "hidden_size": 2560,
        "index_head_dim": 64,
        "index_n_heads": 32,
        "index_topk": 1024,
        "intermediate_size": 12_288,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 72,
        "n_shared_experts": 2,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 30,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
    }
    assert from_config(config).token_flop(32_486) == pytest.approx(13.8e9, rel=0.03)


@pytest.mark.parametrize(
    ("name", "kv_number", "published", "within"),
    [
        ("qwen2.5-32b", 2, (117, 267), 0.02),
        ("gpt-oss-120b", 1, (47, 95), 0.08),
        ("qwen3-235b", 1, (39, 60), 0.02),
        ("deepseek-v3.2", 1, (13, 36), 0.06),
        ("deepseek-v3", 1, (4.8, 5.8), 0.23),
    ],
)
def test_dualpath_table_1(name: str, kv_number: float, published: tuple[float, float], within: float) -> None:
    """16K and 64K of context, 429 appended tokens. The publication does not say how it counts DeepSeek's MLA."""
    preset = MODELS[name].with_kv_numbers(kv_number)
    for cached, gb_per_pflop in zip((16_384, 65_536), published, strict=True):
        assert cache_compute(preset, cached, 429).cached_bytes_per_flop * 1e6 == pytest.approx(gb_per_pflop, rel=within)


@pytest.mark.parametrize(
    "config",
    [
        QWEN_2_5_32B,
        QWEN_2_5_32B | {"intermediate_size": [1024] * 64},
        QWEN_2_5_32B | {"intermediate_size": 10**400},
        MIXTRAL | {"intermediate_size": 14_336, "num_experts_per_tok": "two"},
    ],
)
def test_a_file_without_usable_sizes_still_gives_its_kv_cache(config: dict[str, Any]) -> None:
    """But not its operations."""
    found = from_config(config)
    assert found.kv_bytes(100) > 0
    with pytest.raises(InputError, match=r"operations of a prefill of .* are not known"):
        found.token_flop(100)


def test_an_indexer_has_the_dimensions_of_deepseek_v32_unless_given() -> None:
    config = DEEPSEEK_V32 | {"intermediate_size": 18_432, "q_lora_rank": 1536}
    assert from_config(config).token_flop(5000) == from_config(config | {"index_topk": 2048}).token_flop(5000)


def test_models_with_linear_attention_have_no_known_operations() -> None:
    with pytest.raises(InputError, match="kimi-linear-48b are not known"):
        cache_compute(MODELS["kimi-linear-48b"], 1000, 100)
