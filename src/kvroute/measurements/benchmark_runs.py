"""Fits a timing to benchmark runs of an engine that prefills and decodes: TTFT and TPOT at several loads.

What a client measures includes other requests. The fit takes them out:

    TPOT = step(batch, context) + prompts of others per step * tokens(prompt)
    TTFT = base + tokens(prompt) * (1 + wait for others' prompts) + wait for the running step

`tokens` is the time of a prompt's tokens, without the prefill's base; both lines use it, so they are solved in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvroute import plausibility
from kvroute.timing import Fit, FitError, IterationTime, fit_decode, fit_prefill, prefill_time
from kvroute.timing.fit import PrefillKind, Spec
from kvroute.types import (
    BoolArray,
    DecodeSpec,
    FloatArray,
    InputError,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
)

SAME_SIZE = 1.1
"""Prompts and batches within this factor count as equally large."""
LOW_LOAD = 2.0
"""TTFT counts from runs whose batch is at most this many times that of the smallest run with such prompts."""
_ROUNDS, _UTILIZATION_MAX = 50, 0.9
_SHARES, _SAME_ERROR = 51, 0.002


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """One run: typical times of its requests, on one instance or one data-parallel rank."""

    where: str
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    """Mean time of an output token after the first, in seconds."""
    requests_per_s: float
    clients: float | None = None
    """Requests that are always in progress (closed loop); None: requests arrive at a rate of their own."""
    latency_s: float | None = None
    """Measured time of a whole request, to check the others; None: unknown."""

    @property
    def decode_s(self) -> float:
        """Seconds between the first and the last token of a request."""
        return self.tpot_s * (self.output_tokens - 1)

    @property
    def others_per_s(self) -> float:
        """Requests of others that arrive per second, as a request sees them."""
        return self.requests_per_s * (1 if self.clients is None else 1 - 1 / max(self.clients, 1.0))

    @property
    def batch(self) -> float:
        """Requests that decode together, as a request sees them (Little's law, and itself)."""
        return 1 + self.others_per_s * self.decode_s

    @property
    def context_tokens(self) -> float:
        """Tokens of context of the batch, half of each output among them."""
        return self.batch * (self.input_tokens + self.output_tokens / 2)

    def problem(self) -> str:
        """Return which values cannot be right, with the likely cause; empty if there are none."""
        latency_s = self.ttft_s + self.decode_s
        doubt = (
            plausibility.of_latencies(self.ttft_s, self.tpot_s)
            or plausibility.of_sum(latency_s, self.latency_s)
            or plausibility.of_concurrency(self.requests_per_s, latency_s, self.clients)
        )
        return f"{doubt.what}; {doubt.cause}" if doubt else ""


@dataclass(frozen=True, slots=True)
class BenchmarkFit:
    """A timing, the errors of the TTFT and TPOT that it predicts for the runs, and the range of these."""

    prefill: Fit[PrefillSpec]
    decode: Fit[DecodeSpec]
    limits: dict[str, list[int]]
    """Least and most `prompt_tokens`, `batch` and `context_tokens_mean`."""


def fit_runs(runs: Sequence[BenchmarkRun], kind: PrefillKind = "linear") -> BenchmarkFit:
    """Fit a timing to runs of one engine at several loads.

    TTFT counts only where load is low, because at high load it is mostly waiting.

    Raises:
        InputError: fewer than two batch sizes, or too few lengths for the kind of prefill.
    """
    assert runs
    measured = _RunArrays.of(runs)
    if measured.batch.max() / measured.batch.min() < SAME_SIZE:
        what = f"one batch size, of about {measured.batch.mean():.3g}, does not determine the time per request"
        raise InputError(what, hint="give runs at two or more loads")
    low = measured.low_load()
    alike = measured.prompts.max() / measured.prompts.min() < SAME_SIZE
    if alike and kind != "linear":
        hint = "give runs with prompts of other lengths, or --kind linear"
        raise InputError(f"prompts of one length do not determine a {kind} curve", hint=hint)
    prefill = _prefill_by_steps(measured, low) if alike else _prefill_by_lengths(measured, low, kind)
    tokens_s = _tokens_s(prefill.spec, measured.prompts)
    decode, tpot_s = _decode(measured, tokens_s)
    ttft_s = prefill_time(prefill.spec).seconds(0) + tokens_s + measured.wait_s(tokens_s)
    waiting = len(runs) - int(low.sum())
    unused = (f"TTFT of {waiting} of {len(runs)} runs, at higher load, is not used",) if waiting else ()
    means = measured.contexts / measured.batch
    names = ("prompt_tokens", "batch", "context_tokens_mean")
    values = (measured.prompts[low], measured.batch, means)
    return BenchmarkFit(
        prefill=_judged(prefill, ttft_s[low], measured.ttft_s[low], unused),
        decode=_judged(decode, tpot_s, measured.tpot_s),
        limits={name: [round(of.min()), round(of.max())] for name, of in zip(names, values, strict=True)},
    )


@dataclass(frozen=True, slots=True)
class _RunArrays:
    """The runs as arrays [n]."""

    prompts: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    batch: FloatArray
    contexts: FloatArray
    others_per_s: FloatArray

    @classmethod
    def of(cls, runs: Sequence[BenchmarkRun]) -> _RunArrays:
        names = ("input_tokens", "ttft_s", "tpot_s", "batch", "context_tokens", "others_per_s")
        return cls(*(np.array([getattr(run, name) for run in runs], np.float64) for name in names))

    def wait_s(self, tokens_s: FloatArray) -> FloatArray:
        """Return what a prompt waits: half of the step that runs when it arrives, if others decode, and for prompts of
        others (queue with random arrivals and constant times)."""
        utilization = np.minimum(self.others_per_s * tokens_s, _UTILIZATION_MAX)
        running_s = 0.5 * self.tpot_s * (1 - 1 / self.batch)
        return np.asarray(running_s + tokens_s * utilization / (2 * (1 - utilization)))

    def alone_s(self, tokens_s: FloatArray) -> FloatArray:
        """Return TTFT without waiting, but at least a fifth of it."""
        return np.maximum(self.ttft_s - self.wait_s(tokens_s), 0.2 * self.ttft_s)

    def low_load(self) -> BoolArray:
        """Return which runs have nearly the smallest batch of all with prompts of their length."""
        ratio = self.prompts[:, None] / self.prompts[None, :]
        alike = (ratio <= SAME_SIZE) & (ratio >= 1 / SAME_SIZE)
        least = np.where(alike, self.batch[None, :], np.inf).min(axis=1)
        return np.asarray(self.batch <= LOW_LOAD * least)


def _prefill_by_lengths(measured: _RunArrays, low: BoolArray, kind: PrefillKind) -> Fit[PrefillSpec]:
    """Fit prompts of several lengths. What they wait depends on the time that they take, so both are found in turn."""
    tokens_s = np.zeros_like(measured.prompts)
    for _ in range(_ROUNDS):
        found = fit_prefill(measured.prompts[low], measured.alone_s(tokens_s)[low], kind)
        found_s = _tokens_s(found.spec, measured.prompts)
        if np.allclose(found_s, tokens_s, rtol=1e-6, atol=1e-9):
            break
        tokens_s = (tokens_s + found_s) / 2  # the mean of two rounds converges
    return found


def _prefill_by_steps(measured: _RunArrays, low: BoolArray) -> Fit[PrefillSpec]:
    """Fit prompts of one length, whose TTFT does not tell base and time of the tokens apart.

    Only the tokens make the steps of others longer: of all shares of TTFT that fit TPOT, the largest is theirs.
    """
    found: list[tuple[float, LinearPrefill]] = []
    prompt = float(np.median(measured.prompts))
    for share in np.linspace(0, 1, _SHARES).tolist():
        alone_s, tokens_s = 0.0, np.zeros_like(measured.prompts)
        for _ in range(_ROUNDS):  # as for several lengths
            alone_s = float(np.median(measured.alone_s(tokens_s)[low]))
            tokens_s = (tokens_s + share * alone_s * measured.prompts / prompt) / 2
        spec = LinearPrefill(per_token_s=share * alone_s / prompt, base_s=(1 - share) * alone_s)
        _, tpot_s = _decode(measured, _tokens_s(spec, measured.prompts))
        found.append((_error(tpot_s, measured.tpot_s).mean_abs_relative, spec))
    least = min(error for error, _ in found)
    spec = [spec for error, spec in found if error <= least + _SAME_ERROR][-1]
    remark = f"all prompts have about {prompt:,.0f} tokens: base and per_token follow from TPOT"
    return Fit(spec, FitError(0, 0.0, 0.0, 0.0), (remark,))


def _decode(measured: _RunArrays, tokens_s: FloatArray) -> tuple[Fit[DecodeSpec], FloatArray]:
    """Fit steps without the prompts of others; return the fit and the TPOT that it gives."""
    shared_s = measured.others_per_s * measured.tpot_s * tokens_s
    own_s = np.maximum(measured.tpot_s - shared_s, 0.1 * measured.tpot_s)
    found = fit_decode(measured.batch, own_s, measured.contexts)
    time = IterationTime.of(found.spec)
    sizes = zip(measured.batch.tolist(), measured.contexts.tolist(), strict=True)
    return found, np.array([time.seconds(batch, context) for batch, context in sizes]) + shared_s


def _judged(
    found: Fit[Spec], modelled_s: FloatArray, measured_s: FloatArray, remarks: tuple[str, ...] = ()
) -> Fit[Spec]:
    """Return the fit with its error in what clients measure."""
    terms = sum(value != 0 for value in msgspec.structs.astuple(found.spec))
    if not isinstance(found.spec, PiecewisePrefill) and len(measured_s) <= terms:
        remarks += ("as many runs as terms: the error says nothing",)
    return Fit(found.spec, _error(modelled_s, measured_s), found.remarks + remarks)


def _tokens_s(spec: PrefillSpec, prompts: FloatArray) -> FloatArray:
    """Return the time of the prompts' tokens, without the base."""
    time = prefill_time(spec)
    return np.array([time.seconds(round(tokens)) - time.seconds(0) for tokens in prompts.tolist()])


def _error(modelled_s: FloatArray, measured_s: FloatArray) -> FitError:
    relative = np.abs(modelled_s - measured_s) / measured_s
    residual, total = np.sum((modelled_s - measured_s) ** 2), np.sum((measured_s - measured_s.mean()) ** 2)
    r2 = 1 - float(residual / total) if total > 0 else float(residual == 0)
    return FitError(len(measured_s), float(relative.mean()), float(relative.max()), r2)
