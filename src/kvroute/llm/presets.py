"""Model presets by name, with the geometry that their authors published."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from kvroute.llm.compute import Compute, Indexer, Latent, Sublayers, attention, feed_forward, latent_attention
from kvroute.llm.config import from_config
from kvroute.llm.geometry import Layers, Model, ModelShape
from kvroute.types import InputError

MIB = 2**20
_VARIANT = re.compile(r"-(instruct|chat|hf|base|exp|thinking|fp8|bf16|awq|gptq|v0\.\d|a\d+b|\d{4})$", re.ASCII)
"""Suffixes of Hugging Face names that do not affect the KV cache: training, date, format of weights, active size."""
_SAME_GEOMETRY = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3", "bloom": "bloom-176b"}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Dimensions of a model's matrices, from its config.json on Hugging Face or from its technical report."""

    hidden: int
    heads: int
    width: int
    """Intermediate size; of a mixture of experts, of all active experts together."""
    experts: int = 0
    """Experts among which a router chooses."""
    dense: tuple[int, int] = (0, 0)
    """Number and intermediate size of the layers without experts."""
    matrices: int = 3
    """Matrices of a feed-forward layer: 3 with a gate, 2 without."""
    vocabulary: int = 0
    """Rows of the embedding; 0: not known."""
    tied: bool = False
    """Whether the output layer is the embedding."""

    def shape(self, compute: Compute) -> ModelShape:
        """Return the shape; the parameters of a mixture of experts are not known, because `width` has the active ones
        only."""
        if self.experts or not self.vocabulary:
            return ModelShape(self.hidden, self.heads)
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return ModelShape(self.hidden, self.heads, compute.active_parameters + embeddings)

    def behind(self, layers: int) -> tuple[Sublayers, ...]:
        """Return the feed-forward sublayers of `layers` layers."""
        dense, width = self.dense
        experts = feed_forward(layers - dense, self.hidden, self.width, matrices=self.matrices, experts=self.experts)
        return (feed_forward(dense, self.hidden, width), experts) if dense else (experts,)


def _attention(name: str, layers: int, kv_heads: int, sizes: _Sizes, head_dim: int = 128) -> Model:
    dims = {"key_dim": head_dim, "value_dim": head_dim}
    first = attention(layers, sizes.hidden, sizes.heads, kv_heads, **dims)
    compute = Compute((first, *sizes.behind(layers)))
    return Model(name, (Layers("attention", layers, kv_heads, head_dim, head_dim),), compute, sizes.shape(compute))


def _plain(name: str, layers: int, heads: int, hidden: int, vocabulary: int) -> Model:
    """Return a model with as many KV heads as heads, whose feed-forward layers have no gate and four times the hidden
    size, and whose output layer is the embedding."""
    sizes = _Sizes(hidden, heads, 4 * hidden, matrices=2, vocabulary=vocabulary, tied=True)
    return _attention(name, layers, heads, sizes)


def _latent(name: str, layers: int, sizes: _Sizes, indexer: Indexer | None = None) -> Model:
    """Return DeepSeek's MLA layers: a latent of 512 numbers and a rotary key of 64. An indexer keeps an FP8 key of 128
    numbers and its float32 scale."""
    first = latent_attention(layers, sizes.hidden, sizes.heads, Latent(), indexer)
    index_bytes = indexer.dim + 4.0 if indexer else 0.0
    compute = Compute((first, *sizes.behind(layers)))
    groups = (Layers("mla", layers, key_dim=576, index_bytes=index_bytes),)
    return Model(name, groups, compute, sizes.shape(compute))


def _gpt_oss(name: str, layers: int, experts: int) -> Model:
    """Return a model in which every second layer attends to the last 128 tokens only."""
    sizes = _Sizes(2880, 64, 4 * 2880, experts)
    half = layers // 2
    window = attention(half, sizes.hidden, sizes.heads, 8, key_dim=64, value_dim=64, window_tokens=128)
    full = attention(half, sizes.hidden, sizes.heads, 8, key_dim=64, value_dim=64)
    compute = Compute((window, full, *sizes.behind(layers)))
    groups = (Layers("sliding", half, 8, 64, 64, window_tokens=128), Layers("attention", half, 8, 64, 64))
    return Model(name, groups, compute, sizes.shape(compute))


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


_DEEPSEEK_V3 = _Sizes(7168, 128, (8 + 1) * 2048, 256, (3, 18432))

MODELS: dict[str, Model] = {
    preset.name: preset
    for preset in (
        _plain("bloom-176b", 70, 112, 14336, 250880),
        _latent("deepseek-v2", 60, _Sizes(5120, 128, (6 + 2) * 1536, 160, (1, 12288))),
        _latent("deepseek-v3", 61, _DEEPSEEK_V3),
        _latent("deepseek-v3.2", 61, _DEEPSEEK_V3, Indexer()),
        _gpt_oss("gpt-oss-120b", 36, 128),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _latent("kimi-k2", 61, _Sizes(7168, 64, (8 + 1) * 2048, 384, (1, 18432))),
        _kimi_linear(),
        _attention("llama-2-70b", 80, 8, _Sizes(8192, 64, 28672, vocabulary=32000)),
        _attention("llama-2-7b", 32, 32, _Sizes(4096, 32, 11008, vocabulary=32000)),
        _attention("llama-3-70b", 80, 8, _Sizes(8192, 64, 28672, vocabulary=128256)),
        _attention("llama-3-8b", 32, 8, _Sizes(4096, 32, 14336, vocabulary=128256)),
        _attention("llama-3.1-405b", 126, 8, _Sizes(16384, 128, 53248, vocabulary=128256)),
        _attention("llama-3.1-70b", 80, 8, _Sizes(8192, 64, 28672, vocabulary=128256)),
        _attention("llama-3.1-8b", 32, 8, _Sizes(4096, 32, 14336, vocabulary=128256)),
        _attention("llama-3.3-70b", 80, 8, _Sizes(8192, 64, 28672, vocabulary=128256)),
        _attention("minimax-m2.5", 62, 8, _Sizes(3072, 48, 8 * 1536, 256)),
        _attention("mixtral-8x22b", 56, 8, _Sizes(6144, 48, 2 * 16384, 8)),
        _attention("mixtral-8x7b", 32, 8, _Sizes(4096, 32, 2 * 14336, 8)),
        _plain("opt-13b", 40, 40, 5120, 50272),
        _plain("opt-175b", 96, 96, 12288, 50272),
        _plain("opt-66b", 64, 72, 9216, 50272),
        _prfaas_hybrid(),
        _attention("qwen2.5-32b", 64, 8, _Sizes(5120, 40, 27648, vocabulary=152064)),
        _attention("qwen2.5-72b", 80, 8, _Sizes(8192, 64, 29568, vocabulary=152064)),
        _attention("qwen2.5-7b", 28, 4, _Sizes(3584, 28, 18944, vocabulary=152064)),
        _attention("qwen3-235b", 94, 4, _Sizes(4096, 64, 8 * 1536, 128)),
        _attention("qwen3-30b", 48, 4, _Sizes(2048, 32, 8 * 768, 128)),
        _attention("qwen3-32b", 64, 8, _Sizes(5120, 64, 25600, vocabulary=151936)),
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
