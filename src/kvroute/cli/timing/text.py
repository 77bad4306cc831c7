"""Text of fitted timings: YAML for a cluster file, and sentences on the fit."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

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
    from kvroute.timing import Fit

PLAIN = SchedulerSpec()
"""The scheduler of a timing that has none."""
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


def timing_yaml(
    name: str,
    prefill: Fit[PrefillSpec] | None,
    decode: Fit[DecodeSpec] | None,
    scheduler: SchedulerSpec = PLAIN,
) -> str:
    """Return the block `timing` of a cluster file."""
    lines = ["timing:", f"  {name}:"]
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
