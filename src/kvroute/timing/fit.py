"""Fits timing specs to measurements: least squares of relative errors, and no coefficient below 0."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvroute.timing.formulas import prefill_time
from kvroute.timing.profile import Profile
from kvroute.types import (
    DecodeSpec,
    FloatArray,
    InputError,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
    QuadraticPrefill,
)

PrefillKind: TypeAlias = Literal["linear", "quadratic", "piecewise"]
Spec = TypeVar("Spec", bound=PrefillSpec | DecodeSpec)


@dataclass(frozen=True, slots=True)
class FitError:
    """Error of a spec against its `n` measurements; errors are relative to the measured time."""

    n: int
    mean_abs_relative: float
    max_abs_relative: float
    r2: float
    """1 - residual / total sum of squares of the seconds; 0 if all measurements are equal and the fit is not exact."""


@dataclass(frozen=True, slots=True)
class Fit(Generic[Spec]):
    """A spec, its error, and remarks such as a coefficient fixed at 0."""

    spec: Spec
    error: FitError
    remarks: tuple[str, ...] = ()


def fit_prefill(tokens: npt.ArrayLike, seconds: npt.ArrayLike, kind: PrefillKind = "linear") -> Fit[PrefillSpec]:
    """Fit the seconds of whole prompts (nothing cached) of `tokens` tokens; both arrays have the same length.

    Relative errors are minimised, because one profile covers prompts from hundreds to many thousands of tokens.
    Piecewise takes the median at each length and pools neighbours where the time would fall.

    Raises:
        InputError: arrays of different length, a number that is not above 0, or too few distinct lengths.
    """
    lengths, times_s = _positive("tokens", tokens), _positive("seconds", seconds)
    _check_lengths(lengths, times_s)
    least = 3 if kind == "quadratic" else 2
    distinct = len(np.unique(lengths))
    if distinct < least:
        what = f"{distinct} different token counts do not determine a {kind} curve"
        raise InputError(what, hint=f"measure {least} or more")
    if kind == "piecewise":
        spec, remarks = _fit_piecewise(lengths, times_s)
        return Fit(spec, _error(_prefill_s(spec, lengths), times_s), remarks)
    powers = {"base": np.ones_like(lengths), "per_token": lengths}
    if kind == "quadratic":
        powers["per_token2"] = lengths**2
    values, remarks = _least_squares(powers, times_s)
    fitted: PrefillSpec
    if kind == "linear":
        fitted = LinearPrefill(per_token_s=values["per_token"], base_s=values["base"])
    else:
        fitted = QuadraticPrefill(
            base_s=values["base"], per_token_s=values["per_token"], per_token2_s=values["per_token2"]
        )
    return Fit(fitted, _error(_prefill_s(fitted, lengths), times_s), remarks)


def fit_decode(
    batch: npt.ArrayLike, seconds: npt.ArrayLike, context_tokens: npt.ArrayLike | None = None
) -> Fit[DecodeSpec]:
    """Fit the seconds of iterations of `batch` requests with `context_tokens` in total (the sum over the batch).

    Without contexts, or if they are linearly dependent on the batch, the context's term is 0.

    Raises:
        InputError: arrays of different length, a number that is not above 0, or one batch size only.
    """
    sizes, times_s = _positive("batch", batch), _positive("seconds", seconds)
    _check_lengths(sizes, times_s)
    if len(np.unique(sizes)) < 2:
        raise InputError("one batch size does not determine the time per request", hint="measure 2 or more batch sizes")
    terms = {"base": np.ones_like(sizes), "per_request": sizes}
    remarks: tuple[str, ...] = ()
    if context_tokens is not None:
        contexts = _positive("context_tokens", context_tokens, zero=True)
        _check_lengths(contexts, times_s)
        if _independent([*terms.values(), contexts]):
            terms["per_context_token"] = contexts
        else:
            remarks = ("context and batch are proportional in all measurements: per_context_token stays 0",)
    values, clipped = _least_squares(terms, times_s)
    spec = DecodeSpec(
        base_s=values["base"],
        per_request_s=values["per_request"],
        per_context_token_s=values.get("per_context_token", 0.0),
    )
    modelled_s = sum(values[name] * column for name, column in terms.items())
    return Fit(spec, _error(np.asarray(modelled_s), times_s), remarks + clipped)


def fit_profile(
    profile: Profile, kind: PrefillKind = "linear"
) -> tuple[Fit[PrefillSpec] | None, Fit[DecodeSpec] | None]:
    """Fit the measured parts of a profile; None for a part without measurements. Each fit keeps the profile's remarks.

    Raises:
        InputError: see `fit_prefill` and `fit_decode`, preceded by the profile's file.
    """
    prefill, decode = None, None
    try:
        if profile.tokens.size:
            prefill = fit_prefill(profile.tokens, profile.prefill_s, kind)
        if profile.batch.size:
            decode = fit_decode(profile.batch, profile.iteration_s, profile.context_tokens)
    except InputError as error:
        raise InputError(error.what, where=profile.where, hint=error.hint) from error
    if prefill is not None:
        prefill = Fit(prefill.spec, prefill.error, profile.prefill_remarks + prefill.remarks)
    if decode is not None:
        decode = Fit(decode.spec, decode.error, profile.decode_remarks + decode.remarks)
    return prefill, decode


def _least_squares(columns: dict[str, FloatArray], seconds: FloatArray) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return non-negative coefficients with the least sum of squared relative errors.

    With at most three columns every subset of them is tried: the optimum is an unconstrained one on its own support.
    """
    names = list(columns)
    best: tuple[float, dict[str, float]] | None = None
    for size in range(len(names), 0, -1):
        for chosen in combinations(names, size):
            scales = {name: float(np.abs(columns[name]).max()) or 1.0 for name in chosen}
            matrix = np.column_stack([columns[name] / scales[name] / seconds for name in chosen])
            solution = np.linalg.lstsq(matrix, np.ones_like(seconds), rcond=None)[0]
            if (solution < 0).any():
                continue
            residual = float(np.sum((matrix @ solution - 1) ** 2))
            if best is None or residual < best[0]:
                values = {name: float(solution[index]) / scales[name] for index, name in enumerate(chosen)}
                best = residual, values
    assert best is not None, "a single positive column always fits"
    held = [name for name in names if name not in best[1]]
    remarks = tuple(f"{name} would be negative and is set to 0" for name in held)
    return {name: best[1].get(name, 0.0) for name in names}, remarks


def _independent(columns: list[FloatArray]) -> bool:
    matrix = np.column_stack([column / (float(np.abs(column).max()) or 1.0) for column in columns])
    return int(np.linalg.matrix_rank(matrix)) == len(columns)


def _fit_piecewise(lengths: FloatArray, seconds: FloatArray) -> tuple[PiecewisePrefill, tuple[str, ...]]:
    tokens = np.unique(np.round(lengths))
    if len(tokens) < 2:
        raise InputError("one token count does not determine a piecewise curve", hint="measure 2 or more")
    medians = [float(np.median(seconds[np.round(lengths) == count])) for count in tokens]
    smooth = _never_falling(medians)
    remarks = () if smooth == medians else ("times that decrease with the length were averaged with their neighbours",)
    return PiecewisePrefill(tokens=tuple(int(count) for count in tokens), seconds=tuple(smooth)), remarks


def _never_falling(values: list[float]) -> list[float]:
    """Return the nearest sequence that never falls: pool adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (right, after), (left, before) = pools.pop(), pools.pop()
            pools.append(((left * before + right * after) / (before + after), before + after))
    return [mean for mean, count in pools for _ in range(count)]


def _prefill_s(spec: PrefillSpec, tokens: FloatArray) -> FloatArray:
    time = prefill_time(spec)
    return np.array([time.seconds(round(count)) for count in tokens])


def _error(modelled_s: FloatArray, measured_s: FloatArray) -> FitError:
    relative = np.abs(modelled_s - measured_s) / measured_s
    residual = float(np.sum((modelled_s - measured_s) ** 2))
    total = float(np.sum((measured_s - measured_s.mean()) ** 2))
    exact = residual <= 1e-18 * float(np.sum(measured_s**2))
    r2 = 1.0 if exact else 1 - residual / total if total > 0 else 0.0
    return FitError(len(measured_s), float(relative.mean()), float(relative.max()), r2)


def _positive(name: str, values: npt.ArrayLike, *, zero: bool = False) -> FloatArray:
    try:
        array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} contains a value that is not a number", hint="give numbers") from error
    wrong = ~np.isfinite(array) | (array < 0 if zero else array <= 0)
    if array.ndim != 1 or wrong.any():
        shown = repr(float(array[wrong][0])) if wrong.any() else f"of shape {array.shape}"
        raise InputError(f"{name} is {shown}", hint="give finite numbers " + ("of 0 or more" if zero else "above 0"))
    return array


def _check_lengths(one: FloatArray, other: FloatArray) -> None:
    if len(one) != len(other):
        raise InputError(f"{len(one)} and {len(other)} values are given", hint="give both for every measurement")
