"""`kvroute kube`: what Kubernetes discovery would find, and the start of an engine with its topology labels."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.kube.operator import operator
from kvroute.cli.kube.options import pool_fields
from kvroute.cli.output import console, print_json, thin_table
from kvroute.types import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvroute.kube.discovery.pods import PodReading
    from kvroute.kube.preflight.check import CheckReport, PickerTarget, PoolReport
    from kvroute.types.discovered import Discovered

app = typer.Typer(no_args_is_help=True, help="Kubernetes: check discovery, and start engines with topology labels.")

app.command("operator")(operator)


@app.command()
def check(
    namespace: Annotated[
        str | None, typer.Option(help="Namespace of the engines; default: that of the kubeconfig.")
    ] = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", help="Engines of all namespaces.")] = False,
    selector: Annotated[
        str | None, typer.Option(help="Label selector, such as app=vllm; default: all pods.", show_default=False)
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="[NAMESPACE/]NAME",
            help="InferencePool whose pods and ports are the engines, as for `kvroute epp`.",
        ),
    ] = None,
    constraint: Annotated[
        str, typer.Option(help="Topology constraint to check, such as rack:required.", metavar="LEVEL[:ENFORCEMENT]")
    ] = "",
    level: Annotated[
        list[str] | None,
        typer.Option(help="Node labels of a level, instead of the default ones. Repeat.", metavar="LEVEL=LABEL,..."),
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Kubeconfig; default: the pod's service account, KUBECONFIG, ~/.kube/config.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig; default: the current one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")
    ] = False,
) -> None:
    """Show which engines a gateway would discover, which labels are missing, and whom a constraint would exclude.

    It reads pods and nodes once, with --pool the pool and the Service of its endpoint picker too, and changes nothing.

    Exit code: 0 no findings, 1 there are findings, 2 an option is wrong or the API server does not answer.

    Example: [bold]kvroute kube check --namespace llm --constraint rack:required[/bold]
    or [bold]kvroute kube check --pool llm/my-pool[/bold]
    """
    try:
        from kvroute.kube.api.client import Access
        from kvroute.kube.discovery.engines import DiscoverySpec, read_once
        from kvroute.kube.preflight.gateway import check_access
        from kvroute.kube.preflight.pool_check import read_pool_once
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[kube]'") from None
    from kvroute.kube.discovery.places import DEFAULT_LEVELS
    from kvroute.kube.preflight.check import check_report
    from kvroute.policies import TopologyConstraint

    if all_namespaces and namespace is not None:
        raise InputError("--namespace and --all-namespaces exclude each other", where="--all-namespaces")
    if all_namespaces and pool is not None:
        raise InputError("an InferencePool is in one namespace", where="--all-namespaces", hint="leave it out")
    of_pool = {} if pool is None else pool_fields(pool, namespace, selector)
    wanted = TopologyConstraint.parse(constraint) if constraint else None
    levels = DEFAULT_LEVELS
    for labels in level or ():
        levels = levels.with_keys(labels)
    in_namespace = "" if all_namespaces else of_pool.get("namespace", namespace)
    options = DiscoverySpec(in_namespace, selector or "", levels)
    access = Access(kubeconfig, context)
    asyncio.run(check_access(access, options))
    level_wanted = wanted.level if wanted else None
    if of_pool:
        found = asyncio.run(read_pool_once(access, options, of_pool["pool"]))
        reading = _envoy_reachable(found.reading)
        report = check_report(reading, levels, level_wanted, found.nodes_failure, found.report)
    else:
        listing = asyncio.run(read_once(access, options))
        report = check_report(listing.reading, levels, level_wanted, listing.nodes_failure)
    if as_json:
        print_json({"ok": not report.faults, "faults": report.faults, **msgspec.to_builtins(report)})
    else:
        _print(report)
    raise typer.Exit(1 if report.faults else 0)


@app.command("run-worker", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_worker(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The engine and its options, after `--`.", metavar="COMMAND...", show_default=False),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Only wait for the labels, as an init container, and start nothing.")
    ] = False,
) -> None:
    """Wait for the topology labels of this pod, then become the engine.

    Reads the files of a Downward API volume. If the level in KVROUTE_KV_TRANSFER_TOPOLOGY_LEVEL has no value within
    KVROUTE_TOPOLOGY_WAIT_S (30) seconds, the engine is not started. It does nothing unless KVROUTE_TOPOLOGY_ENABLED is
    true. The names of Dynamo (DYN_TOPOLOGY_ENABLED, ...) work as well.

    Exit code: that of the engine; 1 the level has no value, 2 a variable is wrong, 127 the engine cannot be started.

    Example: [bold]kvroute kube run-worker -- vllm serve my-model[/bold]
    """
    from kvroute_engine.command.run_worker import run_worker as run

    raise typer.Exit(run(command or (), wait=wait, name="kvroute kube run-worker"))


def _print(report: CheckReport) -> None:
    out = console()
    if report.pool is not None:
        _print_pool(out, report.pool, report.engines)
    if report.engines:
        out.print(_engine_table(report))
        out.print(_level_table(report))
    for finding in report.findings:
        if finding.effect == "waiting":
            out.print(finding.sentence, style="dim", markup=False, highlight=False)
    if not report.faults:
        out.print("No findings.", style="green")
        return
    out.print(f"{len(report.faults)} finding{'s' if len(report.faults) > 1 else ''}:", style="bold red")
    for number, sentence in enumerate(report.faults, start=1):
        out.print(f"{number}. {sentence}", markup=False, highlight=False)


def _envoy_reachable(reading: PodReading) -> PodReading:
    """Return the reading with a finding in place of each engine that `kvroute epp` leaves out."""
    from kvroute.epp.addresses import address_fault
    from kvroute.kube.discovery.pods import PodFinding

    hint = "start it without TLS; Envoy adds TLS to engines itself"
    left_out = tuple(
        PodFinding(pod=f"engine {engine.name}", effect="left out", field="endpoint", what=fault, hint=hint)
        for engine in reading.engines
        if (fault := address_fault(engine.endpoint.url))
    )
    kept = tuple(engine for engine in reading.engines if not address_fault(engine.endpoint.url))
    return replace(reading, engines=kept, findings=(*reading.findings, *left_out))


def _print_pool(out: Console, pool: PoolReport, engines: Sequence[Discovered]) -> None:
    """Print the pool, and how many of its endpoints a picker would choose among."""
    lines = [
        ("InferencePool", pool.name),
        ("selector", f"{pool.selector or '-'} ({pool.pods} pods)"),
        ("target ports", ", ".join(map(str, pool.target_ports)) or "-"),
        ("endpoint picker", _picker(pool.picker)),
        ("endpoints", _endpoints(engines)),
    ]
    for name, value in lines:
        out.print(f"{name + ':':<17}{value}", markup=False, highlight=False, soft_wrap=True)
    out.print()


def _picker(picker: PickerTarget | None) -> str:
    if picker is None:
        return "none, so gateways ask no picker"
    port = "no port" if not picker.port else f"port {picker.port}"
    target = "" if picker.target_port in (None, picker.port) else f" (target port {picker.target_port})"
    return f"{picker.kind} {picker.name}, {port}{target}, {picker.failure_mode}"


def _endpoints(engines: Sequence[Discovered]) -> str:
    roles = Counter(engine.role for engine in engines if engine.ready)
    ready = sum(roles.values())
    kinds = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    return f"{ready} of {len(engines)} ready" + (f": {kinds}" if kinds else "")


def _engine_table(report: CheckReport) -> Table:
    table = thin_table()
    table.add_column("engine", overflow="fold", min_width=8)
    for heading in ("role", "ready", "url", "protocol", "model", "tp", "node", "rack", "pod", "datacenter"):
        table.add_column(heading, overflow="fold")
    for engine in report.engines:
        table.add_row(engine.name, *_cells(engine), style=None if engine.ready else "dim")
    return table


def _cells(engine: Discovered) -> tuple[str, ...]:
    place = engine.place
    tp = "-" if engine.tp is None else str(engine.tp)
    places = (place.node, place.rack, place.pod, place.datacenter)
    url, protocol = engine.endpoint.url, engine.endpoint.protocol
    ready = "yes" if engine.ready else "no"
    return engine.role, ready, url, protocol, engine.model or "-", tp, *(place or "-" for place in places)


def _level_table(report: CheckReport) -> Table:
    table = thin_table("level", "domains", "nodes without", "prefill without decode", "decode without prefill")
    for level in report.levels:
        lists = (level.unlabelled, level.stranded, level.unreached)
        table.add_row(level.level, str(level.domains), *(str(len(names)) for names in lists))
    return table
