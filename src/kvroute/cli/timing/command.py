"""`kvroute timing`: converts measured profiles to the `timing:` block of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvroute.cli.output import print_json, remarks, tell
from kvroute.cli.timing.layers import app as published
from kvroute.cli.timing.measure import measure
from kvroute.types import DecodeSpec, InputError, PrefillSpec

if TYPE_CHECKING:
    from kvroute.timing import Fit
    from kvroute.timing.fit import PrefillKind

app = typer.Typer(help="Measure prefill and decode times, or fit them to measured profiles.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Measure prefill and decode times, or compute them from measured profiles."""


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
    from kvroute.cli.timing.text import check_name, plain, sentence, timing_yaml

    check_name(name)
    prefill, decode = _fit_all(files, model, hardware, tp, kind)
    if as_json:
        print_json({"name": name, "prefill": plain(prefill), "decode": plain(decode)})
        return
    typer.echo(timing_yaml(name, prefill, decode))
    for part, found in (("prefill", prefill), ("decode", decode)):
        remarks().print(f"{part}: {sentence(found)}", highlight=False, markup=False)


def _fit_all(
    files: list[Path], model: str | None, hardware: str | None, tp: int | None, kind: PrefillKind
) -> tuple[Fit[PrefillSpec] | None, Fit[DecodeSpec] | None]:
    from kvroute.timing import fit_profile, read_profile

    prefill: Fit[PrefillSpec] | None = None
    decode: Fit[DecodeSpec] | None = None
    for file in files:
        profile = read_profile(file, model=model, hardware=hardware, tp=tp)
        tell(profile.remarks)
        fits = fit_profile(profile, kind)
        for part, before, now in (("prefill", prefill, fits[0]), ("decode", decode, fits[1])):
            if before is not None and now is not None:
                raise InputError(f"measures {part} a second time", where=str(file), hint="give one file for each part")
        prefill, decode = prefill or fits[0], decode or fits[1]
    return prefill, decode


app.command()(measure)
app.add_typer(published, name="from")
