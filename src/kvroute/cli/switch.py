"""`kvroute switch`: a switch that sums the tensors of tensor-parallel groups, as a UDP server."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import msgspec
import typer

from kvroute.cli.output import remarks
from kvroute.types import InputError


def switch(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="UDP port; 0: any.")] = 7300,
    slots: Annotated[
        int, typer.Option(min=1, max=65535, help="Packets that are summed at the same time, for all groups together.")
    ] = 1024,
) -> None:
    """Sum the tensors of tensor-parallel groups in software (in-network aggregation, SwitchML's protocol).

    Prints one JSON line when it is ready, {"address": "host:port"}, and runs until SIGTERM or SIGINT; then it prints
    how many packets and chunks it has processed. Packets have no authentication: use it in a network that you trust.

    Example: [bold]kvroute switch --host 10.0.0.1 --slots 4096[/bold]
    """
    from kvroute.switch.udp import UdpSwitch  # its import of numpy takes a moment

    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    server = UdpSwitch(host, port, slots)
    try:
        bound, number = server.address
        sys.stdout.write(msgspec.json.encode({"address": f"{bound}:{number}"}).decode() + "\n")
        sys.stdout.flush()
        server.serve(lambda: stopped)
    except OSError as error:
        raise InputError(f"the socket failed: {error.strerror}", where="kvroute switch") from error
    finally:
        server.close()
    done = server.aggregator
    remarks().print(f"{done.packets:,} packets, {done.results:,} chunks, {done.malformed:,} malformed")
