"""`kvroute serve`: the live gateway, in front of real or emulated engines."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.emulate import shares_by_tier
from kvroute.cli.kubernetes_options import (
    KUBERNETES,
    Context,
    Kubeconfig,
    Namespace,
    Selector,
    kubernetes_arguments,
    kubernetes_overlay,
)
from kvroute.cli.output import check_writable, tell
from kvroute.cli.serve_options import (
    PLACE,
    ROUTING,
    AdminPort,
    Background,
    Embedded,
    EventLog,
    KvScale,
    LogFormat,
    Policy,
    PrefillPolicy,
    Seed,
    UntilEof,
)
from kvroute.cli.serve_overrides import Overrides
from kvroute.cli.serve_workers import read_spec, run_worker, run_workers
from kvroute.cli.serving import emulated_engines, run_gateway
from kvroute.topology.kubernetes_overlay import kubernetes_file
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.gateway.config.settings import GatewaySettings


def serve(
    cluster: Annotated[
        Path | None,
        typer.Argument(
            help="Cluster file (YAML), with an endpoint for each instance. Optional with --kubernetes.",
            show_default=False,
        ),
    ] = None,
    policy: Policy = None,
    shadow: Annotated[
        str | None,
        typer.Option(
            help="Evaluate this decode policy without acting on it, and report where it differs.",
            rich_help_panel=ROUTING,
        ),
    ] = None,
    prefill: PrefillPolicy = None,
    constraint: Annotated[
        str | None,
        typer.Option(help="Topology constraint, e.g. pod:fail or rack:fallback.", rich_help_panel=ROUTING),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Listen address for clients.", rich_help_panel=PLACE)] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for clients; 0: any free port.", rich_help_panel=PLACE)
    ] = None,
    admin_port: AdminPort = None,
    log: EventLog = None,
    log_format: LogFormat = None,
    embedded: Embedded = False,
    kv_scale: KvScale = 1e-3,
    background: Background = "0",
    seed: Seed = None,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Discover the engines among the pods of a Kubernetes cluster.",
            rich_help_panel=KUBERNETES,
        ),
    ] = False,
    namespace: Namespace = None,
    selector: Selector = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write the addresses to this file as JSON when the gateway is ready.", rich_help_panel=PLACE),
    ] = None,
    until_eof: UntilEof = False,
    workers: Annotated[
        int,
        typer.Option(min=1, max=256, help="Processes that serve the port; about one per core.", rich_help_panel=PLACE),
    ] = 1,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve an OpenAI-compatible API in front of prefill and decode engines, with the cost of each KV transfer.

    SIGTERM drains, SIGHUP reloads the cluster file. The settings are in the file's `gateway:` section. Without a file,
    --kubernetes serves with the defaults that `kvroute topology new --kubernetes` would write.

    Example: [bold]kvroute serve --embedded examples/small.yaml[/bold]
    or [bold]kvroute serve --kubernetes --namespace llm[/bold]
    """
    # Ignore SIGHUP until the file is read. This is a handler because child processes would inherit SIG_IGN.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        import uvloop
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    if log_format not in (None, "text", "json"):
        raise InputError(f"unknown format {log_format!r}", where="--log-format", hint="use text or json")

    overlay = kubernetes_overlay(namespace, selector, kubeconfig, context, asked=kubernetes)
    if cluster is None and overlay is None:
        raise InputError("no cluster file is given", hint="give a YAML file, or discover the engines with --kubernetes")
    if embedded and (overlay is not None or cluster is None):
        raise InputError("--embedded and --kubernetes exclude each other", where="--embedded")

    overrides = Overrides(policy, shadow, prefill, constraint, host, port, admin_port, log, log_format)
    spec = read_spec(worker) if worker is not None else None

    def adjust(settings: GatewaySettings) -> GatewaySettings:
        adjusted = overrides.applied(settings)
        if (embedded or (spec is not None and spec.endpoints is not None)) and adjusted.measure == "auto":
            # Emulated engines report their transfers. Timing by first bytes too would count the first transfers twice.
            adjusted = msgspec.structs.replace(adjusted, measure="engine")
        return adjusted if spec is None else spec.settings(adjusted)

    from kvroute.gateway.lifecycle.deployment import Deployment

    if ready_file is not None:
        check_writable(ready_file, "--ready-file")
    with contextlib.ExitStack() as stack:
        endpoints = spec.endpoints if spec is not None else None
        if embedded and cluster is not None:
            shares_by_tier(background)
            Deployment.check_embedded(cluster, adjust)
            endpoints = stack.enter_context(emulated_engines(cluster, kv_scale, background, seed))

        def read() -> Deployment:
            if cluster is None:
                deployment = Deployment.of(kubernetes_file().to_yaml(), "--kubernetes", adjust, overlay=overlay)
            else:
                deployment = Deployment.read(cluster, adjust, endpoints, overlay)
            if spec is None:
                tell(deployment.cluster.remarks)
            return deployment

        if workers > 1:
            arguments = [*([str(cluster)] if cluster is not None else []), *overrides.arguments()]
            arguments += kubernetes_arguments(namespace, selector, kubeconfig, context, asked=kubernetes)
            uvloop.run(run_workers(read, arguments, workers, endpoints, ready_file, seed, until_eof))
        elif spec is not None:
            uvloop.run(run_worker(read, spec, seed))
        else:
            uvloop.run(run_gateway(read, ready_file, seed, until_eof))
