"""`kvroute timing`: converts measured profiles to the `timing:` block of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvroute.cli.timing.layers import app as published
from kvroute.cli.timing.measure import measure
from kvroute.cli.timing.options import AsJson, Kind, TimingName
from kvroute.types import InputError

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
    kind: Kind = "linear",
    name: TimingName = "default",
    as_json: AsJson = False,
) -> None:
    """Fit a timing to measurements and print it as YAML for a cluster file; errors and range of the fit go to stderr.

    A profile has the columns tokens,seconds (whole prompts), or batch,context_tokens,seconds (decode iterations; the
    context is the sum over the batch), or it is splitwise-sim's CSV or DistServe's JSON. A report is the JSON of `vllm
    bench serve`, AIPerf, GuideLLM or inference-perf, or a CSV file of InferenceX; give runs at several loads.

    Example: [bold]kvroute timing fit perf_model.csv --model llama2-70b --hardware h100-80gb --tp 4[/bold]
    """
    from kvroute.cli.timing.fitted import FileSelection, fit_files
    from kvroute.cli.timing.text import check_name, print_fits

    check_name(name)
    selection = FileSelection(model, hardware, tp, tuple(where or ()))
    prefill, decode, limits = fit_files(files, selection, kind)
    print_fits(name, (prefill, decode), limits, as_json=as_json)


@published.command()
def aiconfigurator(
    system: Annotated[str, typer.Option(help="GPU and node, such as h100_sxm, h200_sxm, b200_sxm or gb200.")],
    backend: Annotated[Literal["vllm", "sglang", "trtllm"], typer.Option(help="Engine.")],
    model: Annotated[str, typer.Option(help="Model that the library knows, or a folder with its config.json.")],
    tp: Annotated[int, typer.Option(min=1, max=1024, help="Tensor-parallel degree.")] = 1,
    ep: Annotated[int, typer.Option(min=1, max=1024, help="Expert-parallel degree.")] = 1,
    dp: Annotated[int, typer.Option(min=1, max=1024, help="Data-parallel ranks of attention.")] = 1,
    speculative: Annotated[
        int, typer.Option(min=0, max=16, help="Drafted tokens per step (MTP); 0: no speculative decoding.")
    ] = 0,
    acceptance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Probability that a draft is accepted, for --speculative.")
    ] = None,
    attention: Annotated[
        Literal["bfloat16", "fp8"] | None, typer.Option(help="Precision of attention; default: that of the model.")
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=512, max=1_000_000, help="Longest prompt and context.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=2, max=4096, help="Most requests that decode together.")] = 128,
    kind: Kind = "linear",
    name: TimingName = "default",
    as_json: AsJson = False,
) -> None:
    """Add up measured times of operators to steps, fit a timing to them and print it as YAML for a cluster file.

    The operators are those of NVIDIA's aiconfigurator (pip install 'kvroute[aiconfigurator]'). Errors and range of the
    fit are printed on stderr. With --dp the batch is that of one rank; with --speculative decode is the time per token.

    Example: [bold]kvroute timing from aiconfigurator --system h200_sxm --backend vllm --model Qwen3-32B --tp 4[/bold]
    """
    from kvroute.cli.timing.text import check_name, limits_of, print_fits
    from kvroute.measurements.aiconfigurator import ModelledEngine, engine_times, operator_profile
    from kvroute.timing import fit_profile

    check_name(name)
    if bool(speculative) != (acceptance is not None):
        hint = "give both or none; acceptance depends on model and text, 0.7 is that of DeepSeek-R1"
        raise InputError("--speculative and --acceptance belong together", hint=hint)
    engine = ModelledEngine(system, backend, model, tp, ep, dp, speculative, acceptance or 0.0, attention)
    profile = operator_profile(engine, engine_times(engine), max_prompt_tokens, max_batch)
    prefill, decode = fit_profile(profile, kind)
    limits = limits_of(profile)
    print_fits(name, (prefill, decode), limits, as_json=as_json)


app.command()(measure)
app.add_typer(published, name="from")
