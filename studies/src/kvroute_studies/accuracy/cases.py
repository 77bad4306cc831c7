"""The measured runs, and what the model needs to know of their models and GPUs, as data.

Sources of the runs: inference-sim/training (vLLM on H100 under inference-perf) and LLMServingSim's `bench/examples`
(vLLM 0.19 on RTX PRO 6000 and RTX 4090).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.timing.layers import ExpertShape
from kvroute.timing.steps import H100_SXM, GpuRates, ModelCosts

CALIBRATED, UNCALIBRATED, LAYERS = "calibrated", "uncalibrated", "layers"
"""Protocols: terms of a linear step fitted to one run of the model at low load; operations and bytes of the model, and
the GPU's data sheet; measured times of layers."""
CALIBRATING = "codegen"
"""Workload of the run to which a model's step is fitted."""

COSTS: dict[str, ModelCosts] = {
    "llama-2-7b": ModelCosts(32, 4096, 32, 6.74e9, 6.74e9),
    "llama-2-70b": ModelCosts(80, 8192, 8, 68.98e9, 68.98e9),
    "codellama-34b": ModelCosts(48, 8192, 8, 33.74e9, 33.74e9),
    "mixtral-8x7b": ModelCosts(32, 4096, 8, 46.70e9, 12.88e9, experts=8, experts_per_token=2),
    "llama-3.1-8b": ModelCosts(32, 4096, 8, 8.03e9, 8.03e9),
    "qwen3-32b": ModelCosts(64, 5120, 8, 32.76e9, 32.76e9),
    "qwen3-30b": ModelCosts(48, 2048, 4, 30.53e9, 3.35e9, experts=128, experts_per_token=8),
}
"""Layers, sizes and parameters by preset name, from the models' config.json."""
GPUS: dict[str, GpuRates] = {"h100_sxm": H100_SXM}
MEMORY_BYTES: dict[str, float] = {"h100_sxm": 85.0e9, "RTXPRO6000": 96.0e9, "RTX4090": 24.0e9}
"""GPU memory as the engine sees it."""
MEMORY_SHARE, OTHER_BYTES = 0.9, 2.5e9
"""Share of the memory that the engine uses, and what activations and graphs take of it."""
REQUEST_S, STREAMING_REQUEST_S = 6.5e-3, 0.05e-3
"""Time of a request besides its steps, and for each other streaming request, if no run of the model is at hand: the
calibrated models have 5.7 to 6.7 ms and 0.040 to 0.051 ms."""
STEP_S = 0.5e-3
"""Time of a step besides its measured layers."""
PROMPTS = 100
"""Distinct prompts of inference-perf's shared-prefix generator."""
RETOKENISED = 1.048
"""Tokens of a prompt by the client's count for each one that was asked for, where a case does not have the count."""
TIMEOUT_S = 300.0
"""Time after which inference-perf's client gives up."""
STAGE_PAUSE_S = 30.0
AT_CAPACITY = 0.8
"""Share of its slots from which on an engine counts as at capacity."""


@dataclass(frozen=True, slots=True)
class LayersCase:
    """A run of LLMServingSim's examples: what its folder does not say."""

    model: str
    tp: int = 1
    ranks: int = 1
    experts: ExpertShape | None = None


LAYERS_CASES: dict[str, LayersCase] = {
    "rtxpro6000_llama-3.1-8b": LayersCase("llama-3.1-8b"),
    "rtxpro6000_qwen3-32b": LayersCase("qwen3-32b", tp=2),
    "rtx4090_llama-3.1-8b": LayersCase("llama-3.1-8b"),
    "rtxpro6000_qwen3-30b-a3b-instruct-2507": LayersCase("qwen3-30b", ranks=2, experts=ExpertShape(128, 8, 2)),
}
"""By the name of the folder."""
PERF_CASES = (
    "20260217-155451-llama-2-7b-tp1-codegen",
    "20260217-231439-llama-2-7b-tp1-general",
    "20260217-162547-llama-2-7b-tp1-roleplay",
    "20260217-170634-llama-2-7b-tp1-reasoning",
    "20260217-203421-llama-2-70b-hf-tp4-codegen",
    "20260217-202857-llama-2-70b-tp4-general",
    "20260218-084319-llama-2-70b-tp4-roleplay",
    "20260218-065057-llama-2-70b-hf-tp4-reasoning",
    "20260218-150956-codellama-34b-tp2-codegen",
    "20260218-150304-codellama-34b-tp2-general",
    "20260218-155500-codellama-34b-tp2-roleplay",
    "20260218-160939-codellama-34b-tp2-reasoning",
    "20260218-120914-mixtral-8x7b-v0-1-tp2-codegen",
    "20260218-130541-mixtral-8x7b-v0-1-tp2-general",
    "20260218-141024-mixtral-8x7b-v0-1-tp2-roleplay",
    "20260218-135247-mixtral-8x7b-v0-1-tp2-reasoning",
)
"""Runs of inference-perf by their id."""


def kv_blocks(costs: ModelCosts, tp: int, memory_bytes: float, block_tokens: int = 16) -> int:
    """Return the blocks of KV cache in what weights and activations leave of the memory of `tp` GPUs."""
    left_bytes = tp * (memory_bytes * MEMORY_SHARE - OTHER_BYTES) - 2 * costs.parameters
    return int(left_bytes / costs.kv_token_bytes / block_tokens)
