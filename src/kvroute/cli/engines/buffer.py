"""`kvroute buffer`: the buffer server of a node, between the store of KV blocks and the engines."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.output import check_writable, remarks, write_whole
from kvroute.cli.quantities import DURATION, SIZE, byte_count, seconds
from kvroute.types import InputError
from kvroute_engine.origins import is_loopback

if TYPE_CHECKING:
    from kvroute_engine.buffer import BufferSettings
    from kvroute_engine.connector.options import Options

STORE, PLACE, PROTECTION = "Store", "Addresses", "Protection"


def buffer(
    store: Annotated[
        str,
        typer.Argument(
            help="A folder, redis://host:6379/0, or s3://bucket/prefix?endpoint=URL. All nodes use the same store.",
            show_default=False,
        ),
    ],
    quota: Annotated[
        int,
        typer.Option(
            parser=byte_count(1),
            metavar=SIZE,
            help="Host memory for blocks.",
            show_default="8 GB",
            rich_help_panel=STORE,
        ),
    ] = 8_000_000_000,
    lock_memory: Annotated[
        bool,
        typer.Option(
            "--lock-memory", help="Never swap this memory out; needs `ulimit -l` above it.", rich_help_panel=STORE
        ),
    ] = False,
    capacity: Annotated[
        int,
        typer.Option(
            parser=byte_count(1),
            metavar=SIZE,
            help="Capacity of a folder; the least recently used blocks are removed. Redis and S3 have their own.",
            show_default="100 GB",
            rich_help_panel=STORE,
        ),
    ] = 100_000_000_000,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare checksums of what is read.", rich_help_panel=STORE)
    ] = True,
    fsync: Annotated[
        bool,
        typer.Option("--fsync", help="Write through to the disk before a block is published.", rich_help_panel=STORE),
    ] = False,
    hold: Annotated[
        float,
        typer.Option(
            parser=seconds(0.001),
            metavar=DURATION,
            help="Time after which unfetched blocks are freed.",
            show_default="2 min",
            rich_help_panel=STORE,
        ),
    ] = 120.0,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=PLACE)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port for routers; 0: any.", rich_help_panel=PLACE)
    ] = 7200,
    data_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for engines; 0: any.", rich_help_panel=PLACE)
    ] = 7201,
    advertised_host: Annotated[
        str, typer.Option(help="Address that engines and routers use, if it is another one.", rich_help_panel=PLACE)
    ] = "",
    token_env: Annotated[
        str,
        typer.Option(
            help="Environment variable with the token that engines must prove (their option `token_env`).",
            rich_help_panel=PROTECTION,
        ),
    ] = "",
    dscp: Annotated[
        list[str] | None,
        typer.Option(
            help="DSCP code point of packets to engines, by traffic class, such as storage=12; repeat for several.",
            rich_help_panel=PROTECTION,
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write the ready line to this file instead of stdout.", rich_help_panel=PLACE),
    ] = None,
) -> None:
    """Read KV blocks from a store into this node's memory for the engines, and write the engines' blocks to it.

    Prints one JSON line when it is ready, {"url": `endpoint.buffer` in the cluster file, "data": the connector's option
    `buffer`}, and runs until SIGTERM or SIGINT.

    Example: [bold]kvroute buffer /var/lib/kvroute/blocks --quota 64GB[/bold]
    """
    from kvroute_engine.block_store.location import StoreLocation
    from kvroute_engine.connector.options import read_options

    try:
        import uvloop

        from kvroute_engine.buffer import BufferSettings
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    if ready_file is not None:
        check_writable(ready_file, "--ready-file")
    if not (token_env or is_loopback(host)):
        what = f"every client that reaches {host} could read the KV cache"
        raise InputError(what, where="--host", hint="give --token-env, and the engines the same token")
    options: Options = read_options(
        {
            "host": host,
            "port": data_port,
            "advertised_host": advertised_host,
            "token_env": token_env,
            "hold_s": hold,
            "dscp": _code_points(dscp or []),
        },
        where="kvroute buffer",
    )
    location = StoreLocation(store, capacity, verify=verify, fsync=fsync)
    settings = BufferSettings(
        location=location, quota_bytes=quota, lock_memory=lock_memory, host=host, port=port, options=options
    )
    uvloop.run(_run(settings, ready_file))


def _code_points(texts: list[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name or not number.isdecimal() or int(number) > 63:
            raise InputError(
                f"{text!r} is no code point", where="--dscp", hint="write class=number, such as storage=12"
            )
        found[name] = int(number)
    return found


async def _run(settings: BufferSettings, ready_file: Path | None) -> None:
    from kvroute_engine.buffer import BufferServer

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = BufferServer(settings)
    try:
        await server.start()
        line = msgspec.json.encode({"url": server.url, "data": server.data}).decode()
        if ready_file is None:
            typer.echo(line)
        else:
            write_whole(ready_file, line + "\n", "--ready-file")
        remarks().print(f"the buffer server for {settings.location.text} is ready; press Ctrl-C to stop it")
        await stop.wait()
    finally:
        await server.close()
