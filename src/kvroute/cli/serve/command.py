"""`kvroute serve`: the live gateway, in front of real or emulated engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvroute.cli.kube.options import (
    Context,
    FromKubernetes,
    Kubeconfig,
    Namespace,
    Selector,
    kubernetes_arguments,
    kubernetes_overlay,
)
from kvroute.cli.output import check_writable, tell
from kvroute.cli.serve.options import (
    PLACE,
    ROUTING,
    AdminPort,
    Background,
    ClusterFile,
    Embedded,
    EventLog,
    KvScale,
    LogFormat,
    Policy,
    PrefillPolicy,
    ReadyFile,
    Seed,
    UntilEof,
    check_log_format,
    ignore_reload_until_read,
)
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.serve.config.settings import GatewaySettings
    from kvroute.serve.lifecycle.deployment import Deployment


def serve(
    cluster: ClusterFile = None,
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
    host: Annotated[
        str | None,
        typer.Option(help="Listen address for clients; that of the admin port does not change.", rich_help_panel=PLACE),
    ] = None,
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
    kubernetes: FromKubernetes = False,
    namespace: Namespace = None,
    selector: Selector = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    ready_file: ReadyFile = None,
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
    from kvroute.cli.serve.engine_source import EngineSource, measured_by_engines
    from kvroute.cli.serve.overrides import Overrides
    from kvroute.cli.serve.process import run_gateway
    from kvroute.cli.serve.workers import read_spec, run_worker, run_workers

    ignore_reload_until_read()
    try:
        import uvloop
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    check_log_format(log_format)
    overlay = kubernetes_overlay(namespace, selector, kubeconfig, context, asked=kubernetes)
    source = EngineSource.of(cluster, overlay, embedded=embedded)
    overrides = Overrides(policy, shadow, prefill, constraint, host, port, admin_port, log, log_format)
    spec = read_spec(worker) if worker is not None else None

    said: list[str] = []

    def adjust(settings: GatewaySettings) -> GatewaySettings:
        said[:] = overrides.remarks(settings)
        adjusted = overrides.applied(settings)
        if embedded or (spec is not None and spec.endpoints is not None):
            adjusted = measured_by_engines(adjusted)
        return adjusted if spec is None else spec.settings(adjusted)

    if ready_file is not None:
        check_writable(ready_file, "--ready-file")
    with source.engines(adjust, kv_scale, background, seed) as emulated:
        endpoints = emulated if spec is None else spec.endpoints

        def read() -> Deployment:
            deployment = source.read(adjust, endpoints)
            if spec is None:
                tell((*said, *deployment.cluster.remarks, *deployment.settings.remarks))
            return deployment

        if workers > 1:
            arguments = [*([str(cluster)] if cluster is not None else []), *overrides.arguments()]
            arguments += kubernetes_arguments(namespace, selector, kubeconfig, context, asked=kubernetes)
            uvloop.run(run_workers(read, arguments, workers, endpoints, ready_file, seed, until_eof))
        elif spec is not None:
            uvloop.run(run_worker(read, spec, seed))
        else:
            uvloop.run(run_gateway(read, ready_file, seed, until_eof))
