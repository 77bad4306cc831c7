"""Laws of KV sizes, and the geometry read from configurations as published by the models' authors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvroute.cli.inspect.llm import llm
from kvroute.llm import MODELS, Layers, Model, from_config, model
from kvroute.types import InputError

MIB = 2**20
models = st.sampled_from(list(MODELS.values()))
lengths = st.integers(0, 1_000_000)

LLAMA_3_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
LLAMA_2_7B = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
QWEN_2_5_32B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 64,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
QWEN_3_235B = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
}
MIXTRAL = {
    "model_type": "mixtral",
    "head_dim": None,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "head_dim": 72,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "qk_rope_head_dim": 64,
}
OPT_13B = {"model_type": "opt", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40}
PUBLISHED = [
    ("llama-3-70b", LLAMA_3_70B),
    ("llama-2-7b", LLAMA_2_7B),
    ("qwen2.5-32b", QWEN_2_5_32B),
    ("qwen3-235b", QWEN_3_235B),
    ("mixtral-8x7b", MIXTRAL),
    ("deepseek-v3", DEEPSEEK_V3),
    ("deepseek-v3.2", DEEPSEEK_V32),
    ("gpt-oss-120b", GPT_OSS_120B),
    ("minimax-m2.5", MINIMAX_M2),
    ("kimi-linear-48b", KIMI_LINEAR),
    ("opt-13b", OPT_13B),
]


@settings(deadline=None)
@given(models, lengths, lengths)
def test_a_longer_context_never_needs_less_kv(preset: Model, tokens: int, more: int) -> None:
    assert preset.kv_bytes(tokens) <= preset.kv_bytes(tokens + more)


@settings(deadline=None)
@given(models, lengths, lengths, lengths)
def test_a_longer_cached_prefix_never_sends_more(preset: Model, tokens: int, cached: int, more: int) -> None:
    assert preset.kv_bytes(tokens, cached + more) <= preset.kv_bytes(tokens, cached) <= preset.kv_bytes(tokens)


@settings(deadline=None)
@given(models, lengths)
def test_a_fully_cached_prompt_still_sends_its_state(preset: Model, tokens: int) -> None:
    assert preset.kv_bytes(tokens, tokens) == preset.kv_bytes(0) == preset.request_state_bytes


@settings(deadline=None)
@given(models, lengths, st.lists(lengths, min_size=1, max_size=5))
def test_arrays_give_the_same_results_as_numbers(preset: Model, tokens: int, cached: list[int]) -> None:
    one_by_one = [preset.kv_bytes(tokens, count) for count in cached]
    assert preset.kv_bytes(tokens, np.array(cached)).tolist() == one_by_one
    assert preset.kv_bytes(np.full(len(cached), tokens), np.array(cached)).tolist() == one_by_one


@settings(deadline=None)
@given(models, lengths, st.integers(1, 64))
def test_all_shards_together_store_at_least_one_copy(preset: Model, tokens: int, tp: int) -> None:
    together = tp * preset.kv_bytes_shard(tokens, tp)
    assert together >= preset.kv_bytes(tokens) * (1 - 1e-12)
    assert preset.kv_bytes_shard(tokens, tp) <= preset.kv_bytes(tokens) * (1 + 1e-12)


@settings(deadline=None)
@given(models)
def test_beyond_all_windows_each_token_adds_the_rate(preset: Model) -> None:
    assert preset.kv_bytes(200_001) - preset.kv_bytes(200_000) == pytest.approx(preset.kv_bytes_per_token)


@pytest.mark.parametrize(("name", "config"), PUBLISHED, ids=[name for name, _ in PUBLISHED])
def test_presets_are_the_published_configurations(name: str, config: dict[str, Any]) -> None:
    read, preset = from_config(config), MODELS[name]
    assert read.kv_bytes_per_token == preset.kv_bytes_per_token
    assert read.request_state_bytes == preset.request_state_bytes
    assert read.kv_bytes(100) == preset.kv_bytes(100)
    assert read.kv_bytes_shard(5000, 4) == preset.kv_bytes_shard(5000, 4)


def test_llama_3_70b_has_the_kv_size_published_by_netkv() -> None:
    """NetKV I and III-B: 128K tokens are about 40 GB, a quarter of it for each of four shards."""
    llama = MODELS["llama-3-70b"]
    assert llama.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2 == 327_680
    assert llama.kv_bytes_per_token_shard(4) == 81_920
    assert llama.kv_bytes_per_token_layer("attention") == 4096
    assert llama.kv_bytes(131_072) == 40 * 2**30
    assert llama.kv_bytes(1000, 400) == 600 * 327_680


def test_few_heads_and_latents_are_replicated() -> None:
    assert MODELS["qwen3-235b"].kv_bytes_per_token_shard(8) == 192_512 / 4  # 4 heads on 8 shards
    assert MODELS["deepseek-v3"].kv_bytes_per_token_shard(8) == MODELS["deepseek-v3"].kv_bytes_per_token == 70_272
    assert Model("odd", (Layers("attention", 1, 8, 1, 1, 1.0),)).kv_bytes_per_token_shard(3) == 6  # 3, 3 and 2 heads


@pytest.mark.parametrize(("tokens", "mib"), [(1024, 190.8), (8192, 308.9), (32_768, 701.3), (131_072, 2316.3)])
def test_the_prfaas_hybrid_fits_table_5(tokens: int, mib: float) -> None:
    assert MODELS["prfaas-1t-hybrid"].kv_bytes(tokens) / MIB == pytest.approx(mib, rel=0.02)


@pytest.mark.parametrize(("context", "gb_per_pflop"), [(16_384, 117), (65_536, 267)])
def test_qwen_has_the_cache_to_compute_ratio_of_dualpath_table_1(context: int, gb_per_pflop: float) -> None:
    """Append 429: bytes of the context over FLOPs of 32.5e9 weights and of attention to the context."""
    flops = 429 * (2 * 32.5e9 + 4 * 64 * 5120 * context)
    assert MODELS["qwen2.5-32b"].kv_bytes(context) / 1e9 / (flops / 1e15) == pytest.approx(gb_per_pflop, rel=0.02)


def test_windows_store_only_their_last_tokens() -> None:
    oss = MODELS["gpt-oss-120b"]
    layer = 2 * 8 * 64 * 2
    assert oss.kv_bytes(100) == 36 * 100 * layer
    assert oss.kv_bytes(1000) == 18 * (1000 + 128) * layer
    assert oss.kv_bytes(1000, 950) == 36 * 50 * layer
    assert oss.kv_bytes_per_token == 18 * layer


@given(models, st.integers(1, 4096))
def test_a_block_holds_the_kv_of_its_tokens(preset: Model, tokens: int) -> None:
    """State per request is not in blocks."""
    assert preset.block_bytes(tokens) == tokens * preset.kv_bytes_per_token > 0


def test_a_block_of_sliding_windows_only_has_the_size_of_the_first_block() -> None:
    """Such a model has no KV per token in the long run, but its blocks are not empty."""
    narrow = Model("narrow", (Layers("sliding", 3, 2, 128, 128, window_tokens=64),))
    assert narrow.kv_bytes_per_token == 0
    assert narrow.block_bytes(16) == narrow.kv_bytes(16) == 16 * 3 * 2 * 2 * 128 * 2


DENSE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 12,
    "num_key_value_heads": 2,
}
GDN: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
GDN_STATE = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
COUNTS: list[tuple[str, dict[str, Any], dict[str, int], float]] = [
    ("mistral", DENSE | {"model_type": "mistral", "sliding_window": 4096}, {"sliding": 12}, 0),
    ("qwen2 without the switch", DENSE | {"model_type": "qwen2", "sliding_window": 4096}, {"attention": 12}, 0),
    (
        "qwen2 with upper windows",
        DENSE | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 8},
        {"attention": 8, "sliding": 4},
        0,
    ),
    (
        "windows switched off",
        DENSE | {"layer_types": ["sliding_attention"] * 12, "use_sliding_window": False, "sliding_window": 64},
        {"attention": 12},
        0,
    ),
    ("gemma2", DENSE | {"model_type": "gemma2", "sliding_window": 4096}, {"attention": 6, "sliding": 6}, 0),
    ("gemma3", DENSE | {"sliding_window": 512, "sliding_window_pattern": 6}, {"attention": 2, "sliding": 10}, 0),
    (
        "llama 4",
        DENSE | {"layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 3, "attention_chunk_size": 8192},
        {"attention": 3, "sliding": 9},
        0,
    ),
    ("shared caches", DENSE | {"num_kv_shared_layers": 4}, {"attention": 8}, 0),
    ("gated delta net", DENSE | GDN, {"attention": 3, "linear": 9}, 9 * GDN_STATE),
    (
        "gated delta net in bfloat16",
        DENSE | GDN | {"mamba_ssm_dtype": "bfloat16"},
        {"attention": 3, "linear": 9},
        9 * (GDN_STATE - 32 * 128 * 128 * 2),
    ),
    ("lightning", DENSE | {"attn_type_list": ([0] * 3 + [1]) * 3}, {"attention": 3, "linear": 9}, 9 * 8 * 64 * 64 * 4),
    (
        "lightning with MLA",
        DENSE | {"layer_group_size": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        {"mla": 5, "linear": 7},
        7 * 8 * 64 * 64 * 4,
    ),
]


@pytest.mark.parametrize(("config", "counts", "state"), [case[1:] for case in COUNTS], ids=[case[0] for case in COUNTS])
def test_layers_are_counted_by_kind_of_attention(config: dict[str, Any], counts: dict[str, int], state: float) -> None:
    read = from_config(config)
    assert {group.kind: group.count for group in read.layers} == counts
    assert read.request_state_bytes == state


def test_windows_may_have_different_heads() -> None:
    """MiMo-V2-Flash: keys of 192 and values of 128 numbers, twice the KV heads in windows of 128."""
    config = {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1],
        "head_dim": 192,
        "v_head_dim": 128,
        "num_attention_heads": 64,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "sliding_window": 128,
        "swa_num_key_value_heads": 8,
    }
    assert from_config(config).kv_bytes(1000) == 1000 * 4 * 320 * 2 + 5 * 128 * 8 * 320 * 2


FORMS: list[tuple[str, dict[str, Any], float]] = [
    ("gpt2", {"n_embd": 768, "n_head": 12, "n_layer": 12}, 2 * 12 * 768 * 2),
    ("starcoder", {"n_embd": 6144, "n_head": 48, "n_layer": 40, "multi_query": True}, 2 * 40 * 128 * 2),
    (
        "falcon 40b",
        {
            "hidden_size": 8192,
            "multi_query": True,
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
        },
        2 * 60 * 8 * 64 * 2,
    ),
    (
        "glm",
        {
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "num_attention_heads": 32,
            "num_layers": 40,
        },
        2 * 40 * 2 * 128 * 2,
    ),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": {"kv_n_heads": 2}}, 2 * 2 * 2 * 16 * 2),
    ("multimodal", {"model_type": "llava", "text_config": LLAMA_3_70B}, 327_680),
    ("nested twice", {"thinker_config": {"text_config": LLAMA_3_70B}}, 327_680),
    ("fp8 cache", LLAMA_3_70B | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 163_840),
    ("fp8 weights", LLAMA_3_70B | {"quantization_config": {"quant_method": "fp8"}}, 327_680),
]


@pytest.mark.parametrize(("config", "token_bytes"), [case[1:] for case in FORMS], ids=[case[0] for case in FORMS])
def test_fields_of_many_model_families_are_read(config: dict[str, Any], token_bytes: float) -> None:
    assert from_config(config).kv_bytes_per_token == token_bytes


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "num_hidden_layers is missing"),
    ({"text_config": {"num_hidden_layers": 3}}, "text_config.num_attention_heads is missing"),
    (DENSE | {"num_hidden_layers": "12"}, "num_hidden_layers is '12'"),
    (DENSE | {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    (DENSE | {"num_attention_heads": 7}, "is not divisible"),
    (DENSE | {"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
    (DENSE | {"layer_types": ["full_attention"]}, "does not list 12 layers"),
    (DENSE | {"layer_types": ["sliding_attention"] * 12}, "sliding_window is missing"),
    (DENSE | {"layer_types": ["linear_attention"] * 12}, "size of their state"),
    (DENSE | {"layer_types": ["mamba"] * 12}, "'mamba', which is not modelled"),
    (DENSE | {"hybrid_override_pattern": "M-M*"}, "Mamba"),
    (DENSE | {"is_encoder_decoder": True}, "encoder-decoder"),
]


@pytest.mark.parametrize(("config", "what"), WRONG, ids=[what for _, what in WRONG])
def test_errors_in_a_configuration_are_named(config: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        from_config(config)


def test_a_file_or_its_folder_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_70B))
    assert model(str(folder)).name == model(str(folder / "config.json")).name == "my-llama"
    assert model(str(folder)).layers == MODELS["llama-3-70b"].layers
    (folder / "config.json").write_text("[1")
    with pytest.raises(InputError, match=r"config\.json: is not JSON"):
        model(str(folder))
    with pytest.raises(InputError, match="cannot be read"):
        model(str(tmp_path / "missing.json"))


def test_an_unknown_name_gives_the_nearest_one() -> None:
    assert model("meta-llama/Llama-3-70B") is MODELS["llama-3-70b"]
    with pytest.raises(InputError, match=r"did you mean qwen2\.5-32b\?"):
        model("qwen25-32b")
    with pytest.raises(InputError, match="choose one of attention"):
        MODELS["llama-3-70b"].kv_bytes_per_token_layer("mla")
    with pytest.raises(InputError, match="0 tensor-parallel shards"):
        MODELS["llama-3-70b"].kv_bytes_per_token_shard(0)


def test_the_command_prints_one_document_or_tables() -> None:
    app, runner = typer.Typer(), CliRunner()
    app.command()(llm)
    document = json.loads(runner.invoke(app, ["llama-3-70b", "--tp", "4", "--tokens", "1000", "--json"]).stdout)
    assert (document["kv_bytes_per_token_shard"], document["kv_bytes"]) == (81_920, 327_680_000)
    assert [load["name"] for load in json.loads(runner.invoke(app, ["--json"]).stdout)] == sorted(MODELS)
    assert "gpt-oss-20b" in runner.invoke(app, []).stdout
    assert "sliding" in runner.invoke(app, ["gpt-oss-20b"]).stdout
    refused = runner.invoke(app, ["--tokens", "-1"])
    assert refused.exit_code == 2
    assert "is not a number of tokens" in " ".join(refused.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2.5-72b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi-linear-48b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("bigscience/bloom", "bloom-176b"),
    ],
)
def test_hugging_face_names_of_known_models_are_accepted(name: str, preset: str) -> None:
    assert model(name) == MODELS[preset]


@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "deepseek-ai/DeepSeek-V2-Lite-Chat", "instruct", "-instruct"]
)
def test_a_name_that_only_resembles_a_known_model_is_rejected(name: str) -> None:
    """A distilled or a smaller model has another geometry."""
    with pytest.raises(InputError, match="there is no model"):
        model(name)
