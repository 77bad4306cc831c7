"""`kvroute kube operator`: the operator of KvRouters and its webhook."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from kvroute.types import InputError

_LEVELS = ("debug", "info", "warning", "error")


def operator(
    image: Annotated[str, typer.Option(help="Image of kvroute, for gateways and for init containers of engines.")],
    image_pull_secret: Annotated[
        list[str] | None,
        typer.Option(help="Secret with which that image is pulled, in the namespaces of gateways and engines. Repeat."),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the operator.")] = "kvroute-system",
    identity: Annotated[str, typer.Option(help="Name in the Lease; default: the host's name.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the webhook; 0: any.")] = 9443,
    webhook: Annotated[bool, typer.Option(help="Whether to answer admission reviews.")] = True,
    certificates: Annotated[
        Path | None,
        typer.Option(help="Folder with tls.crt and tls.key; default: the operator makes its certificates itself."),
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Kubeconfig; default: the pod's service account, KUBECONFIG, ~/.kube/config.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig; default: the current one.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the operator: gateways for KvRouters, topology labels for engines, and admission checks.

    Several operators may run; one of them leads. docs/kubernetes-operator.md describes the installation, which gives it
    the rights that it needs.

    Exit code: 0 after SIGTERM or SIGINT, 2 an option is wrong.

    Example: [bold]kvroute kube operator --image registry.example/kvroute:0.2.0[/bold]
    """
    try:
        from kvroute.kube.api.client import Access
        from kvroute.kube.operator.driver import OperatorDriver, OperatorDriverSpec
        from kvroute.kube.operator.observed import OperatorSpec
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[kube,serve]'") from None
    if log_level not in _LEVELS:
        raise InputError(f"{log_level!r} is no level", where="--log-level", hint=f"write one of {', '.join(_LEVELS)}")
    # At `debug` libraries print every read of a socket: their level stays at `warning` or above.
    own = logging.getLevelNamesMapping()[log_level.upper()]
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=max(own, logging.WARNING), format=form)
    logging.getLogger("kvroute").setLevel(own)
    access = Access(kubeconfig, context)
    access.namespace()
    settings = OperatorDriverSpec(
        operator=OperatorSpec(image, namespace, tuple(image_pull_secret or ())),
        identity=identity or os.environ.get("POD_NAME") or socket.gethostname(),
        port=port if webhook else None,
        certificates=certificates,
        check_file=_check_file,
    )

    async def run() -> None:
        running = asyncio.ensure_future(OperatorDriver(access.connect, settings).run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()

    try:
        asyncio.run(run())
    except ExceptionGroup as group:
        wrong = group.subgroup(InputError)
        if wrong is None:
            raise
        raise _first(wrong) from None


def _check_file(text: str) -> None:
    """Raise InputErrors for what a gateway refuses of a cluster file; its settings are checked if `serve` is
    installed."""
    from kvroute.topology import parse

    try:
        from kvroute.serve.config.preflight import deployment_of
    except ImportError:
        parse(text, "cluster.yaml")
        return
    deployment_of(text, "cluster.yaml", environ=None)


def _first(group: BaseExceptionGroup[InputError]) -> InputError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, InputError)
    return error
