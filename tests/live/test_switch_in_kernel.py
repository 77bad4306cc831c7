"""Live: the switch's XDP program against the state machine in Python, frame by frame and over network namespaces."""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from bench.all_reduce.frames import frame, veth_peers
from bench.all_reduce.star import PORT, Star, star, start, switch, xdp
from tests.live.services import as_service, missing

from kvroute.testbed import namespaces
from kvroute_engine.switch.aggregator import Aggregator
from kvroute_engine.switch.wire import CHUNK_VALUES, DATA_BYTES, PacketKind, Reduction, decode
from kvroute_engine.switch.worker import Worker
from kvroute_engine.switch.xdp import PacketSource, XdpOffload, XdpUnavailable
from kvroute_engine.switch.xdp.libbpf import Program

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
PROGRAM = Path(sys.executable).with_name("kvroute")
XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT = 1, 2, 3, 4


@pytest.fixture(autouse=True, scope="module")
def _require_xdp() -> None:
    """Root, clang, libbpf and a kernel with XDP are required."""
    try:
        namespaces.check_tools()
        with namespaces.nameless():
            XdpOffload(["lo"], 1, PORT).close()
    except (XdpUnavailable, namespaces.Unavailable) as error:
        if "interface lo" not in str(error):  # the loopback interface has no driver for XDP
            missing(str(error))


@contextmanager
def offload(workers: int, slots: int) -> Iterator[tuple[XdpOffload, Program, list[PacketSource]]]:
    """Load the program on `workers` interfaces of a namespace; yield the addresses of workers behind them, too."""
    with namespaces.nameless():
        peers = veth_peers(workers)
        found = XdpOffload([f"p{worker}" for worker in range(workers)], slots, PORT)
        try:
            yield found, found.program, peers
        finally:
            found.close()


class Both:
    """One switch in Python, and one whose data the kernel sums. Every packet goes to both; their answers are equal."""

    def __init__(
        self, workers: int, slots: int, kernel: XdpOffload, program: Program, peers: list[PacketSource]
    ) -> None:
        self._python = Aggregator(2 * slots, 1)
        self._kernel = Aggregator(2 * slots, 1, offload=kernel)
        self._program, self._peers = program, peers
        self.in_kernel = 0

    def receive(self, worker: int, payload: bytes, now_s: float) -> list[tuple[int, bytes]]:
        """Return the answers, with the workers that get them."""
        peer = self._peers[worker]
        expected = self._python.receive(payload, peer, now_s)
        answers = self._through_kernel(worker, payload, now_s)
        by_worker = sorted((self._number(target), answer) for target, answer in expected)
        assert sorted(answers) == by_worker
        return by_worker

    def _through_kernel(self, worker: int, payload: bytes, now_s: float) -> list[tuple[int, bytes]]:
        peer = self._peers[worker]
        returned, after, _ = self._program.run("aggregate", frame(peer, payload), peer.interface)
        if returned == XDP_PASS:
            return [(self._number(target), answer) for target, answer in self._kernel.receive(payload, peer, now_s)]
        self.in_kernel += 1
        if returned == XDP_DROP:
            return []
        if returned == XDP_TX:
            source, target = after[26:30], after[30:34]
            assert (source, target) == (frame(peer, payload)[30:34], frame(peer, payload)[26:30])
            return [(worker, after[42:])]
        assert returned == XDP_REDIRECT
        return [(number, after[42:]) for number in range(len(self._peers))]

    def _number(self, target: Hashable) -> int:
        assert isinstance(target, PacketSource)
        return self._peers.index(target)


@dataclass
class Rank:
    """A worker with its operations still to do."""

    worker: Worker
    done: int = 0


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_answers_every_packet_as_the_state_machine(seed: int) -> None:
    """Loss, duplicates, reordering and restarts of workers; sums and maxima; more chunks than slots."""
    drawn = random.Random(seed)
    workers, slots, rounds = *drawn.choice([(1, 1), (2, 2), (3, 4), (5, 3)]), 6
    with offload(workers, 2 * slots) as (kernel, program, peers):
        both = Both(workers, slots, kernel, program, peers)
        ranks = [Rank(Worker(7, w, workers, slots, 1, 0.05)) for w in range(workers)]
        wire: list[tuple[int, bytes]] = []
        late: list[tuple[int, bytes]] = []
        now_s, incarnation = 0.0, 1
        while any(rank.done < rounds for rank in ranks):
            now_s += 0.01
            if drawn.random() < 0.01 and now_s < 3.0:
                incarnation += 1
                gone = drawn.randrange(workers)
                ranks[gone] = Rank(Worker(7, gone, workers, slots, incarnation, 0.05))
            for number, rank in enumerate(ranks):
                if rank.worker.state == "restarted":
                    incarnation += 1
                    ranks[number] = rank = Rank(Worker(7, number, workers, slots, incarnation, 0.05))
                if rank.done < rounds and not rank.worker.busy:
                    rank.worker.begin(*operation(rank.done, number))
                wire += [(number, packet) for packet in rank.worker.outgoing(now_s) if drawn.random() > 0.05]
            late += [packet for packet in wire if drawn.random() < 0.2]
            drawn.shuffle(late)
            wire += [late.pop() for _ in range(len(late) // 8)]
            drawn.shuffle(wire)
            for number, packet in wire[: len(wire) // 2 + 1]:
                for target, answer in both.receive(number, packet, now_s):
                    if drawn.random() > 0.05:
                        ranks[target].worker.receive(answer, now_s)
            wire = wire[len(wire) // 2 + 1 :]
            for rank in ranks:
                if rank.done < rounds and rank.worker.state == "running" and not rank.worker.busy:
                    kind, _ = operation(rank.done, 0)
                    given = [operation(rank.done, number)[1] for number in range(workers)]
                    whole = np.sum(given, axis=0, dtype=np.int32) if kind == Reduction.SUM else np.max(given, axis=0)
                    assert np.array_equal(rank.worker.result(), whole)
                    rank.done += 1
            assert now_s < 1000.0
        assert both.in_kernel > rounds * workers


def operation(number: int, worker: int) -> tuple[Reduction, np.ndarray]:
    """Return an operation of a worker: sums that overflow among them."""
    drawn = np.random.default_rng([number, worker])
    values = drawn.integers(-(2**31), 2**31, (1 + number % 7, CHUNK_VALUES)).astype(np.int32)
    return Reduction(number % 2), values


def test_other_packets_go_on_to_the_network_stack() -> None:
    """Unknown jobs, wrong sizes, other epochs, and workers that are not behind the interface where they joined."""
    with offload(2, 4) as (kernel, program, peers):
        assert kernel.begin(1, 5, 4, peers)
        worker = Worker(1, 0, 2, 4, 1, 0.05)
        worker.begin(*operation(0, 0))
        (join,) = worker.outgoing(0.0)
        good = bytearray(DATA_BYTES)
        good[: len(join)] = join
        good[3] = PacketKind.DATA
        struct.pack_into("<IIBB", good, 4, 1, 5, 0, 2)
        good[14:26] = bytes(12)
        assert decode(bytes(good)).epoch == 5

        def outcome(payload: bytes, peer: PacketSource = peers[0]) -> int:
            return program.run("aggregate", frame(peer, payload), peer.interface)[0]

        assert outcome(bytes(good)) == XDP_DROP
        for at, value in (
            (0, 0),
            (2, 2),
            (3, PacketKind.RESULT),
            (4, 2),
            (8, 4),
            (12, 1),
            (13, 3),
            (14, 4),
            (16, 2),
            (17, 2),
        ):
            changed = bytearray(good)
            changed[at] = value
            assert outcome(bytes(changed)) == XDP_PASS, at
        assert outcome(bytes(good[:-1])) == XDP_PASS
        assert outcome(bytes(good) + b"x") == XDP_PASS
        assert outcome(bytes(good), peers[0]._replace(port=1)) == XDP_PASS
        assert outcome(bytes(good), peers[0]._replace(host="10.0.9.9")) == XDP_PASS
        assert outcome(bytes(good), peers[0]._replace(interface=peers[1].interface)) == XDP_PASS
        assert program.run("aggregate", b"x" * 60, peers[0].interface)[0] == XDP_PASS
        kernel.end(1)
        assert outcome(bytes(good)) == XDP_PASS


def test_jobs_share_the_slots_and_give_them_back() -> None:
    with offload(2, 8) as (kernel, _, peers):
        assert kernel.begin(1, 1, 4, peers)
        assert kernel.begin(2, 2, 4, peers)
        assert not kernel.begin(3, 3, 1, peers)
        kernel.end(1)
        assert kernel.begin(3, 4, 3, peers)
        assert not kernel.begin(4, 5, 2, peers)
        kernel.end(2)
        assert kernel.begin(4, 6, 5, peers)
        assert not kernel.begin(5, 7, 1, [peers[0], peers[0]]), "two workers behind one interface"
        assert not kernel.begin(5, 7, 1, [peers[0], peers[1]._replace(interface=1)]), "an interface without the program"


def workers_of(found: Star, *options: str, only: Sequence[int] | None = None) -> list[subprocess.Popen[str]]:
    """Start the workers of a group, each in its namespace."""
    return [
        start(
            found.host(worker),
            *("-m", "bench.all_reduce.sums", "--switch", f"{found.switch_address(worker)}:{PORT}"),
            *("--worker", str(worker), "--workers", str(found.workers), *options),
        )
        for worker in (range(found.workers) if only is None else only)
    ]


def results(workers: list[subprocess.Popen[str]]) -> list[dict[str, object]]:
    """Wait for workers and return their last lines."""
    found = []
    for process in workers:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05])
def test_both_data_planes_give_the_same_bits(loss: float) -> None:
    """Exact sums of float32 on every worker, whatever is lost."""
    hashes = set()
    with star(3) as found:
        found.lose(loss)
        for options, plane in ((xdp(found), "xdp"), ((), "python")):
            with switch(found, *options) as (_, used):
                assert used == plane
                done = results(workers_of(found, "--rounds", "150"))
            hashes |= {outcome["hash"] for outcome in done}
            assert all(outcome["attempts"] == 1 for outcome in done)
        assert (found.lost > 0) == (loss > 0)
    assert len(hashes) == 1


def test_a_switch_that_restarts_and_a_worker_that_restarts() -> None:
    """The group goes on after the switch was killed; after a worker was killed it begins anew, with exact sums."""
    with star(3) as found:
        found.lose(0.01)
        options = ("--rounds", "300", "--dtype", "int32", "--timeout-s", "60")
        with switch(found, *xdp(found)) as (process, _):
            group = workers_of(found, *options)
            for worker in group:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "running\n"
            process.send_signal(signal.SIGKILL)
            process.wait()
        with switch(found, *xdp(found)) as (_, plane):
            assert plane == "xdp", "the program of the killed switch was detached with it"
            done = results(group)
            assert {outcome["attempts"] for outcome in done} == {1}
            group = workers_of(found, *options)
            for worker in group:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "running\n"
            group[1].kill()
            group[1].communicate()
            group[1:2] = workers_of(found, *options, only=[1])
            again = results(group)
    assert {outcome["hash"] for outcome in again} == {outcome["hash"] for outcome in done}
    assert [outcome["attempts"] for outcome in again] == [2, 1, 2]


def test_groups_share_a_switch_and_one_of_them_uses_one_interface_twice() -> None:
    """The kernel does not take a group with two workers behind one interface; Python sums it at the same time."""
    with star(2) as found, switch(found, *xdp(found)):
        usual = workers_of(found, "--rounds", "60")
        same = [
            start(
                found.host(0),
                *("-m", "bench.all_reduce.sums", "--switch", f"{found.switch_address(0)}:{PORT}", "--job", "2"),
                *("--worker", str(worker), "--workers", "2", "--rounds", "60"),
            )
            for worker in range(2)
        ]
        assert {result["hash"] for result in results(usual)} == {result["hash"] for result in results(same)}


def test_without_privilege_python_sums_with_a_warning() -> None:
    """One sentence on stderr; the switch is ready all the same."""
    command = as_service(PROGRAM, Path("/tmp"), "switch", "--port", "0", "--interface", "lo")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["data_plane"] == "python"
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0
    warnings = [line for line in error.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1, error
    assert "the kernel refuses the program: Operation not permitted" in warnings[0]


def test_an_interface_without_a_driver_for_xdp_is_a_warning() -> None:
    """The loopback interface has none."""
    command = [str(PROGRAM), "switch", "--port", "0", "--interface", "lo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["data_plane"] == "python"
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert "interface lo" in error
