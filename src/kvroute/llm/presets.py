"""Model presets by name, with the geometry that their authors published."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from kvroute.llm.config import from_config
from kvroute.llm.geometry import Layers, Model
from kvroute.types import InputError

MIB = 2**20
_VARIANT = re.compile(r"-(instruct|chat|hf|base|exp|thinking|fp8|bf16|awq|gptq|v0\.\d|a\d+b|\d{4})$", re.ASCII)
"""Suffixes of Hugging Face names that do not affect the KV cache: training, date, format of weights, active size."""
_SAME_GEOMETRY = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3", "bloom": "bloom-176b"}


def _attention(name: str, layers: int, kv_heads: int, head_dim: int = 128) -> Model:
    return Model(name, (Layers("attention", layers, kv_heads, head_dim, head_dim),))


def _latent(name: str, layers: int, index_bytes: float = 0.0) -> Model:
    """Return DeepSeek's MLA layers: a latent of 512 numbers and a rotary key of 64."""
    return Model(name, (Layers("mla", layers, key_dim=576, index_bytes=index_bytes),))


def _gpt_oss(name: str, layers: int) -> Model:
    """Return a model in which every second layer attends to the last 128 tokens only."""
    window = Layers("sliding", layers // 2, 8, 64, 64, window_tokens=128)
    return Model(name, (window, Layers("attention", layers // 2, 8, 64, 64)))


def _kimi_linear() -> Model:
    """Return Kimi Linear: KDA:MLA about 3:1. A KDA head keeps a 128 x 128 float32 state; q, k and v keep three
    convolution steps."""
    state_bytes = 32 * 128 * 128 * 4 + 3 * (32 * 128) * 3 * 2
    kda = Layers("linear", 20, kv_heads=32, state_bytes=float(state_bytes))
    return Model("kimi-linear-48b", (kda, Layers("mla", 7, key_dim=576)))


def _prfaas_hybrid() -> Model:
    """Return the 1T KDA:MLA 3:1 model of PrfaaS, fitted to its Table 5 (173.9 MiB of state, 15 x 576 x 2 bytes a
    token).

    Its head count is not published; 64 only determines how the state is split over shards.
    """
    kda = Layers("linear", 45, kv_heads=64, state_bytes=173.9 * MIB / 45)
    return Model("prfaas-1t-hybrid", (kda, Layers("mla", 15, key_dim=576)))


MODELS: dict[str, Model] = {
    preset.name: preset
    for preset in (
        _attention("bloom-176b", 70, 112),
        _latent("deepseek-v2", 60),
        _latent("deepseek-v3", 61),
        _latent("deepseek-v3.2", 61, index_bytes=132.0),
        _gpt_oss("gpt-oss-120b", 36),
        _gpt_oss("gpt-oss-20b", 24),
        _latent("kimi-k2", 61),
        _kimi_linear(),
        _attention("llama-2-70b", 80, 8),
        _attention("llama-2-7b", 32, 32),
        _attention("llama-3-70b", 80, 8),
        _attention("llama-3-8b", 32, 8),
        _attention("llama-3.1-405b", 126, 8),
        _attention("llama-3.1-70b", 80, 8),
        _attention("llama-3.1-8b", 32, 8),
        _attention("llama-3.3-70b", 80, 8),
        _attention("minimax-m2.5", 62, 8),
        _attention("mixtral-8x22b", 56, 8),
        _attention("mixtral-8x7b", 32, 8),
        _attention("opt-13b", 40, 40),
        _attention("opt-175b", 96, 96),
        _attention("opt-66b", 64, 72),
        _prfaas_hybrid(),
        _attention("qwen2.5-32b", 64, 8),
        _attention("qwen2.5-72b", 80, 8),
        _attention("qwen2.5-7b", 28, 4),
        _attention("qwen3-235b", 94, 4),
        _attention("qwen3-30b", 48, 4),
        _attention("qwen3-32b", 64, 8),
    )
}
"""Presets by name, ascending, with a 16-bit KV cache."""


def model(name: str) -> Model:
    """Return a preset, or the model of a config.json (the file, or the folder that contains it).

    Hugging Face names of known models are accepted. Case, an organisation and suffixes that do not change the KV cache
    are ignored: `meta-llama/Llama-3.3-70B-Instruct` is `llama-3.3-70b`.

    Raises:
        InputError: no such preset (the message has the nearest one), or a file that does not describe a model.
    """
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return from_config(path)
    key = _preset_name(name)
    if key in MODELS:
        return MODELS[key]
    if path.is_file():
        return from_config(path)
    near = get_close_matches(key, MODELS, n=1)
    guess = f"did you mean {near[0]}? `kvroute llm` lists" if near else "`kvroute llm` lists"
    raise InputError(f"there is no model {name!r}", hint=f"{guess} the presets; or give a config.json")


def _preset_name(name: str) -> str:
    """Return the preset's name for a Hugging Face name; without a preset, the name without organisation and known
    suffixes."""
    key = name.strip().rpartition("/")[2].lower().removeprefix("meta-")
    while key not in MODELS and key not in _SAME_GEOMETRY and (shorter := _VARIANT.sub("", key)) != key:
        key = shorter
    return _SAME_GEOMETRY.get(key, key)
