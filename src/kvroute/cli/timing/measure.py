"""`kvroute timing measure`: measures a running engine and prints the `timing:` block of a cluster file."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvroute.cli.output import print_json, tell
from kvroute.cli.timing.options import AsJson, Kind, TimingName
from kvroute.types import InputError, PrefillSpec

if TYPE_CHECKING:
    from kvroute.load.timing import FittedEngine, MeasuredTimes, MeasurementLimits, PrefixCheck
    from kvroute.timing import Fit
    from kvroute.timing.fit import PrefillKind


def measure(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine, http://host:port.", show_default=False)],
    prefill: Annotated[
        str | None, typer.Option("--prefill", metavar="URL", help="Measure prompts on this engine instead.")
    ] = None,
    decode: Annotated[
        str | None, typer.Option("--decode", metavar="URL", help="Measure decode steps on this engine instead.")
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=64, max=1_000_000, help="Longest prompt.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=1, max=4096, help="Most requests that decode together.")] = 32,
    output_tokens: Annotated[
        int, typer.Option(min=16, max=10_000, help="Tokens of each response while decode steps are measured.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Measurements of each point; the median counts.")] = 3,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            "--step-tokens",
            min=16,
            max=1_000_000,
            help="Most tokens of one step (vLLM's max_num_batched_tokens): measure prompts that share steps, too.",
        ),
    ] = None,
    kind: Kind = "linear",
    name: TimingName = "default",
    key_env: Annotated[str | None, typer.Option(help="Environment variable with the engine's API key.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for prefill.csv and decode.csv, which `timing fit` reads.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the prefill and decode times of a running engine, and print them as YAML for a cluster file.

    Sends prompts of growing length one by one, then batches of requests that decode together, and with --step-tokens
    prompts that share steps; progress and the errors of the fit go to stderr. No other requests should run on the
    engine. Prompts are random token ids, so that none is cached.

    Example: [bold]kvroute timing measure http://10.0.0.1:8000 --max-batch 64[/bold]
    """
    from kvroute.cli.timing.text import check_name

    check_name(name)
    try:
        from kvroute.load.timing import MeasurementLimits, fit_engine
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    if out is not None and out.exists() and not out.is_dir():
        raise InputError("is not a folder", where=str(out), hint="give a folder for the two files")
    limits = MeasurementLimits(max_prompt_tokens, max_batch, output_tokens, repeats)
    found = asyncio.run(_measured(prefill or url, decode or url, _key(key_env), limits, step_tokens))
    fitted = fit_engine(found.profile(url), kind, found.scheduling, found.cached, found.transfers)
    if out is not None:
        _write(out, found)
    _show(name, kind, fitted, found, as_json)


def _show(name: str, kind: PrefillKind, fitted: FittedEngine, found: MeasuredTimes, as_json: bool) -> None:
    from kvroute.cli.timing.text import plain, sentence, timing_yaml

    prefill, decode, scheduler = fitted.prefill, fitted.decode, fitted.scheduler
    checks = _checks(prefill, found.prefixes)
    if as_json:
        shared = None
        if found.scheduling is not None:
            shared = asdict(found.scheduling.short) | {"predicted_s": fitted.shared_s}
        print_json(
            {
                "name": name,
                "kind": kind,
                "prefill": plain(prefill),
                "decode": plain(decode),
                "scheduler": msgspec.to_builtins(scheduler),
                "prefixes": checks,
                "shared": shared,
            }
        )
        return
    typer.echo(timing_yaml(name, prefill, decode, scheduler))
    tell([f"prefill: {sentence(prefill)}", f"decode: {sentence(decode)}"])
    if found.scheduling is not None:
        short = found.scheduling.short
        tell(
            [
                f"{short.prompts} prompts of {short.tokens} tokens together: {short.seconds:.4g} s "
                f"(predicted {fitted.shared_s:.4g} s)"
            ]
        )
    tell(
        [
            f"prompt of {check['tokens']} tokens, {check['cached_tokens']} of them cached: {check['seconds']:.4g} s "
            f"(predicted {check['predicted_s']:.4g} s)"
            for check in checks
        ]
    )


def _checks(fit: Fit[PrefillSpec] | None, prefixes: list[PrefixCheck]) -> list[dict[str, Any]]:
    """Return measured and predicted times of prompts that were partly cached: the fit has not seen them."""
    from kvroute.timing import prefill_time

    if fit is None:
        return []
    time = prefill_time(fit.spec)
    return [
        {
            "tokens": prefix.tokens,
            "cached_tokens": prefix.cached_tokens,
            "seconds": prefix.seconds,
            "predicted_s": time.seconds(prefix.tokens, prefix.cached_tokens),
        }
        for prefix in prefixes
    ]


async def _measured(
    prefill_url: str, decode_url: str, key: str, limits: MeasurementLimits, step_tokens: int | None
) -> MeasuredTimes:
    import aiohttp

    from kvroute.load.timing import (
        EngineApi,
        batches_of,
        lengths_of,
        measure_cached,
        measure_decode,
        measure_prefill,
        measure_scheduling,
    )

    # Engines close idle connections, vLLM's after 5 s.
    unlimited = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as session:
        engines = [EngineApi(session, url, key) for url in dict.fromkeys((prefill_url, decode_url))]
        for engine in engines:
            await engine.meet()
            running = await engine.running()
            if running:
                tell([f"{engine.url} has {running} requests in progress; measure an idle engine"])
        lengths = lengths_of(limits, engines[0].context_tokens)
        batches = batches_of(limits, engines[-1].context_tokens)
        draw = random.Random()
        found = await measure_prefill(engines[0], lengths, limits, draw, _say)
        if step_tokens is not None:
            found.scheduling = await measure_scheduling(engines[0], step_tokens, limits, draw, _say)
        found.decode = (await measure_decode(engines[-1], batches, limits, draw, _say)).decode
        found.cached = await measure_cached(engines[-1], limits, draw)
        found.transfers = "between-steps" if await engines[-1].is_vllm() else "at-once"
        return found


def _say(line: str) -> None:
    tell([line])


def _write(folder: Path, found: MeasuredTimes) -> None:
    from kvroute.load.timing import profile_csv

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(("prefill.csv", "decode.csv"), profile_csv(found), strict=True):
            (folder / name).write_text(text, encoding="ascii")
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", where=str(folder), hint="give another one") from None


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise InputError(f"the variable {variable} is empty or not set", where="--key-env", hint="export the key")
    return key
