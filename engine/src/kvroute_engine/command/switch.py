"""`switch`: a switch that sums the tensors of tensor-parallel groups, as a UDP server."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvroute_engine.command.options import CommandSpec, OptionSpec
from kvroute_engine.command.output import check_writable, tell
from kvroute_engine.errors import InputError

if TYPE_CHECKING:
    from kvroute_engine.switch.udp import UdpSwitch


def _run(host: str, port: int, slots: int, interface: list[str] | None, status_file: Path | None) -> None:
    from kvroute_engine.switch.udp import UdpSwitch  # its import of numpy takes a moment

    if status_file is not None:
        check_writable(status_file, "--status-file")
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server = UdpSwitch(host, port, slots)
    try:
        if interface:
            _offload(server, [name for text in interface for part in text.split(",") if (name := part.strip())])
        bound, listening = server.address
        ready = {"address": f"{bound}:{listening}", "data_plane": server.status().data_plane}
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
    tell([f"{packets:,} packets, {results:,} chunks, {server.aggregator.malformed:,} malformed"])


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
        tell([f"warning: {error}; the switch sums the packets in Python"])


SWITCH = CommandSpec(
    name="switch",
    about="""Sum the tensors of tensor-parallel groups in software (in-network aggregation, SwitchML's protocol).

Prints one JSON line when it is ready, {"address": "host:port", "data_plane": "python" or "xdp"}, and runs until SIGTERM
or SIGINT; then it prints how many packets and chunks it has processed. Packets have no authentication: use it in a
network that you trust. With --interface it needs root, clang and libbpf; without them it warns and sums the packets
itself.""",
    example="kvroute switch --host 10.0.0.1 --slots 4096",
    run=_run,
    options=(
        OptionSpec(name="host", kind="text", default="127.0.0.1", help="Address to listen on."),
        OptionSpec(name="port", kind="whole number", most=65535, default=7300, help="UDP port; 0: any."),
        OptionSpec(
            name="slots",
            kind="whole number",
            least=1,
            most=65535,
            default=1024,
            help="Packets that are summed at the same time, for all groups together.",
        ),
        OptionSpec(
            name="interface",
            kind="text",
            many=True,
            help="Interface where workers are; the kernel sums their packets (XDP). Repeat for each.",
        ),
        OptionSpec(
            name="status_file",
            kind="path",
            help="Write slots and counters to this file as JSON once a second, for `kvroute agent --switch`.",
        ),
    ),
)
