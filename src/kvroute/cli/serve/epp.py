"""`kvroute epp`: an endpoint picker for Envoy, in front of real or emulated engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.kube.options import (
    Context,
    FromKubernetes,
    Kubeconfig,
    Namespace,
    Pool,
    Selector,
    kubernetes_overlay,
)
from kvroute.cli.output import check_writable, console, tell, write_whole
from kvroute.cli.serve.epp_envoy import (
    ENVOY,
    Body,
    EnvoyAdmin,
    EnvoyChoices,
    EnvoyFallback,
    EnvoyListen,
    Fail,
    one_of,
    reachable,
)
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
from kvroute.types import Endpoint, InputError

if TYPE_CHECKING:
    from kvroute.serve.assembly import Gateway
    from kvroute.serve.config.settings import GatewaySettings
    from kvroute.serve.lifecycle.deployment import Deployment


def epp(
    cluster: ClusterFile = None,
    policy: Policy = None,
    prefill: PrefillPolicy = None,
    host: Annotated[
        str | None,
        typer.Option(help="Listen address for Envoy; that of the admin port does not change.", rich_help_panel=PLACE),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="gRPC port for Envoy; 0: any free port.", rich_help_panel=PLACE)
    ] = None,
    admin_port: AdminPort = None,
    log: EventLog = None,
    log_format: LogFormat = None,
    print_envoy_config: Annotated[
        bool,
        typer.Option("--print-envoy-config", help="Print a configuration of Envoy and exit.", rich_help_panel=ENVOY),
    ] = False,
    envoy_config: Annotated[
        Path | None,
        typer.Option(help="Write that configuration to this file when the picker is ready.", rich_help_panel=ENVOY),
    ] = None,
    envoy_listen: EnvoyListen = "127.0.0.1:10000",
    envoy_admin: EnvoyAdmin = "",
    fail: Fail = "closed",
    envoy_fallback: EnvoyFallback = "",
    body: Body = "streamed",
    prefill_by: Annotated[
        str,
        typer.Option(
            help="Who orders the prefill: the `picker`, or a `sidecar` of the decode instance (llm-d).",
            rich_help_panel=ROUTING,
        ),
    ] = "picker",
    conformance: Annotated[
        bool,
        typer.Option(
            "--conformance", help="Use the headers of the Gateway API's conformance tests.", rich_help_panel=ENVOY
        ),
    ] = False,
    embedded: Embedded = False,
    kv_scale: KvScale = 1e-3,
    background: Background = "0",
    seed: Seed = None,
    kubernetes: FromKubernetes = False,
    pool: Pool = None,
    namespace: Namespace = None,
    selector: Selector = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    ready_file: ReadyFile = None,
    until_eof: UntilEof = False,
) -> None:
    """Choose endpoints for Envoy (ext_proc v3, the endpoint picker of the Gateway API inference extension).

    Decisions, retries, health checks and circuit breakers are those of `kvroute serve`, with the settings in the file's
    `gateway:` section; `listen` there is the address for Envoy. Envoy sends the requests and relays the responses.

    Example: [bold]kvroute epp cluster.yaml --print-envoy-config > envoy.json[/bold]
    or [bold]kvroute epp --kubernetes --pool llm/my-pool[/bold]
    """
    from kvroute.cli.serve.engine_source import EngineSource, measured_by_engines
    from kvroute.cli.serve.overrides import Overrides
    from kvroute.cli.serve.process import run_gateway

    ignore_reload_until_read()
    _check_installed()
    import uvloop

    check_log_format(log_format)
    one_of("--prefill-by", prefill_by, ("picker", "sidecar"))
    envoy = EnvoyChoices.of(envoy_listen, envoy_admin, fail, body, envoy_fallback)
    overlay = kubernetes_overlay(namespace, selector, kubeconfig, context, pool, asked=kubernetes)
    source = EngineSource.of(cluster, overlay, embedded=embedded)
    if embedded and print_envoy_config:
        what = "emulated engines have no addresses before they run"
        raise InputError(what, where="--print-envoy-config", hint="use --envoy-config FILE with --embedded")
    overrides = Overrides(
        policy=policy,
        prefill=prefill,
        host=host,
        port=port,
        admin_port=admin_port,
        log=log,
        log_format=log_format,
    )

    said: list[str] = []

    def adjust(settings: GatewaySettings) -> GatewaySettings:
        said[:] = overrides.remarks(settings)
        adjusted = overrides.applied(settings)
        return measured_by_engines(adjusted) if embedded else adjusted

    def read(endpoints: dict[str, Endpoint] | None = None) -> Deployment:
        from kvroute.epp.addresses import check_addresses

        deployment = source.read(adjust, endpoints)
        check_addresses(deployment.cluster.instances, deployment.source, sidecar=prefill_by == "sidecar")
        tell((*said, *deployment.cluster.remarks, *deployment.settings.remarks))
        return deployment

    if print_envoy_config:
        deployment = read()
        typer.echo(envoy.config_text(deployment, deployment.settings.listen.port))
        return
    for place, option in ((ready_file, "--ready-file"), (envoy_config, "--envoy-config")):
        if place is not None:
            check_writable(place, option)
    with source.engines(adjust, kv_scale, background, seed) as endpoints:

        def announce(gateway: Gateway, deployment: Deployment) -> None:
            if envoy_config is not None:
                write_whole(envoy_config, envoy.config_text(deployment, gateway.port), "--envoy-config")
            _announce(gateway, deployment, ready_file)

        from kvroute.epp.frontend import PickerFrontend
        from kvroute.epp.server import PickerSpec

        first = read(endpoints)
        if envoy_config is not None:
            envoy.config_text(first, first.settings.listen.port)  # an option that does not fit is an error now
        fails_open = envoy.fail_open if envoy_config is not None else None
        frontend = PickerFrontend(PickerSpec(conformance, prefill_by == "sidecar", fails_open))
        run = run_gateway(lambda: read(endpoints), ready_file, seed, until_eof, frontend=frontend, announce=announce)
        uvloop.run(run)


def _check_installed() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print causes beside our sentences
    try:
        import uvloop  # noqa: F401

        import kvroute.epp.frontend  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve,epp]'") from None


def _announce(gateway: Gateway, deployment: Deployment, ready_file: Path | None) -> None:
    from kvroute.cli.serve.process import admin_url, warn_of_exposures

    settings, cluster = deployment.settings, deployment.cluster
    picker = reachable(settings.listen.host, gateway.port)
    admin = admin_url(gateway, deployment)
    warn_of_exposures(deployment)
    out = console()
    engines = f"{len(cluster.instances)} instances" if cluster.file.discovery is None else "the discovered engines"
    out.print(f"kvroute picks among {engines} of {cluster.name} for Envoy: {picker}")
    out.print(f"dashboard and metrics: {admin}")
    if ready_file is not None:
        write_whole(ready_file, msgspec.json.encode({"picker": picker, "admin": admin}).decode(), "--ready-file")
