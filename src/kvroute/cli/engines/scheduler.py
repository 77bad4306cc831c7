"""`kvroute scheduler`: the central scheduler of all-reduce schemes."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.quantities import DURATION, seconds
from kvroute.types import InputError
from kvroute_engine.command.agent import check_installed, run_until_signal, say
from kvroute_engine.origins import is_loopback

if TYPE_CHECKING:
    from kvroute.collectives.scheduler.tables import Tables
    from kvroute_engine.agent.security import Tls

TABLES, PLACE, PROTECTION = "Tables", "Addresses", "Protection"


def scheduler(
    cluster: Annotated[
        Path, typer.Argument(help="Cluster file: its instances with tp > 1 are the groups.", show_default=False)
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for agents; port 0: any.", rich_help_panel=PLACE)
    ] = "127.0.0.1:7400",
    period: Annotated[
        float,
        typer.Option(
            parser=seconds(0.01),
            metavar=DURATION,
            help="Time between two tables, and between two reports of an agent.",
            show_default="1 s",
            rich_help_panel=TABLES,
        ),
    ] = 1.0,
    settle: Annotated[
        float,
        typer.Option(
            parser=seconds(0.0),
            metavar=DURATION,
            help="Time after the start before the first table, in which agents connect.",
            show_default="3 s",
            rich_help_panel=TABLES,
        ),
    ] = 3.0,
    hysteresis: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.9,
            help="Share of the time of all-reduces that a change of scheme must save.",
            rich_help_panel=TABLES,
        ),
    ] = 0.1,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that agents must send.", rich_help_panel=PROTECTION)
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="Certificate (PEM), for TLS.", rich_help_panel=PROTECTION)] = None,
    key: Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).", rich_help_panel=PROTECTION)] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(help="Authorities that sign the certificates that agents need then.", rich_help_panel=PROTECTION),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen beyond this machine without token or client CA.", rich_help_panel=PROTECTION
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="HTTP port for Prometheus; 0: any.", rich_help_panel=PLACE),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of that port.", rich_help_panel=PLACE)] = "127.0.0.1",
) -> None:
    """Compute tables of all-reduce schemes from the load of links and switches, for the agents of a cluster.

    Prints one JSON line when it is ready, {"address": "host:port", "groups": number, "metrics": "host:port" or null},
    and runs until SIGTERM or SIGINT.

    Example: [bold]kvroute scheduler cluster.yaml --listen 10.0.0.1:7400 --token-file token[/bold]
    """
    check_installed()
    from kvroute.collectives.scheduler.tables import Tables
    from kvroute.topology import load
    from kvroute_engine.agent.security import Tls, read_token

    _check_exposure(_host(listen), token_file is not None or client_ca is not None, insecure)
    if client_ca is not None and cert is None:
        raise InputError("a client CA needs TLS", where="--client-ca", hint="give --cert and --key, too")
    tls, token = Tls.read(cert, key, client_ca, "--client-ca"), read_token(token_file)
    tables = Tables(load(cluster), int(time.time() * 1e3), period, hysteresis)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    asyncio.run(run_until_signal(_serve(tables, listen, token, tls, settle, metrics)))


def _host(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise InputError(f"{listen!r} is not an address", where="--listen", hint="write HOST:PORT")
    return host


def _check_exposure(host: str, protected: bool, insecure: bool) -> None:
    if not (protected or insecure or is_loopback(host)):
        what = f"every machine that reaches {host} could report loads and get tables"
        raise InputError(what, where="--listen", hint="give --token-file or --client-ca, or --insecure")


async def _serve(
    tables: Tables, listen: str, token: str, tls: Tls | None, settle_s: float, metrics: tuple[str, int] | None
) -> None:
    from kvroute.collectives.scheduler.metrics import scheduler_metrics
    from kvroute.collectives.scheduler.service import SchedulerService
    from kvroute_engine.agent.metrics import MetricsServer

    service = SchedulerService(tables, say, token, settle_s)
    page = None
    try:
        await service.start(listen, tls)
        if metrics is not None:
            page = MetricsServer.start(*metrics, lambda: scheduler_metrics(service))
        ready = {
            "address": service.address,
            "groups": len(tables.groups),
            "metrics": page.address if page is not None else None,
        }
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await service.run()
    finally:
        await service.stop()
        if page is not None:
            page.close()
