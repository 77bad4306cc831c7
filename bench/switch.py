"""Packets per second and CPU per packet of `kvroute switch`, compared with a UDP echo of the same packets.

`python -m bench.switch`. The switch and the echo are processes of their own, the ranks are threads of a third one. The
echo answers every packet as it is: the bound of any Python server of one packet at a time. All are on the loopback
interface, so these figures say nothing about networks.
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
from bench.measurement import Row, fresh, median, show

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
    from kvroute.switch import AggregationClient

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
                octets = bytes(1_052)
                before_s, start_s = _cpu_s(process.pid), time.perf_counter()
                for _ in range(32):
                    client.send(octets)
                for number in range(packets):
                    client.recv(2_048)
                    if number < packets - 32:
                        client.send(octets)
                seconds, cpu_s = time.perf_counter() - start_s, _cpu_s(process.pid) - before_s
        finally:
            process.terminate()
    return _figures(packets, seconds, cpu_s)


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
    return found


def main() -> None:
    """Print the rows, or the figures of one process for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="fresh processes")
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(switch_figures(*given.one)))
    elif given.echo:
        print(json.dumps(echo_figures(given.echo)))
    else:
        show(rows(given.repeats), given.json)


if __name__ == "__main__":
    main()
