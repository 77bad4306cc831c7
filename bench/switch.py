"""Packets per second and CPU per packet of `kvroute switch`, compared with a UDP echo of the same packets.

`python -m bench.switch`. The switch and the echo are processes of their own, the ranks are threads of a third one. The
echo answers every packet as it is: the bound of any Python server of one packet at a time. All are on the loopback
interface, so these figures say nothing about networks.

As root, with clang and libbpf, it also measures the kernel's data plane: CPU per packet from runs of the XDP program on
frames in memory, and packets per second of both data planes between network namespaces, whose ranks are in Python.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from bench.all_reduce.frames import frame, veth_peers
from bench.all_reduce.star import PORT, star, start, switch, xdp
from bench.measurement import Row, fresh, median, show

from kvroute.types import InputError

RANKS = (2, 4)
VALUES = 256 * 1024
"""1 MB of int32 in each all-reduce."""
ROUNDS, REPEATS = 5, 3
_ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 2**20)
server.bind(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    packet, source = server.recvfrom(2048)
    server.sendto(packet, source)
"""


def switch_figures(ranks: int, rounds: int) -> dict[str, float]:
    """Reduce `rounds` tensors on `ranks` threads; return packets per second and CPU per packet of the switch."""
    from kvroute_engine.switch import AggregationClient

    command = [sys.executable, "-m", "kvroute.cli.app", "switch", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            host, _, port = json.loads(process.stdout.readline())["address"].rpartition(":")

            def rank(number: int) -> None:
                tensor = np.full(VALUES, number, np.int32)
                with AggregationClient((host, int(port)), 1, number, ranks, timeout_s=120.0) as client:
                    for _ in range(rounds):
                        assert client.all_reduce(tensor)[0] == ranks * (ranks - 1) // 2

            before_s, start_s = _cpu_s(process.pid), time.perf_counter()
            with ThreadPoolExecutor(ranks) as pool:
                list(pool.map(rank, range(ranks)))
            seconds, cpu_s = time.perf_counter() - start_s, _cpu_s(process.pid) - before_s
        finally:
            process.terminate()
    return _figures(rounds * ranks * VALUES // 256, seconds, cpu_s)


def echo_figures(packets: int) -> dict[str, float]:
    """Send packets of the same size to an echo, 32 under way; return the same figures."""
    with subprocess.Popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.connect(("127.0.0.1", port))
                client.settimeout(1.0)
                content = bytes(1_052)
                before_s, start_s = _cpu_s(process.pid), time.perf_counter()
                for _ in range(32):
                    client.send(content)
                for number in range(packets):
                    client.recv(2_048)
                    if number < packets - 32:
                        client.send(content)
                seconds, cpu_s = time.perf_counter() - start_s, _cpu_s(process.pid) - before_s
        finally:
            process.terminate()
    return _figures(packets, seconds, cpu_s)


def kernel_figures(ranks: int, chunks: int) -> dict[str, float]:
    """Run the XDP program on the packets of `chunks` chunks; return its mean CPU time per packet."""
    from kvroute.testbed import namespaces
    from kvroute_engine.switch.wire import CHUNK_VALUES, Data, PacketKind, Reduction, encode
    from kvroute_engine.switch.xdp import XdpOffload

    slots, values = 128, np.ones(CHUNK_VALUES, np.int32)
    with namespaces.nameless():
        peers = veth_peers(ranks)
        offload = XdpOffload([f"p{rank}" for rank in range(ranks)], slots, PORT)
        try:
            assert offload.begin(1, 1, slots, peers)
            seconds = []
            for chunk in range(chunks):
                slot, version = chunk % slots, chunk // slots % 2
                for rank, peer in enumerate(peers):
                    packet = Data(PacketKind.DATA, 1, 1, rank, ranks, slot, version, Reduction.SUM, chunk, values)
                    seconds.append(offload.program.run("aggregate", frame(peer, encode(packet)), peer.interface)[2])
            assert offload.results == chunks
        finally:
            offload.close()
    return {"cpu_us": 1e6 * sum(seconds) / len(seconds)}


def plane_figures(ranks: int, rounds: int, in_kernel: bool) -> dict[str, float]:
    """Reduce `rounds` tensors between network namespaces; return packets per second of one data plane."""
    with star(ranks) as found, switch(found, *(xdp(found) if in_kernel else ())) as (_, plane):
        assert plane == ("xdp" if in_kernel else "python")
        group = []
        for rank in range(ranks):
            words = ("--rank", f"{found.switch_address(rank)}:{PORT}", rank, ranks, rounds)
            group.append(start(found.host(rank), "-m", "bench.switch", *map(str, words)))
        seconds = [json.loads(process.communicate(timeout=300)[0])["s"] for process in group]
    return {"packets_per_s": rounds * ranks * VALUES // 256 / max(seconds)}


def rank_seconds(switch_address: str, rank: int, ranks: int, rounds: int) -> dict[str, float]:
    """Reduce `rounds` tensors after a first one, and return the time."""
    from kvroute_engine.switch import AggregationClient

    host, _, port = switch_address.rpartition(":")
    tensor = np.full(VALUES, rank, np.int32)
    with AggregationClient((host, int(port)), 1, rank, ranks, timeout_s=120.0) as client:
        client.all_reduce(tensor)
        began = time.perf_counter()
        for _ in range(rounds):
            client.all_reduce(tensor)
        return {"s": time.perf_counter() - began}


def _figures(packets: int, seconds: float, cpu_s: float) -> dict[str, float]:
    return {"packets_per_s": packets / seconds, "cpu_us": 1e6 * cpu_s / packets}


def _cpu_s(process: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def rows(repeats: int) -> list[Row]:
    """Return medians over fresh processes, the echo and the switch in turn."""
    found = []
    for ranks in RANKS:
        packets = ROUNDS * ranks * VALUES // 256
        ours: list[Any] = []
        echo: list[Any] = []
        for _ in range(repeats):
            ours.append(fresh("bench.switch", "--one", ranks, ROUNDS))
            echo.append(fresh("bench.switch", "--echo", packets))
        for field, unit, better in (("packets_per_s", "packets/s", "higher"), ("cpu_us", "us CPU per packet", "lower")):
            row = Row(
                measure=f"software switch, {ranks} ranks, 1 MB tensors",
                unit=unit,
                better="higher" if better == "higher" else "lower",
                ours=median(ours, field),
                peer=median(echo, field),
                peer_name="UDP echo",
            )
            found.append(row)
    return found + kernel_rows(repeats)


def kernel_rows(repeats: int) -> list[Row]:
    """Return the medians of the kernel's data plane; none if this machine cannot run it."""
    try:
        kernel = [kernel_figures(RANKS[0], 2_000) for _ in range(repeats)]
    except InputError as error:
        print(f"without the kernel's data plane: {error}", file=sys.stderr)
        return []
    python = [fresh("bench.switch", "--one", RANKS[0], ROUNDS) for _ in range(repeats)]
    found = [
        Row(
            measure=f"switch in the kernel, {RANKS[0]} ranks, 1 MB tensors",
            unit="us CPU per packet",
            better="lower",
            ours=median(kernel, "cpu_us"),
            peer=median(python, "cpu_us"),
            peer_name="switch in Python",
        )
    ]
    for ranks in RANKS:
        planes = [[plane_figures(ranks, ROUNDS, in_kernel) for in_kernel in (True, False)] for _ in range(repeats)]
        row = Row(
            measure=f"switch in the kernel, {ranks} ranks, 1 MB tensors",
            unit="packets/s",
            better="higher",
            ours=median([plane[0] for plane in planes], "packets_per_s"),
            peer=median([plane[1] for plane in planes], "packets_per_s"),
            peer_name="switch in Python",
        )
        found.append(row)
    return found


def main() -> None:
    """Print the rows, or the figures of one process for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="fresh processes")
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(switch_figures(*given.one)))
    elif given.rank:
        address, *numbers = given.rank
        print(json.dumps(rank_seconds(address, *map(int, numbers))))
    elif given.echo:
        print(json.dumps(echo_figures(given.echo)))
    else:
        show(rows(given.repeats), given.json)


if __name__ == "__main__":
    main()
