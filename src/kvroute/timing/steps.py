"""Time of a step that computes prompts and decodes other requests, as engines with chunked prefill do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvroute.timing.formulas import IterationTime, prefill_time, step_base_s, tokens_of_step_s
from kvroute.types import TimingSpec


class StepWork(NamedTuple):
    """What one rank computes in a step."""

    prompts: tuple[tuple[int, int], ...] = ()
    """For each prompt the tokens that are already computed, and those that the step computes."""
    decoding: int = 0
    """Requests that decode."""
    context_tokens: int = 0
    """Tokens to which these attend, all together."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that the step computes."""
        return sum(tokens for _, tokens in self.prompts)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.decoding + self.prompt_tokens


StepTime: TypeAlias = Callable[[StepWork], float]
"""Seconds of a step of one rank."""
RanksTime: TypeAlias = Callable[[Sequence[StepWork]], float]
"""Seconds of a step that several ranks take together; a rank without requests has an empty work."""


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """`base + prompt_token * prompt tokens + request * requests that decode + context_token * their context`."""

    base_s: float
    prompt_token_s: float
    request_s: float
    context_token_s: float

    def __call__(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        prompts_s = self.prompt_token_s * work.prompt_tokens
        return self.base_s + prompts_s + self.request_s * work.decoding + self.context_token_s * work.context_tokens


def timing_steps(timing: TimingSpec) -> StepTime:
    """Return the steps of an instance: prompts add the time of their tokens to a step of the batch; without a batch
    they take the step's base once."""
    prefill, decode, base_s = prefill_time(timing.prefill), IterationTime.of(timing.decode), step_base_s(timing)

    def seconds(work: StepWork) -> float:
        batch_s = decode.seconds(work.decoding, work.context_tokens) if work.decoding else base_s
        return batch_s + (tokens_of_step_s(prefill, work.prompts) if work.prompts else 0.0)

    return seconds


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What a GPU does per second, and the shares of it that kernels reach."""

    flop_per_s: float
    bytes_per_s: float
    compute_share: float = 0.65
    memory_share: float = 0.80
    attention_share: float = 0.6
    """Share of `compute_share` that the attention of prompts reaches."""
    all_reduce_s: float = 10e-6
    """Latency of an all-reduce."""
    wire_bytes_per_s: float = 150e9
    """Bytes per second and GPU between the GPUs of a tensor-parallel group."""
    step_s: float = 0.5e-3
    """Time of a step that does not depend on its work."""


H100_SXM = GpuRates(flop_per_s=989e12, bytes_per_s=3.35e12)
"""Data sheet of the H100 SXM, dense 16-bit operations."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Sizes of a model with 16-bit weights and KV cache, for times by operations and bytes."""

    layers: int
    hidden: int
    kv_heads: int
    parameters: float
    active_parameters: float
    """Those that one token uses; fewer in a mixture of experts."""
    experts: int = 0
    """Experts of a layer; 0: dense."""
    experts_per_token: int = 0
    head_dim: int = 128

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV cache per token, all ranks together."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step of `tokens` tokens reads: those of an expert that no token uses are
        not read, if each token's experts are drawn at random."""
        if not self.experts:
            return 2 * self.parameters
        unused = 1 - self.experts_per_token / self.experts
        return 2 * (self.parameters - (self.parameters - self.active_parameters) / unused * unused**tokens)


@dataclass(frozen=True, slots=True)
class RooflineSteps:
    """A step takes as long as its operations, or as the bytes that it reads, whichever is longer; to this come the
    attention of prompts, all-reduces and a constant."""

    model: ModelCosts
    gpu: GpuRates
    tp: int = 1

    def __call__(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        model, gpu, tokens = self.model, self.gpu, work.tokens
        flop_per_s = gpu.flop_per_s * gpu.compute_share * self.tp
        bytes_per_s = gpu.bytes_per_s * gpu.memory_share * self.tp
        context_s = model.kv_token_bytes * work.context_tokens / bytes_per_s
        matrices_s = 2 * model.active_parameters * tokens / flop_per_s
        seconds = max(model.read_bytes(tokens) / bytes_per_s, matrices_s) + context_s + gpu.step_s
        for computed, new in work.prompts:
            attended = new * (computed + new / 2)
            seconds += 4 * model.layers * model.hidden * attended / (flop_per_s * gpu.attention_share)
        if self.tp > 1:
            sent = 4 * tokens * model.hidden * (self.tp - 1) / self.tp
            seconds += 2 * model.layers * (gpu.all_reduce_s + sent / gpu.wire_bytes_per_s)
        return seconds

    def linear(self) -> LinearSteps:
        """Return the terms of prompt tokens and of context alone, as a step that computes many tokens has them."""
        bytes_per_s = self.gpu.bytes_per_s * self.gpu.memory_share * self.tp
        flop_per_s = self.gpu.flop_per_s * self.gpu.compute_share * self.tp
        prompt_token_s = 2 * self.model.active_parameters / flop_per_s
        return LinearSteps(0.0, prompt_token_s, 0.0, self.model.kv_token_bytes / bytes_per_s)


@dataclass(frozen=True, slots=True)
class ScaledSteps:
    """Steps that take `factor` times as long as others."""

    steps: StepTime
    factor: float

    def __call__(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return self.factor * self.steps(work)
