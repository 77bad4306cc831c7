"""`agent`: the agent of a server or switch, between the scheduler of all-reduce schemes and the ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvroute_engine.agent.reports import AgentName
from kvroute_engine.command.options import CommandSpec, OptionSpec
from kvroute_engine.command.output import check_writable, make_folder, tell
from kvroute_engine.errors import InputError

if TYPE_CHECKING:
    from kvroute_engine.agent.agent import Agent

_WHO, _COUNTERS, _PLACE, _PROTECTION = "Name", "Counters", "Addresses", "Protection"


def check_installed() -> None:
    """Raise an InputError if the packages of the extra `agents` are missing."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print causes beside our sentences
    try:
        import kvroute_engine.agent.metrics  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute-engine[agents]'") from None


def say(line: str) -> None:
    """Print a line on stderr at once."""
    tell([line])


async def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run until SIGTERM, SIGINT, or an error of the work."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


def _run(
    scheduler: str,
    node: str | None,
    switch: str | None,
    folder: Path,
    nic: list[str] | None,
    dcgm: str,
    status_file: Path | None,
    sysfs: Path,
    token_file: Path | None,
    tls: bool,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    metrics_port: int | None,
    metrics_host: str,
) -> None:
    check_installed()
    from kvroute_engine.agent.agent import Agent, Sources
    from kvroute_engine.agent.counters import PortCounters, WatchedNic, default_nics
    from kvroute_engine.agent.security import Tls, read_token

    name = _name(node, switch, status_file)
    host, _, port = scheduler.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"{scheduler!r} is not an address", where="--scheduler", hint="write HOST:PORT")
    nics = (
        tuple(WatchedNic.parse(text) for text in nic) if nic else default_nics(sysfs) if name.kind == "server" else ()
    )
    authorities = Tls.read(cert, key, ca, "--ca") or (Tls() if tls else None)
    if name.kind == "server":
        make_folder(folder, "--folder")
        check_writable(folder / "table.json", "--folder")
    sources = Sources(PortCounters(sysfs, nics), folder, dcgm, status_file, time.time_ns())
    made = Agent(name, scheduler, sources, say, read_token(token_file), authorities)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    asyncio.run(run_until_signal(_serve(made, metrics)))


def _name(node: str | None, switch: str | None, status_file: Path | None) -> AgentName:
    if (node is None) == (switch is None):
        raise InputError("an agent is that of one server or one switch", hint="give --node or --switch")
    if node is not None:
        return AgentName("server", node)
    if status_file is None:
        raise InputError("the slots of the switch are unknown", where="--switch", hint="give --status-file, too")
    return AgentName("switch", switch or "")


async def _serve(agent: Agent, metrics: tuple[str, int] | None) -> None:
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


AGENT = CommandSpec(
    name="agent",
    about="""Report counters of a server or switch to `kvroute scheduler`, and keep its table in a file for the ranks.

Without the scheduler the last table stays in use, and `received_unix_s` in it says how old it is. Prints one JSON line
when it starts, {"agent": "server NAME", "version": number of the table in the folder, "metrics": "host:port" or null},
and runs until SIGTERM or SIGINT.""",
    example="kvroute agent --scheduler 10.0.0.1:7400 --node node0 --token-file token",
    run=_run,
    options=(
        OptionSpec(name="scheduler", kind="text", required=True, metavar="HOST:PORT", help="Address of the scheduler."),
        OptionSpec(name="node", kind="text", panel=_WHO, help="Node of the cluster file that this server is."),
        OptionSpec(
            name="switch",
            kind="text",
            panel=_WHO,
            help="Rack, pod or datacenter whose switch this is; needs --status-file.",
        ),
        OptionSpec(
            name="folder",
            kind="path",
            default=Path("/run/kvroute"),
            panel=_PLACE,
            help="Folder for the table and for the files of the ranks; a switch needs none.",
        ),
        OptionSpec(
            name="nic",
            kind="text",
            many=True,
            metavar="DEVICE=PORT",
            panel=_COUNTERS,
            help="Interface or RDMA device of a port: number of the NIC in the cluster file, of a switch number of the "
            "uplink. Repeat for each; default: all interfaces with hardware, by name.",
        ),
        OptionSpec(
            name="dcgm",
            kind="text",
            default="",
            metavar="URL",
            panel=_COUNTERS,
            help="Page of dcgm-exporter, for NVLink.",
        ),
        OptionSpec(
            name="status_file",
            kind="path",
            panel=_COUNTERS,
            help="--status-file of `kvroute switch` on this machine.",
        ),
        OptionSpec(
            name="sysfs", kind="path", default=Path("/sys"), panel=_COUNTERS, help="Folder where sysfs is mounted."
        ),
        OptionSpec(name="token_file", kind="path", panel=_PROTECTION, help="File with the scheduler's token."),
        OptionSpec(name="tls", kind="flag", panel=_PROTECTION, help="Use TLS with the system's authorities."),
        OptionSpec(
            name="ca",
            kind="path",
            panel=_PROTECTION,
            help="Authorities that sign the scheduler's certificate (PEM); uses TLS.",
        ),
        OptionSpec(name="cert", kind="path", panel=_PROTECTION, help="Own certificate (PEM), for --client-ca."),
        OptionSpec(name="key", kind="path", panel=_PROTECTION, help="Key of the certificate."),
        OptionSpec(
            name="metrics_port",
            kind="whole number",
            most=65535,
            panel=_PLACE,
            help="HTTP port for Prometheus; 0: any.",
        ),
        OptionSpec(name="metrics_host", kind="text", default="127.0.0.1", panel=_PLACE, help="Address of that port."),
    ),
)
