"""Times and memory of an instance: a roofline of its GPUs plus all-reduces and sends on an idle network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvroute.llm import Model
from kvroute.planner.placement.all_reduce_times import NO_TIME, Affine
from kvroute.planner.placement.problem import GpuKind, PlacementProblem
from kvroute.types import DecodeSpec, FloatArray, QuadraticPrefill, TimingSpec


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Tensor-parallel ranks and pipeline stages of an instance."""

    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Communication:
    """Communication of an instance on an idle network."""

    all_reduce: Affine = NO_TIME
    """One all-reduce of the slowest stage."""
    send: Affine = NO_TIME
    """Activations from one stage to the next, at the slowest boundary."""

    def slowed(self, factor: float) -> Communication:
        """Return the same with all transmission times multiplied by `factor`; latencies stay."""
        return replace(self, all_reduce=_slowed(self.all_reduce, factor), send=_slowed(self.send, factor))


def _slowed(line: Affine, factor: float) -> Affine:
    return Affine(line.latency_s, line.s_per_byte * factor)


@dataclass(frozen=True, slots=True)
class Times:
    """Times of an instance; also those of a `TimingSpec`."""

    prefill: QuadraticPrefill
    decode: DecodeSpec

    def prefill_s(self, tokens: FloatArray) -> FloatArray:
        """Return the time of each prompt, shape of `tokens`."""
        form = self.prefill
        return form.base_s + (form.per_token_s + form.per_token2_s * tokens) * tokens

    def prefill_at(self, tokens: float) -> float:
        """Return the time of one prompt."""
        return self.prefill.base_s + (self.prefill.per_token_s + self.prefill.per_token2_s * tokens) * tokens

    def decode_s(self, batch: float, context_tokens: float) -> float:
        """Return the time of a decode iteration of requests with this mean context."""
        form = self.decode
        return form.base_s + batch * (form.per_request_s + form.per_context_token_s * context_tokens)

    def spec(self) -> TimingSpec:
        """Return the same as a `TimingSpec`."""
        return TimingSpec(prefill=self.prefill, decode=self.decode)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on one kind of GPU, split over `tp` ranks and `pp` stages."""

    kind: GpuKind
    split: Parallelism
    model: Model
    hidden_bytes: float
    """Activations of one token: what an all-reduce sums."""
    weights_bytes: float
    mean_tokens: float
    """Mean prompt length, at which the quadratic form is exact."""

    @classmethod
    def of(cls, problem: PlacementProblem, kind: GpuKind, split: Parallelism) -> Roofline:
        """Return the roofline of the problem's model."""
        hidden_bytes = problem.shape.hidden * problem.element_bytes
        mean = problem.lengths.mix.mean_tokens
        return cls(kind, split, problem.model, hidden_bytes, problem.weights_bytes, mean)

    @property
    def stage_share(self) -> float:
        """Share of the layers in the largest stage."""
        return -(-self.model.layer_count // self.split.pp) / self.model.layer_count

    @property
    def all_reduces(self) -> int:
        """All-reduces of one iteration: after attention and after the feed-forward network of every layer (Megatron-LM
        3)."""
        return 2 * self.model.layer_count if self.split.tp > 1 else 0

    def times(self, communication: Communication) -> Times:
        """Return the times of an instance, all-reduces and sends included.

        The time of a prompt is quadratic in its length, and the time of a decode iteration linear in its batch. A
        pipeline of p stages has p batches in flight, so a request of a batch of Q sees iterations of Q / p requests.
        A decode iteration reads all weights.
        """
        token_s, token2_s = self._token_s()
        latency_s, slope_s = self.communication_s(communication)
        overhead_s, stages = self.kind.overhead_s, self.split.pp
        weights_s = self.weights_bytes / (self.split.tp * self.kind.memory_bytes_per_s)
        kv_s = self.model.kv_bytes_per_token_shard(self.split.tp) / self.kind.memory_bytes_per_s
        return Times(
            prefill=QuadraticPrefill(
                base_s=overhead_s + latency_s,
                per_token_s=token_s + slope_s,
                per_token2_s=token2_s,
            ),
            decode=DecodeSpec(
                base_s=overhead_s + weights_s + latency_s,
                per_request_s=(token_s + slope_s) / stages,
                per_context_token_s=kv_s / stages,
            ),
        )

    def communication_s(self, communication: Communication) -> tuple[float, float]:
        """Return the latency of one iteration and its seconds per token: all-reduces and sends."""
        count, sends = self.all_reduces, self.split.pp - 1
        latency_s = count * communication.all_reduce.latency_s + sends * communication.send.latency_s
        slope_s = count * communication.all_reduce.s_per_byte + sends * communication.send.s_per_byte
        return latency_s, slope_s * self.hidden_bytes

    def _token_s(self) -> tuple[float, float]:
        """Return the seconds per token and per token squared that the operations of tokens 1 to l take, with the
        operations of one token linear in its context between 1 and the mean length."""
        far = max(self.mean_tokens, 2.0)
        near_flop, far_flop = self.model.token_flop(1.0), self.model.token_flop(far)
        slope = (far_flop - near_flop) / (far - 1.0)
        flop_per_s = self.split.tp * self.kind.flop_per_s
        return (near_flop - slope / 2) / flop_per_s, slope / 2 / flop_per_s

    def kv_tokens(self) -> float:
        """Return the tokens whose KV fits beside the weights of the largest stage; negative if the weights do not
        fit."""
        free = self.kind.memory_bytes - self.weights_bytes * self.stage_share / self.split.tp
        return free / (self.model.kv_bytes_per_token_shard(self.split.tp) * self.stage_share)

    def stage_s(self, seconds: float) -> float:
        """Return the time of the largest stage, if the whole pass takes `seconds`."""
        return seconds * self.stage_share
