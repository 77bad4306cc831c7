"""`buffer`: the buffer server of a node, between the store of KV blocks and the engines."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvroute_engine.command.options import CommandSpec, OptionSpec
from kvroute_engine.command.output import check_writable, tell, write_whole
from kvroute_engine.errors import InputError
from kvroute_engine.origins import is_loopback

if TYPE_CHECKING:
    from kvroute_engine.buffer import BufferSpec

_STORE, _PLACE, _PROTECTION = "Store", "Addresses", "Protection"


def _run(
    store: str,
    quota: int,
    lock_memory: bool,
    capacity: int,
    verify: bool,
    fsync: bool,
    hold: float,
    host: str,
    port: int,
    data_port: int,
    advertised_host: str,
    token_env: str,
    dscp: list[str] | None,
    ready_file: Path | None,
) -> None:
    try:
        from kvroute_engine.block_store.location import StoreLocation
        from kvroute_engine.buffer import BufferSpec
        from kvroute_engine.connector.options import read_options
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute-engine[buffer]'") from None
    if ready_file is not None:
        check_writable(ready_file, "--ready-file")
    if not (token_env or is_loopback(host)):
        what = f"every client that reaches {host} could read the KV cache"
        raise InputError(what, where="--host", hint="give --token-env, and the engines the same token")
    options = read_options(
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
    settings = BufferSpec(
        location=location, quota_bytes=quota, lock_memory=lock_memory, host=host, port=port, options=options
    )
    serving = _serve(settings, ready_file)
    try:
        import uvloop
    except ImportError:  # only faster
        asyncio.run(serving)
    else:
        uvloop.run(serving)


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


async def _serve(settings: BufferSpec, ready_file: Path | None) -> None:
    from kvroute_engine.buffer import BufferServer

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = BufferServer(settings)
    try:
        await server.start()
        line = msgspec.json.encode({"url": server.url, "data": server.data}).decode()
        if ready_file is None:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        else:
            write_whole(ready_file, line + "\n", "--ready-file")
        tell([f"the buffer server for {settings.location.text} is ready; press Ctrl-C to stop it"])
        await stop.wait()
    finally:
        await server.close()


BUFFER = CommandSpec(
    name="buffer",
    about="""Read KV blocks from a store into this node's memory for the engines, and write the engines' blocks to it.

Prints one JSON line when it is ready, {"url": `endpoint.buffer` in the cluster file, "data": the connector's option
`buffer`}, and runs until SIGTERM or SIGINT.""",
    example="kvroute buffer /var/lib/kvroute/blocks --quota 64GB",
    run=_run,
    options=(
        OptionSpec(
            name="store",
            kind="text",
            positional=True,
            help="A folder, redis://host:6379/0, or s3://bucket/prefix?endpoint=URL. All nodes use the same store.",
        ),
        OptionSpec(
            name="quota",
            kind="size",
            least=1,
            default=8_000_000_000,
            shown="8 GB",
            panel=_STORE,
            help="Host memory for blocks.",
        ),
        OptionSpec(
            name="lock_memory",
            kind="flag",
            panel=_STORE,
            help="Never swap this memory out; needs `ulimit -l` above it.",
        ),
        OptionSpec(
            name="capacity",
            kind="size",
            least=1,
            default=100_000_000_000,
            shown="100 GB",
            panel=_STORE,
            help="Capacity of a folder; the least recently used blocks are removed. Redis and S3 have their own.",
        ),
        OptionSpec(
            name="verify",
            kind="flag",
            default=True,
            negatable=True,
            panel=_STORE,
            help="Compare checksums of what is read.",
        ),
        OptionSpec(
            name="fsync", kind="flag", panel=_STORE, help="Write through to the disk before a block is published."
        ),
        OptionSpec(
            name="hold",
            kind="duration",
            least=0.001,
            default=120.0,
            shown="2 min",
            panel=_STORE,
            help="Time after which unfetched blocks are freed.",
        ),
        OptionSpec(name="host", kind="text", default="127.0.0.1", panel=_PLACE, help="Address to listen on."),
        OptionSpec(
            name="port",
            kind="whole number",
            most=65535,
            default=7200,
            panel=_PLACE,
            help="HTTP port for routers; 0: any.",
        ),
        OptionSpec(
            name="data_port",
            kind="whole number",
            most=65535,
            default=7201,
            panel=_PLACE,
            help="Port for engines; 0: any.",
        ),
        OptionSpec(
            name="advertised_host",
            kind="text",
            default="",
            panel=_PLACE,
            help="Address that engines and routers use, if it is another one.",
        ),
        OptionSpec(
            name="token_env",
            kind="text",
            default="",
            panel=_PROTECTION,
            help="Environment variable with the token that engines must prove (their option `token_env`).",
        ),
        OptionSpec(
            name="dscp",
            kind="text",
            many=True,
            panel=_PROTECTION,
            help="DSCP code point of packets to engines, by traffic class, such as storage=12; repeat for several.",
        ),
        OptionSpec(
            name="ready_file",
            kind="path",
            panel=_PLACE,
            help="Write the ready line to this file instead of stdout.",
        ),
    ),
)
