"""Text of fitted timings: YAML for a cluster file, and sentences on the fit."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import typer

from kvroute.cli.output import print_json, tell
from kvroute.types import (
    DecodeSpec,
    InputError,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
    QuadraticPrefill,
    SchedulerSpec,
)

if TYPE_CHECKING:
    from kvroute.timing import Fit, Profile

PLAIN = SchedulerSpec()
"""The scheduler of a timing that has none."""
Limits: TypeAlias = dict[str, list[int]]
"""Least and most of what a fit has seen: `prompt_tokens`, `batch`, `context_tokens_mean`; what is not there was not
measured."""
_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)


def check_name(name: str) -> None:
    """Raise an InputError if this is not a name for a timing."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is not a valid name", where="--name", hint="use letters, digits, '.', '_' and '-'")


def plain(found: Fit[Any] | None) -> dict[str, Any] | None:
    """Return the spec, its error and the remarks as plain data."""
    if found is None:
        return None
    return {"spec": msgspec.to_builtins(found.spec), "error": asdict(found.error), "remarks": list(found.remarks)}


def sentence(found: Fit[Any] | None) -> str:
    """Return how well a spec fits."""
    if found is None:
        return "not measured; add a file that has it"
    error = found.error
    text = f"{error.n} measurements, mean error {error.mean_abs_relative:.1%}, largest {error.max_abs_relative:.1%}, "
    return "; ".join((text + f"R^2 {error.r2:.4f}", *found.remarks))


def limits_of(profile: Profile) -> Limits:
    """Return least and most of the quantities that a profile has."""
    found = {}
    if profile.tokens.size:
        found["prompt_tokens"] = profile.tokens
    if profile.batch.size:
        found["batch"] = profile.batch
        if profile.context_tokens is not None:
            found["context_tokens_mean"] = profile.context_tokens / profile.batch
    return {of: [int(values.min()), int(values.max())] for of, values in found.items()}


def range_text(limits: Limits) -> str:
    """Return the range of a fit in words."""
    parts = []
    if "prompt_tokens" in limits:
        parts.append(f"prompts of {_from_to(limits['prompt_tokens'])} tokens")
    if "batch" in limits:
        parts.append(f"batches of {_from_to(limits['batch'])} requests")
    if "context_tokens_mean" in limits:
        parts[-1] += f" with a mean of {_from_to(limits['context_tokens_mean'])} tokens"
    return ", ".join(parts)


def range_sentence(limits: Limits) -> str:
    """Return the remark on the range of a fit."""
    return f"range: {range_text(limits)}; beyond it the timing is an extrapolation"


def _from_to(limits: list[int]) -> str:
    least, most = limits
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def timing_yaml(
    name: str,
    prefill: Fit[PrefillSpec] | None,
    decode: Fit[DecodeSpec] | None,
    scheduler: SchedulerSpec = PLAIN,
    *,
    limits: Limits | None = None,
) -> str:
    """Return the block `timing` of a cluster file, with the range of the fit as a comment."""
    lines = ["timing:", f"  {name}:"]
    if limits:
        lines.append(f"    # fitted on {range_text(limits)}")
    lines.append(f"    prefill: {_prefill(prefill.spec)}" if prefill else "    # prefill: not measured")
    lines.append(f"    decode: {_decode(decode.spec)}" if decode else "    # decode: not measured")
    if scheduler != PLAIN:
        lines.append(f"    scheduler: {_scheduler(scheduler)}")
    return "\n".join(lines)


def _scheduler(spec: SchedulerSpec) -> str:
    terms = []
    if spec.step_tokens is not None:
        terms = [f"step_tokens: {spec.step_tokens}", f"step: {_text(spec.step_s)}"]
    terms += [f"decode_request: {_text(spec.decode_request_s)}", f"transfers: {spec.transfers}"]
    return f"{{{', '.join(terms)}}}"


def _prefill(spec: PrefillSpec) -> str:
    match spec:
        case LinearPrefill(per_token_s=per_token_s, base_s=base_s):
            return f"{{kind: linear, per_token: {_text(per_token_s)}, base: {_text(base_s)}}}"
        case QuadraticPrefill(base_s=base_s, per_token_s=per_token_s, per_token2_s=square_s):
            terms = f"base: {_text(base_s)}, per_token: {_text(per_token_s)}, per_token2: {_text(square_s)}"
            return f"{{kind: quadratic, {terms}}}"
        case PiecewisePrefill(tokens=tokens, seconds=seconds):
            times = ", ".join(_text(second) for second in seconds)
            return f"{{kind: piecewise, tokens: [{', '.join(map(str, tokens))}], times: [{times}]}}"


def _decode(spec: DecodeSpec) -> str:
    terms = (spec.base_s, spec.per_request_s, spec.per_context_token_s)
    base, per_request, per_context_token = map(_text, terms)
    return f"{{base: {base}, per_request: {per_request}, per_context_token: {per_context_token}}}"


def _text(seconds: float) -> str:
    """Format seconds with six digits, more than any profile has; values below a femtosecond become zero."""
    from kvroute_engine.files.units import duration_text

    return f'"{duration_text(float(f"{seconds:.6g}"))}"' if seconds >= 1e-15 else '"0 s"'


def print_fits(
    name: str, fits: tuple[Fit[PrefillSpec] | None, Fit[DecodeSpec] | None], limits: Limits, *, as_json: bool
) -> None:
    """Print the block `timing` of a cluster file, with errors and range of its fits on stderr; or all as JSON."""
    prefill, decode = fits
    if as_json:
        print_json({"name": name, "prefill": plain(prefill), "decode": plain(decode), "range": limits})
        return
    typer.echo(timing_yaml(name, prefill, decode, limits=limits))
    tell([f"prefill: {sentence(prefill)}", f"decode: {sentence(decode)}", range_sentence(limits)])
