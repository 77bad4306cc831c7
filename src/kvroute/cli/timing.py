"""`kvroute timing`: converts measured profiles to the `timing:` block of a cluster file."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from kvroute.cli.output import print_json, remarks, tell
from kvroute.timing import Fit, fit_profile, read_profile
from kvroute.timing.fit import PrefillKind
from kvroute.topology.units import duration_text
from kvroute.types import DecodeSpec, InputError, LinearPrefill, PiecewisePrefill, PrefillSpec, QuadraticPrefill

_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)

app = typer.Typer(help="Fit prefill and decode times to measured profiles.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Compute prefill and decode times from measured profiles."""


@app.command()
def fit(
    files: Annotated[
        list[Path], typer.Argument(help="Profiles (CSV or JSON); prompts and iterations may be in separate files.")
    ],
    model: Annotated[str | None, typer.Option("--model", help="Model to use if a file has several.")] = None,
    hardware: Annotated[str | None, typer.Option("--hardware", help="Hardware to use if a file has several.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel degree to use if a file has several.")] = None,
    kind: Annotated[
        Literal["linear", "quadratic", "piecewise"], typer.Option("--kind", help="Form of the prefill model.")
    ] = "linear",
    name: Annotated[str, typer.Option("--name", help="Name of the timing in the cluster file.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Fit a timing to measurements and print it as YAML for a cluster file; the fit errors are printed on stderr.

    A file has the columns tokens,seconds (whole prompts), or batch,context_tokens,seconds (decode iterations; the
    context is the sum over the batch), or it is splitwise-sim's CSV or DistServe's JSON.

    Example: [bold]kvroute timing fit perf_model.csv --model llama2-70b --hardware h100-80gb --tp 4[/bold]
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is not a valid name", where="--name", hint="use letters, digits, '.', '_' and '-'")
    prefill, decode = _fit_all(files, model, hardware, tp, kind)
    if as_json:
        print_json({"name": name, "prefill": _plain(prefill), "decode": _plain(decode)})
        return
    typer.echo(_yaml(name, prefill, decode))
    for part, found in (("prefill", prefill), ("decode", decode)):
        remarks().print(f"{part}: {_sentence(found)}", highlight=False, markup=False)


def _fit_all(
    files: list[Path], model: str | None, hardware: str | None, tp: int | None, kind: PrefillKind
) -> tuple[Fit[PrefillSpec] | None, Fit[DecodeSpec] | None]:
    prefill: Fit[PrefillSpec] | None = None
    decode: Fit[DecodeSpec] | None = None
    for file in files:
        profile = read_profile(file, model=model, hardware=hardware, tp=tp)
        tell(profile.doubts)
        fits = fit_profile(profile, kind)
        for part, before, now in (("prefill", prefill, fits[0]), ("decode", decode, fits[1])):
            if before is not None and now is not None:
                raise InputError(f"measures {part} a second time", where=str(file), hint="give one file for each part")
        prefill, decode = prefill or fits[0], decode or fits[1]
    return prefill, decode


def _plain(found: Fit[Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"spec": msgspec.to_builtins(found.spec), "error": asdict(found.error), "remarks": list(found.remarks)}


def _sentence(found: Fit[Any] | None) -> str:
    if found is None:
        return "not measured; add a file that has it"
    error = found.error
    text = f"{error.n} measurements, mean error {error.mean_abs_relative:.1%}, largest {error.max_abs_relative:.1%}, "
    return "; ".join((text + f"R^2 {error.r2:.4f}", *found.remarks))


def _yaml(name: str, prefill: Fit[PrefillSpec] | None, decode: Fit[DecodeSpec] | None) -> str:
    lines = ["timing:", f"  {name}:"]
    lines.append(f"    prefill: {_prefill(prefill.spec)}" if prefill else "    # prefill: not measured")
    lines.append(f"    decode: {_decode(decode.spec)}" if decode else "    # decode: not measured")
    return "\n".join(lines)


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
    return f'"{duration_text(float(f"{seconds:.6g}"))}"' if seconds >= 1e-15 else '"0 s"'
