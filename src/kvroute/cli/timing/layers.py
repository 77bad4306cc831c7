"""`kvroute timing from layers`: the `timing:` block of a cluster file from measured times of a model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvroute.cli.quantities import seconds
from kvroute.cli.timing.options import AsJson, Kind, TimingName
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.timing.layers import LayerSteps

app = typer.Typer(help="Timings of engines that are not at hand, from published measurements.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Compute times from published measurements."""


@app.command()
def layers(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Tables of a model and GPU, as LLMServingSim's profiler writes them."),
    ],
    tp: Annotated[int, typer.Option(min=1, max=1024, help="Tensor-parallel degree; the folder has its tables.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Model, which gives the number of layers; default: that of DIR/meta.yaml.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Bandwidth between the GPUs, e.g. '16 GB/s'; default: exchanges take no time.")
    ] = None,
    link_latency: Annotated[float, typer.Option(parser=seconds(), help="Latency of an exchange, e.g. 20us.")] = 0.0,
    experts: Annotated[int, typer.Option(min=0, help="Experts of a layer; 0: no mixture of experts.")] = 0,
    experts_per_token: Annotated[int, typer.Option(min=1, help="Experts that a token uses.")] = 1,
    step: Annotated[float, typer.Option(parser=seconds(), help="Time of a step besides its layers, e.g. 0.5ms.")] = 0.0,
    kind: Kind = "linear",
    name: TimingName = "default",
    as_json: AsJson = False,
) -> None:
    """Add up measured times of layers to steps, fit a timing to them and print it as YAML for a cluster file.

    The fit errors and the range of the tables, outside of which the timing is extrapolated, are printed on stderr.

    Example: [bold]kvroute timing from layers perf/H100/llama-3.1-8b --tp 1 --step 0.5ms[/bold]
    """
    from kvroute.cli.timing.text import check_name, limits_of, print_fits
    from kvroute.timing import fit_profile

    check_name(name)
    if experts and experts_per_token > experts:
        what = f"a token uses {experts_per_token} of {experts} experts"
        raise InputError(what, where="--experts-per-token", hint="give a number up to that of the experts")
    shape = (experts, experts_per_token) if experts else None
    steps = _steps(folder, tp, model, _link(link), link_latency, shape, step)
    profile = steps.profile(str(folder))
    prefill, decode = fit_profile(profile, kind)
    limits = limits_of(profile)
    print_fits(name, (prefill, decode), limits, as_json=as_json)


def _link(text: str | None) -> float | None:
    from kvroute_engine.files.units import bandwidth_bytes_per_s

    try:
        return None if text is None else bandwidth_bytes_per_s(text)
    except InputError as error:
        raise InputError(error.what, where="--link", hint="write a bandwidth such as '16 GB/s'") from None


def _steps(
    folder: Path,
    tp: int,
    model: str | None,
    bytes_per_s: float | None,
    latency_s: float,
    experts: tuple[int, int] | None,
    step_s: float,
) -> LayerSteps:
    from kvroute import llm
    from kvroute.timing.layers import AllReduceLink, ExpertShape, LayerSteps, LayerTables

    found = llm.model(model or _model_of(folder))
    tables = LayerTables.read(folder, tp)
    if tables.experts and experts is None:
        what = f"{found.name} is a mixture of experts"
        raise InputError(what, where=str(folder), hint="give --experts and --experts-per-token")
    link = None
    if bytes_per_s is not None:
        if found.shape is None:
            what = f"the size of a token of {found.name} is not known"
            raise InputError(what, where="--link", hint="omit the option, or name a model of `kvroute llm` that has it")
        link = AllReduceLink(bytes_per_s, latency_s, 2.0 * found.shape.hidden)
    shape = None if experts is None else ExpertShape(*experts)
    return LayerSteps(tables, found.layer_count, tp, link, shape, step_s)


def _model_of(folder: Path) -> str:
    """Return the model that the profiler names beside its tables."""
    import yaml

    if not folder.is_dir():
        raise InputError("the folder does not exist", where=str(folder), hint="give the folder of a model's tables")
    try:
        meta = yaml.safe_load((folder / "meta.yaml").read_text(encoding="utf-8"))
        return str(meta["model"])
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        what = "there is no meta.yaml that names the model"
        raise InputError(what, where=str(folder), hint="give the model with --model") from None
