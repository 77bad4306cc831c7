"""`kvroute agent`: the agent of a server or switch, between the scheduler of all-reduce schemes and the ranks."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.engines.agents_extra import check_installed, run_until_signal, say
from kvroute.cli.output import check_writable, make_folder
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute_engine.agent.reports import AgentName

    from kvroute_engine.agent.agent import Agent

WHO, COUNTERS, PLACE, PROTECTION = "Name", "Counters", "Addresses", "Protection"


def agent(
    scheduler: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the scheduler.", show_default=False)],
    node: Annotated[
        str | None, typer.Option(help="Node of the cluster file that this server is.", rich_help_panel=WHO)
    ] = None,
    switch: Annotated[
        str | None,
        typer.Option(help="Rack, pod or datacenter whose switch this is; needs --status-file.", rich_help_panel=WHO),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(
            help="Folder for the table and for the files of the ranks; a switch needs none.", rich_help_panel=PLACE
        ),
    ] = Path("/run/kvroute"),
    nic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=PORT",
            help="Interface or RDMA device of a port: number of the NIC in the cluster file, of a switch number of the "
            "uplink. Repeat for each; default: all interfaces with hardware, by name.",
            rich_help_panel=COUNTERS,
        ),
    ] = None,
    dcgm: Annotated[
        str, typer.Option(metavar="URL", help="Page of dcgm-exporter, for NVLink.", rich_help_panel=COUNTERS)
    ] = "",
    status_file: Annotated[
        Path | None,
        typer.Option(help="--status-file of `kvroute switch` on this machine.", rich_help_panel=COUNTERS),
    ] = None,
    sysfs: Annotated[Path, typer.Option(help="Folder where sysfs is mounted.", rich_help_panel=COUNTERS)] = Path(
        "/sys"
    ),
    token_file: Annotated[
        Path | None, typer.Option(help="File with the scheduler's token.", rich_help_panel=PROTECTION)
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Use TLS with the system's authorities.", rich_help_panel=PROTECTION)
    ] = False,
    ca: Annotated[
        Path | None,
        typer.Option(
            help="Authorities that sign the scheduler's certificate (PEM); uses TLS.", rich_help_panel=PROTECTION
        ),
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(help="Own certificate (PEM), for --client-ca.", rich_help_panel=PROTECTION)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Key of the certificate.", rich_help_panel=PROTECTION)] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="HTTP port for Prometheus; 0: any.", rich_help_panel=PLACE)
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of that port.", rich_help_panel=PLACE)] = "127.0.0.1",
) -> None:
    """Report counters of a server or switch to `kvroute scheduler`, and keep its table in a file for the ranks.

    Without the scheduler the last table stays in use, and `received_unix_s` in it says how old it is. Prints one JSON
    line when it starts, {"agent": "server NAME", "version": number of the table in the folder, "metrics": "host:port"
    or null}, and runs until SIGTERM or SIGINT.

    Example: [bold]kvroute agent --scheduler 10.0.0.1:7400 --node node0 --token-file token[/bold]
    """
    check_installed()
    from kvroute_engine.agent.agent import Agent, Sources
    from kvroute_engine.agent.counters import Nic, PortCounters, default_nics
    from kvroute_engine.agent.security import Tls, read_token

    name = _name(node, switch, status_file)
    host, _, port = scheduler.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"{scheduler!r} is not an address", where="--scheduler", hint="write HOST:PORT")
    nics = tuple(Nic.parse(text) for text in nic) if nic else default_nics(sysfs) if name.kind == "server" else ()
    authorities = Tls.read(cert, key, ca, "--ca") or (Tls() if tls else None)
    if name.kind == "server":
        make_folder(folder, "--folder")
        check_writable(folder / "table.json", "--folder")
    sources = Sources(PortCounters(sysfs, nics), folder, dcgm, status_file, time.time_ns())
    made = Agent(name, scheduler, sources, say, read_token(token_file), authorities)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    asyncio.run(run_until_signal(_run(made, metrics)))


def _name(node: str | None, switch: str | None, status_file: Path | None) -> AgentName:
    from kvroute_engine.agent.reports import AgentName

    if (node is None) == (switch is None):
        raise InputError("an agent is that of one server or one switch", hint="give --node or --switch")
    if node is not None:
        return AgentName("server", node)
    if status_file is None:
        raise InputError("the slots of the switch are unknown", where="--switch", hint="give --status-file, too")
    return AgentName("switch", switch or "")


async def _run(agent: Agent, metrics: tuple[str, int] | None) -> None:
    from kvroute_engine.agent.metrics import MetricsServer, agent_metrics

    page = None if metrics is None else MetricsServer.start(*metrics, lambda: agent_metrics(agent))
    try:
        ready = {
            "agent": str(agent.name),
            "version": agent.held.version,
            "metrics": page.address if page is not None else None,
        }
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await agent.run()
    finally:
        if page is not None:
            page.close()
