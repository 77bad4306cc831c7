"""`kvroute doctor`: checks engines and the KV transfers between them before a gateway serves them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from kvroute.cli.output import console, print_json, remarks, tell, thin_table
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.doctor import EngineReport, ExaminationReport, ExaminationSpec, PairReport
    from kvroute.serve.lifecycle.deployment import Deployment

_INTERRUPTED = 130
_MOVED_TEXTS = {
    ("yes", "prefix counters"): "by tokens",
    ("likely", "time"): "by time",
}
_LEGEND = {
    "by tokens": "by tokens: yes, by the decode engine's count of prompt tokens from its connector; the time includes "
    "the wait for the first token.",
    "by time": "by time: likely; these engines have no transfer counters, and the first token arrived much sooner "
    "than after a prefill. The KV size is computed from the model, and the time includes the wait for the first token.",
    "likely": "likely: these engines have no transfer counters, and their decode engine computes no prompts.",
    "unknown": "unknown: these engines have no transfer counters, and the time allows no conclusion.",
}


def doctor(
    cluster: Annotated[
        Path, typer.Argument(help="Cluster file (YAML), with an endpoint for each instance.", show_default=False)
    ],
    pairs: Annotated[
        str, typer.Option(help="Number of prefill/decode pairs to test, or `all`.", metavar="N|all")
    ] = "16",
    timeout: Annotated[str, typer.Option(help="End after this time, with a unit: 30s, 5 min.")] = "60s",
    prompt_tokens: Annotated[
        int, typer.Option(min=64, max=1_000_000, help="Length of the prompt that is sent through each pair.")
    ] = 2048,
    key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with the engines' API key; default: `gateway.upstream_key_env`."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")
    ] = False,
) -> None:
    """Check each engine of a cluster file, and send one request through each prefill/decode pair.

    Reports whether the KV cache was transferred, and how fast. The gateway need not run.

    Exit code: 0 no findings, 1 there are findings, 2 the cluster file or an option is wrong.

    Example: [bold]kvroute doctor my-cluster.yaml --timeout 30s[/bold]
    """
    from kvroute.topology.reading.assembly import NO_INSTANCES

    try:
        import uvloop

        from kvroute.doctor import ExaminationSpec
        from kvroute.http.open_files import raise_limit
        from kvroute.serve.lifecycle.deployment import Deployment
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    options = ExaminationSpec(pairs=_pairs(pairs), timeout_s=_timeout_s(timeout), prompt_tokens=prompt_tokens)
    deployment = Deployment.read(cluster)
    if not deployment.cluster.instances:
        raise InputError(NO_INSTANCES, where=str(cluster), hint="list the engines to check them")
    tell(deployment.cluster.remarks)
    key = _key(key_env, deployment.settings.upstream_key_env)
    raise_limit()
    report = uvloop.run(_examined(deployment, options, key))
    if report is None:
        remarks().print("interrupted; all requests were aborted", style="yellow")
        raise typer.Exit(_INTERRUPTED)
    if as_json:
        print_json({"ok": report.well, **msgspec.to_builtins(report)})
    else:
        _print(report)
    raise typer.Exit(0 if report.well else 1)


def _pairs(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise InputError(f"{text!r} is not a valid number of pairs", where="--pairs", hint="give a number, or all")
    return int(text)


def _timeout_s(text: str) -> float:
    from kvroute_engine.files.units import duration_s

    try:
        seconds = duration_s(text)
    except InputError as error:
        raise InputError(error.what, where="--timeout", hint=error.hint) from None
    if seconds <= 0.0:
        raise InputError(
            "the timeout leaves no time for a request", where="--timeout", hint="use a duration above 0, such as 30s"
        )
    return seconds


def _key(option: str | None, of_file: str | None) -> str:
    """Return the engines' API key, empty if there is none."""
    name = option or of_file
    if name is None:
        return ""
    key = os.environ.get(name, "")
    if option is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        what = f"the environment variable {name} is not set or does not hold a valid API key"
        raise InputError(what, where="--key-env", hint=f"export {name}=...")
    return key


async def _examined(deployment: Deployment, options: ExaminationSpec, key: str) -> ExaminationReport | None:
    """Return the report; None after SIGINT or SIGTERM."""
    from kvroute.doctor import examine

    loop = asyncio.get_running_loop()
    examination = loop.create_task(examine(deployment, options, key))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, examination.cancel)
    try:
        return await examination
    except asyncio.CancelledError:
        return None


def _print(report: ExaminationReport) -> None:
    out = console()
    out.print(_engine_table(report.engines))
    if report.pairs:
        out.print(_pair_table(report.pairs))
    texts = {_moved(pair) for pair in report.pairs}
    for text, meaning in _LEGEND.items():
        if text in texts:
            out.print(meaning, style="dim", markup=False, highlight=False)
    if len(report.pairs) < report.pairs_possible:
        what = (
            f"{len(report.pairs)} of {report.pairs_possible} possible pairs were tested; --pairs all tests all of them."
        )
        out.print(what, style="dim", highlight=False)
    aggregated = [engine.aggregated for engine in report.engines if engine.aggregated is not None]
    if aggregated:
        served = f"{aggregated.count('')} of {len(aggregated)} engines"
        what = f"{served} that may serve a request without a KV transfer served one."
        out.print(what, style="dim", highlight=False)
    if report.well:
        out.print("All checks passed.", style="green")
        return
    out.print(f"{len(report.findings)} finding{'s' if len(report.findings) > 1 else ''}:", style="bold red")
    for number, finding in enumerate(report.findings, start=1):
        out.print(f"{number}. {finding.sentence}", markup=False, highlight=False)


def _engine_table(engines: Sequence[EngineReport]) -> Table:
    table = thin_table()
    table.add_column("engine", overflow="fold", ratio=None, min_width=8)
    for heading in ("health", "model", "tp", "connector", "events", "metrics", "clock"):
        table.add_column(heading, no_wrap=True)
    for engine in engines:
        cells = _engine_cells(engine)
        table.add_row(engine.name, *cells, style=None if engine.usable else "red")
    return table


def _engine_cells(engine: EngineReport) -> tuple[str, ...]:
    """Return the cells after the name; `-` for values that the engine does not report or that were not requested."""
    model = "-" if engine.model_ok is None else "ok" if engine.model_ok else "wrong"
    tp = "-" if engine.engine_tp is None else str(engine.engine_tp)
    events, metrics, clock = engine.events, engine.metrics, engine.clock
    if events is None:
        events_text = "-"
    elif not events.subscribed:
        events_text = "closed"
    else:
        count = f"{events.batches} batch{'' if events.batches == 1 else 'es'}" if events.batches else "open"
        events_text = "no replay" if events.replay is False else count
    if metrics is None:
        metrics_text = "-"
    else:
        metrics_text = "none" if metrics.failure else f"{len(metrics.missing)} missing" if metrics.missing else "ok"
    clock_text = "-" if clock is None else f"{clock.offset_s:+.2f}+-{clock.error_s:.2f} s"
    health = engine.health if engine.health in ("ok", "not asked") else "down"
    return health, model, tp, engine.connector or "-", events_text, metrics_text, clock_text


def _pair_table(pairs: Sequence[PairReport]) -> Table:
    from kvroute.doctor.verdict import bytes_text, rates_text, seconds_text

    table = thin_table()
    table.add_column("pair", overflow="fold", min_width=16)
    table.add_column("tier", no_wrap=True)
    table.add_column("KV moved", no_wrap=True)
    for heading in ("KV", "time", "rate / map"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pair in pairs:
        table.add_row(
            pair.name,
            pair.tier_name.removeprefix("same ").removeprefix("across "),
            _moved(pair),
            "-" if pair.kv_bytes is None else bytes_text(pair.kv_bytes),
            "-" if pair.transfer_s is None else seconds_text(pair.transfer_s),
            rates_text(pair.bytes_per_s, pair.promised_bytes_per_s),
            style="red" if pair.moved in ("no", "failed") else "dim" if pair.moved == "not tried" else None,
        )
    return table


def _moved(pair: PairReport) -> str:
    return _MOVED_TEXTS.get((pair.moved, pair.evidence), pair.moved)
