"""`kvroute timing from aiconfigurator`: the `timing:` block of a cluster file from measured operators."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvroute.cli.output import print_json, tell
from kvroute.types import InputError


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
    kind: Annotated[
        Literal["linear", "quadratic", "piecewise"], typer.Option("--kind", help="Form of the prefill model.")
    ] = "linear",
    name: Annotated[str, typer.Option("--name", help="Name of the timing in the cluster file.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Add up measured times of operators to steps, fit a timing to them and print it as YAML for a cluster file.

    The operators are those of NVIDIA's aiconfigurator (pip install 'kvroute[aiconfigurator]'). Errors and range of the
    fit are printed on stderr. With --dp the batch is that of one rank; with --speculative decode is the time per token.

    Example: [bold]kvroute timing from aiconfigurator --system h200_sxm --backend vllm --model Qwen3-32B --tp 4[/bold]
    """
    from kvroute.cli.timing.text import check_name, limits_of, plain, range_sentence, sentence, timing_yaml
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
    if as_json:
        print_json({"name": name, "prefill": plain(prefill), "decode": plain(decode), "range": limits})
        return
    typer.echo(timing_yaml(name, prefill, decode, limits=limits))
    tell([f"prefill: {sentence(prefill)}", f"decode: {sentence(decode)}", range_sentence(limits)])
