"""`kvroute switch`: a switch that sums the tensors of tensor-parallel groups, as a UDP server."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.output import check_writable, remarks
from kvroute.cli.quantities import listed
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute_engine.switch.udp import UdpSwitch


def switch(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="UDP port; 0: any.")] = 7300,
    slots: Annotated[
        int, typer.Option(min=1, max=65535, help="Packets that are summed at the same time, for all groups together.")
    ] = 1024,
    interface: Annotated[
        list[str] | None,
        typer.Option(help="Interface where workers are; the kernel sums their packets (XDP). Repeat for each."),
    ] = None,
    status_file: Annotated[
        Path | None,
        typer.Option(help="Write slots and counters to this file as JSON once a second, for `kvroute agent --switch`."),
    ] = None,
) -> None:
    """Sum the tensors of tensor-parallel groups in software (in-network aggregation, SwitchML's protocol).

    Prints one JSON line when it is ready, {"address": "host:port", "data_plane": "python" or "xdp"}, and runs until
    SIGTERM or SIGINT; then it prints how many packets and chunks it has processed. Packets have no authentication: use
    it in a network that you trust.
    With --interface it needs root, clang and libbpf; without them it warns and sums the packets itself.

    Example: [bold]kvroute switch --host 10.0.0.1 --slots 4096[/bold]
    """
    from kvroute_engine.switch.udp import UdpSwitch  # its import of numpy takes a moment

    if status_file is not None:
        check_writable(status_file, "--status-file")
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    server = UdpSwitch(host, port, slots)
    try:
        if interface:
            _offload(server, listed(interface))
        bound, number = server.address
        ready = {"address": f"{bound}:{number}", "data_plane": server.status().data_plane}
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        server.serve(lambda: stopped, lambda: _write(status_file, server))
        packets, results = server.counts()
    except OSError as error:
        raise InputError(f"the socket failed: {error.strerror}", where="kvroute switch") from error
    finally:
        server.close()
        if status_file is not None:
            status_file.unlink(missing_ok=True)
    remarks().print(f"{packets:,} packets, {results:,} chunks, {server.aggregator.malformed:,} malformed")


def _write(status_file: Path | None, server: UdpSwitch) -> None:
    """Write the status; without room on the disk the file grows old, and readers take the switch for absent."""
    from kvroute_engine.switch.status import write_status

    if status_file is not None:
        with suppress(OSError):
            write_status(status_file, server.status())


def _offload(server: UdpSwitch, interfaces: list[str]) -> None:
    """Use the kernel's data plane if it is available; else warn."""
    from kvroute_engine.switch.xdp import XdpUnavailable

    try:
        server.offload(interfaces)
    except XdpUnavailable as error:
        what = f"warning: {error}; the switch sums the packets in Python"
        remarks().print(what, style="yellow", markup=False, highlight=False, soft_wrap=True)
