"""`kvroute emulate`: a cluster of engines without GPUs for trying a gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.output import check_writable, remarks, write_whole
from kvroute.cli.quantities import DURATION, listed, seconds
from kvroute.types import TIER_COUNT, InputError
from kvroute_engine.origins import is_loopback

if TYPE_CHECKING:
    from kvroute.emulator import EmulatedClusterSpec
    from kvroute.topology import Cluster

STORE_BYTES = 100_000_000_000
"""Capacity of a store in a folder."""
ENGINE, NETWORK, PLACE = "Engines", "Network", "Addresses"


def emulate(
    cluster: Annotated[Path, typer.Argument(help="Cluster file (YAML), see `kvroute topology`.", show_default=False)],
    instance: Annotated[
        list[str] | None,
        typer.Option(
            "--instance", help="Emulate only this instance; repeat for several. Default: all.", rich_help_panel=PLACE
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=PLACE)] = "127.0.0.1",
    endpoints_from_file: Annotated[
        bool,
        typer.Option("--endpoints-from-file", help="Listen on the endpoints in the file.", rich_help_panel=PLACE),
    ] = False,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write the ready line to this file instead of stdout.", rich_help_panel=PLACE),
    ] = None,
    kv_scale: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Real bytes per modelled byte of KV; times are not scaled.", rich_help_panel=NETWORK
        ),
    ] = 1e-3,
    background: Annotated[
        str,
        typer.Option(
            help="Share of link capacity that other traffic uses: one for tiers 1 to 4, or five for tiers 0 to 4.",
            rich_help_panel=NETWORK,
        ),
    ] = "0",
    store: Annotated[
        str,
        typer.Option(
            help="Use a real block store: a folder, redis://host:6379/0, or s3://bucket/prefix?endpoint=URL. "
            "Reads then take the time of this machine's network instead of the storage NICs'.",
            rich_help_panel=NETWORK,
        ),
    ] = "",
    kv_events: Annotated[
        bool, typer.Option("--kv-events/--no-kv-events", help="Publish KV events over ZMQ.", rich_help_panel=ENGINE)
    ] = True,
    kv_expiry: Annotated[
        float,
        typer.Option(
            parser=seconds(0.001),
            metavar=DURATION,
            help="Time after which unfetched KV is discarded.",
            show_default="8 min",
            rich_help_panel=ENGINE,
        ),
    ] = 480.0,
    block_tokens: Annotated[
        int, typer.Option(min=1, max=65_536, help="Tokens per KV block.", rich_help_panel=ENGINE)
    ] = 16,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of path draws and injected faults.", rich_help_panel=ENGINE)
    ] = 0,
    until_eof: Annotated[
        bool, typer.Option("--until-eof", help="Exit when standard input is closed, e.g. when the parent process ends.")
    ] = False,
) -> None:
    """Run emulated engines without GPUs: vLLM's HTTP API, metrics and KV events, with the simulator's times.

    Prints one JSON line when all are ready, {"instances": {name: {"url", "kv_events", "kv_replay", ...}}}, and runs
    until SIGTERM or SIGINT.

    Example: [bold]kvroute emulate examples/small.yaml[/bold]
    """
    from kvroute import topology
    from kvroute_engine.block_store.location import StoreLocation

    try:
        import uvloop

        from kvroute.emulator import EmulatedClusterSpec
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    if ready_file is not None:
        check_writable(ready_file, "--ready-file")
    settings = EmulatedClusterSpec(
        host=host,
        kv_scale=kv_scale,
        block_tokens=block_tokens,
        kv_events=kv_events,
        kv_expiry_s=kv_expiry,
        background=shares_by_tier(background),
        endpoints_from_file=endpoints_from_file,
        seed=seed,
        store=StoreLocation(store, STORE_BYTES) if store else None,
    )
    uvloop.run(_run(topology.load(cluster), settings, listed(instance), ready_file, until_eof))


def shares_by_tier(text: str) -> tuple[float, ...]:
    """Parse the shares of `--background` by tier; raises InputError if the text is invalid."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    for share in shares:
        if not 0 <= share < 1:
            raise InputError(
                f"{share:g} is not a valid share", where="--background", hint="use 0 or more and less than 1"
            )
    if len(shares) == 1:
        return (0.0,) + shares * (TIER_COUNT - 1)
    if len(shares) != TIER_COUNT:
        hint = f"give one number, or {TIER_COUNT} numbers separated by commas"
        raise InputError(f"{text!r} is not a valid list of shares by tier", where="--background", hint=hint)
    return shares


async def _run(
    cluster: Cluster, settings: EmulatedClusterSpec, names: list[str], ready_file: Path | None, until_eof: bool
) -> None:
    from kvroute.emulator import EmulatedCluster

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        loop.add_reader(sys.stdin.fileno(), _read_on, stop)
    async with EmulatedCluster(cluster, settings, names) as fleet:
        line = msgspec.json.encode(fleet.ready()).decode()
        if ready_file is None:
            typer.echo(line)
        else:
            write_whole(ready_file, line + "\n", "--ready-file")
        how = "" if until_eof else "; press Ctrl-C to stop them"
        beyond = sorted({server.host for server in fleet.servers.values() if not is_loopback(server.host)})
        if beyond:
            what = f"warning: every machine that reaches {', '.join(beyond)} can make these engines fail or restart"
            remarks().print(what, style="yellow", markup=False, highlight=False, soft_wrap=True)
        remarks().print(f"{len(fleet.servers)} emulated engines of {cluster.name} are ready{how}")
        await stop.wait()


def _read_on(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stop.set()
