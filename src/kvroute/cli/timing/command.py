"""`kvroute timing`: converts measured profiles to the `timing:` block of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvroute.cli.output import print_json, tell
from kvroute.cli.timing.aiconfigurator import aiconfigurator
from kvroute.cli.timing.layers import app as published
from kvroute.cli.timing.measure import measure

app = typer.Typer(help="Measure prefill and decode times, or fit them to measured profiles.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Measure prefill and decode times, or compute them from measured profiles."""


@app.command()
def fit(
    files: Annotated[
        list[Path],
        typer.Argument(help="Profiles (CSV or JSON), or reports of benchmarks; each part may have its own files."),
    ],
    model: Annotated[str | None, typer.Option("--model", help="Model to use if a file has several.")] = None,
    hardware: Annotated[str | None, typer.Option("--hardware", help="Hardware to use if a file has several.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel degree to use if a file has several.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="COLUMN=VALUE", help="Rows of InferenceX to use; may be repeated."),
    ] = None,
    kind: Annotated[
        Literal["linear", "quadratic", "piecewise"], typer.Option("--kind", help="Form of the prefill model.")
    ] = "linear",
    name: Annotated[str, typer.Option("--name", help="Name of the timing in the cluster file.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Fit a timing to measurements and print it as YAML for a cluster file; errors and range of the fit go to stderr.

    A profile has the columns tokens,seconds (whole prompts), or batch,context_tokens,seconds (decode iterations; the
    context is the sum over the batch), or it is splitwise-sim's CSV or DistServe's JSON. A report is the JSON of `vllm
    bench serve`, AIPerf, GuideLLM or inference-perf, or a CSV file of InferenceX; give runs at several loads.

    Example: [bold]kvroute timing fit perf_model.csv --model llama2-70b --hardware h100-80gb --tp 4[/bold]
    """
    from kvroute.cli.timing.fitted import FileSelection, fit_files
    from kvroute.cli.timing.text import check_name, plain, range_sentence, sentence, timing_yaml

    check_name(name)
    selection = FileSelection(model, hardware, tp, tuple(where or ()))
    prefill, decode, limits = fit_files(files, selection, kind)
    if as_json:
        print_json({"name": name, "prefill": plain(prefill), "decode": plain(decode), "range": limits})
        return
    typer.echo(timing_yaml(name, prefill, decode, limits=limits))
    tell([f"prefill: {sentence(prefill)}", f"decode: {sentence(decode)}", range_sentence(limits)])


app.command()(measure)
published.command()(aiconfigurator)
app.add_typer(published, name="from")
