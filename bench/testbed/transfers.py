"""Transfers over a testbed in real time: durations with the kernel's TCP, compared with the cost model.

`python -m bench.testbed.transfers` (root). A child process builds one testbed and sends transfers between its hosts.
Sizes are log-normal and starts are Poisson; each uses a fresh connection opened by the receiver, as engines do. Each is
compared with two predictions. `simulated` is the fluid model over all transfers with their true starts and paths.
`foreseen` is the what-if at the start of the transfer, which includes running transfers but no later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import selectors
import signal
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from bench.measurement import ROOT, Failed, Row, fresh, show
from bench.testbed.kernel_paths import KernelPaths

from kvroute import topology
from kvroute.flows import FlowNetwork, slow_start_s
from kvroute.testbed import Build, NamedTestbed, Testbed, namespaces
from kvroute.testbed.namespaces import Unavailable, inside
from kvroute.testbed.processes import cpu_s
from kvroute.testbed.queues import Discipline
from kvroute.testbed.wiring import Host
from kvroute.types import TIER_COUNT

LITERAL = ROOT / "examples" / "testbed-literal.yaml"
FIRST_PORT = 20_000
WITHIN = 0.10
PATIENCE_S = 90.0
BASE_RTT_S = 1e-4
"""Round-trip time of an idle testbed without delay lines, measured by `ping`; the cost model does not include it."""
_ZEROS = memoryview(bytes(1 << 18))


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer to send; times in seconds since the start of the run."""

    start_s: float
    nbytes: int
    source: Host
    target: Host
    receiver: socket.socket
    path: list[int]
    began_s: float = 0.0
    left_bytes: int = 0
    """Bytes that the sender has not yet written."""
    got_bytes: int = 0
    ended_s: float | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one testbed's transfers; an error is predicted over measured duration, minus 1."""

    simulated: list[float]
    foreseen: list[float]
    without_slow_start: list[float]
    """Like `simulated`, with connections that start at full speed."""
    nbytes: list[int]
    took_s: list[float]
    lost: int
    """Number of transfers that did not end."""
    cpu_share: float
    """Share of the machine's cores used by this process and the testbed."""
    machine_share: float
    """Share of the machine's cores in use by all processes."""


def transfers(testbed: Testbed, count: int, rate_per_s: float, median_bytes: float, sigma: float) -> list[Transfer]:
    """Draw transfers from the testbed's seed, between hosts of different nodes; receivers are bound, not connected."""
    draw, paths, made = random.Random(testbed.build.seed), KernelPaths(testbed), list[Transfer]()
    hosts, at_s = testbed.wiring.hosts, 0.0
    for number in range(count):
        at_s += draw.expovariate(rate_per_s)
        source = draw.choice(hosts)
        target = draw.choice([host for host in hosts if host.node != source.node])
        nbytes = max(int(draw.lognormvariate(np.log(median_bytes), sigma)), 1000)
        with inside(testbed.run.namespace(target.name)):
            receiver = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        port = FIRST_PORT + 1 + number
        receiver.bind((str(target.address), port))
        path = paths.of(source, target, FIRST_PORT, port)
        made.append(Transfer(at_s, nbytes, source, target, receiver, path, left_bytes=nbytes))
    return made


def send(testbed: Testbed, planned: Sequence[Transfer]) -> None:
    """Send all transfers at their times; return when the last one has ended, or after a time limit."""
    selector, listeners = selectors.DefaultSelector(), []
    for host in testbed.wiring.hosts:
        with inside(testbed.run.namespace(host.name)):
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(host.address), FIRST_PORT))
        listener.listen(128)
        selector.register(listener, selectors.EVENT_READ, None)
        listeners.append(listener)
    by_port = {FIRST_PORT + 1 + number: transfer for number, transfer in enumerate(planned)}
    waiting, in_flight, started = list(reversed(planned)), 0, time.monotonic()
    buffer, last_s = bytearray(1 << 18), planned[-1].start_s + PATIENCE_S
    while (waiting or in_flight) and (now := time.monotonic() - started) < last_s:
        while waiting and waiting[-1].start_s <= now:
            transfer = waiting.pop()
            transfer.began_s, in_flight = time.monotonic() - started, in_flight + 1
            transfer.receiver.connect_ex((str(transfer.source.address), FIRST_PORT))
            selector.register(transfer.receiver, selectors.EVENT_READ, transfer)
        timeout_s = waiting[-1].start_s - now if waiting else last_s - now
        for key, _ in selector.select(max(timeout_s, 0.0)):
            match key.data:
                case None:
                    sender, (_, port) = key.fileobj.accept()  # type: ignore[union-attr]
                    sender.setblocking(False)
                    selector.register(sender, selectors.EVENT_WRITE, (sender, by_port[port]))
                case (sender, transfer):
                    transfer.left_bytes -= sender.send(_ZEROS[: transfer.left_bytes])
                    if not transfer.left_bytes:
                        selector.unregister(sender)
                        sender.close()
                case transfer:
                    count = transfer.receiver.recv_into(buffer, len(buffer), socket.MSG_TRUNC)
                    transfer.got_bytes += count
                    if transfer.got_bytes == transfer.nbytes:
                        transfer.ended_s, in_flight = time.monotonic() - started, in_flight - 1
                    if not count or transfer.ended_s is not None:
                        selector.unregister(transfer.receiver)
                        transfer.receiver.close()
    for listener in listeners:
        listener.close()
    for key in list(selector.get_map().values()):
        if key.data is not None:
            key.fileobj.close()  # type: ignore[union-attr]
    selector.close()


def network_of(testbed: Testbed) -> FlowNetwork:
    """Return the network of the cost model: the file's capacities, scaled, minus background traffic."""
    links, background = testbed.cluster.links, testbed.build.background
    left = [link.bytes_per_s * testbed.build.scale * (1 - background[max(link.tier, 0)]) for link in links]
    return FlowNetwork(np.array(left))


def predicted(testbed: Testbed, sent: Sequence[Transfer], *, slow_start: bool) -> list[tuple[float, float]]:
    """Return (simulated, foreseen) seconds of each transfer. Its flow starts 1.5 round trips (connection, order)
    plus the delay of slow start after the receiver's request, and arrives half a round trip after it was sent."""
    network = network_of(testbed)
    capacity, ends, foreseen_s = network.capacity_bytes_per_s, {}, []
    flows = sorted(
        (transfer.began_s + ahead_s(testbed, transfer, capacity, slow_start), number)
        for number, transfer in enumerate(sent)
    )
    waits_s = {number: at_s for at_s, number in flows}
    for at_s, number in flows:
        while (finish := network.next_finish()) is not None and finish[0] <= at_s:
            ends[finish[1]] = finish[0]
            network.advance(finish[0])
        network.advance(at_s)
        transfer = sent[number]
        foreseen_s.append((number, network.transfer_s(transfer.path, transfer.nbytes)))
        network.start(number, transfer.path, transfer.nbytes)
    while (finish := network.next_finish()) is not None:
        ends[finish[1]] = finish[0]
        network.advance(finish[0])
    foreseen = dict(foreseen_s)
    return [
        (
            ends[number] - transfer.began_s + rtt_s(testbed, transfer) / 2,
            waits_s[number] - transfer.began_s + foreseen[number] + rtt_s(testbed, transfer) / 2,
        )
        for number, transfer in enumerate(sent)
    ]


def ahead_s(testbed: Testbed, transfer: Transfer, capacity: Any, slow_start: bool) -> float:
    """Return the time from the order until the model lets bytes flow without interruption."""
    round_trip_s = rtt_s(testbed, transfer)
    narrowest = float(min(capacity[link] for link in transfer.path))
    return 1.5 * round_trip_s + (slow_start_s(transfer.nbytes, round_trip_s, narrowest) if slow_start else 0.0)


def rtt_s(testbed: Testbed, transfer: Transfer) -> float:
    """Return the round-trip time without queues."""
    return BASE_RTT_S + 2 * testbed.network.delay_s(transfer.source.name, transfer.target.name)


def trial(given: argparse.Namespace) -> Figures:
    """Run one testbed from its creation to its removal."""
    cluster = topology.load(given.cluster)
    background = (0.0, *(given.background,) * (TIER_COUNT - 1))
    build = Build(scale=given.scale, queues=given.queues, background=background, seed=given.seed)
    testbed = Testbed(NamedTestbed(f"b{os.getpid() % 10**7}"), cluster, build)
    testbed.check()
    try:
        testbed.lay()
        planned = transfers(testbed, given.count, given.rate, given.bytes, given.sigma)
        before, began = (process_s(), cpu_s(testbed.run.name), machine_s()), time.monotonic()
        send(testbed, planned)
        cores_s = (time.monotonic() - began) * (os.cpu_count() or 1)
        own_s = process_s() - before[0] + cpu_s(testbed.run.name) - before[1]
        busy_s = machine_s() - before[2]
        done = [transfer for transfer in planned if transfer.ended_s is not None]
        real = [transfer.ended_s - transfer.began_s for transfer in done if transfer.ended_s is not None]
        both = predicted(testbed, done, slow_start=True)
        plain = predicted(testbed, done, slow_start=False)
    finally:
        testbed.remove()
    return Figures(
        simulated=[predicted_s / took - 1 for (predicted_s, _), took in zip(both, real, strict=True)],
        foreseen=[predicted_s / took - 1 for (_, predicted_s), took in zip(both, real, strict=True)],
        without_slow_start=[predicted_s / took - 1 for (predicted_s, _), took in zip(plain, real, strict=True)],
        nbytes=[transfer.nbytes for transfer in done],
        took_s=real,
        lost=len(planned) - len(done),
        cpu_share=own_s / cores_s,
        machine_share=busy_s / cores_s,
    )


def process_s() -> float:
    """Return CPU seconds of this process, including the kernel's work on its packets that is charged to it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_s() -> float:
    """Return CPU seconds of all processes of the machine."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def row(what: str, errors: Sequence[float], target: float | None, note: str = "") -> Row:
    """Return the median of the absolute errors; the note has the distribution."""
    absolute = statistics.median(map(abs, errors))
    low, middle, high = np.percentile(errors, (5, 50, 95)).tolist()
    remark = f"{what}: median {middle:+.1%}, p5 {low:+.1%}, p95 {high:+.1%} of {len(errors)} transfers{note}"
    return Row(
        measure=f"{what}: median absolute error",
        unit="%",
        better="lower",
        ours=100 * absolute,
        target=target,
        note=remark,
    )


def rows(name: str, figures: Sequence[Figures], target: float | None) -> list[Row]:
    """Return the rows of one kind of testbed."""
    lost, cpu = sum(figure.lost for figure in figures), statistics.mean(figure.cpu_share for figure in figures)
    machine = statistics.mean(figure.machine_share for figure in figures)
    note = f"; {lost} did not end; the testbed used {cpu:.0%} of the cores, the whole machine {machine:.0%}"
    return [
        row(f"{name}, simulated", [error for figure in figures for error in figure.simulated], target, note),
        row(f"{name}, foreseen at the start", [error for figure in figures for error in figure.foreseen], None),
        row(f"{name}, without slow start", [error for figure in figures for error in figure.without_slow_start], None),
    ]


def main() -> int:
    """Run one process per testbed; fair and FIFO in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=Path, default=LITERAL)
    parser.add_argument("--scale", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=3, help="testbeds of each kind, with other draws")
    parser.add_argument("--count", type=int, default=100, help="transfers of a testbed")
    parser.add_argument("--rate", type=float, default=4.0, help="transfers per second")
    parser.add_argument("--bytes", type=float, default=1e6, help="median size of a transfer, as sent")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the sizes' logarithm")
    parser.add_argument("--background", type=float, default=0.0, help="share of every link that others use")
    parser.add_argument("--queues", choices=get_args(Discipline), help="only these")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--raw", type=Path, help="write every transfer's errors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trial:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        print(json.dumps(msgspec.to_builtins(trial(given))))
        return 0
    kinds = [given.queues] if given.queues else list(get_args(Discipline))
    names = ("cluster", "scale", "count", "rate", "bytes", "sigma", "background")
    options = [argument for name in names for argument in (f"--{name}", getattr(given, name))]
    figures: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    try:
        namespaces.check()
        for number in range(given.rounds):
            for kind in kinds:
                document = fresh(
                    "bench.testbed.transfers", *options, "--queues", kind, "--seed", given.seed + number, "--trial"
                )
                figures[kind].append(msgspec.convert(document, Figures))
    except (Unavailable, Failed) as error:
        what = "transfers on a testbed: predicted beside measured"
        show([Row(measure=what, unit="%", better="lower", ours=None, note=str(error))], given.json)
        return 0 if isinstance(error, Unavailable) else 1
    if given.raw:
        given.raw.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    targets = {"fair": 100 * WITHIN}
    show([row for kind in kinds for row in rows(f"{kind} queues", figures[kind], targets.get(kind))], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
