"""All-reduce over UDP on the loopback interface: exact on all ranks, and an error instead of a hang."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.commands import kvroute_command

from kvroute_engine.errors import InputError
from kvroute_engine.switch import AggregationClient, AggregationError, is_answering
from kvroute_engine.switch.aggregator import Aggregator
from kvroute_engine.switch.udp import UdpSwitch


class Served:
    """A switch in a thread."""

    def __init__(self, slots: int = 256, port: int = 0) -> None:
        self.switch = UdpSwitch("127.0.0.1", port, slots)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.switch.serve, args=(self._stopped.is_set,))
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return self.switch.address

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.switch.close()


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.stop()


def together(ranks: int, call: Callable[[int], object]) -> list[object]:
    """Call on all ranks at the same time."""
    with ThreadPoolExecutor(ranks) as pool:
        futures: list[Future[object]] = [pool.submit(call, rank) for rank in range(ranks)]
        return [future.result(60) for future in futures]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_all_ranks_have_the_sum(served: Served, dtype: type) -> None:
    """Three ranks and several sizes, more chunks than slots among them."""
    shapes = [(1,), (256,), (7, 300), (40_000,)]

    def rank_of(rank: int) -> list[np.ndarray]:
        draw = np.random.default_rng(rank)
        with AggregationClient(served.address, 1, rank, 3, slots=16) as client:
            return [client.all_reduce((100 * draw.normal(size=shape)).astype(dtype)) for shape in shapes]

    found = together(3, rank_of)
    draws = [np.random.default_rng(rank) for rank in range(3)]
    for place, shape in enumerate(shapes):
        inputs: list[np.ndarray] = [(100 * draw.normal(size=shape)).astype(dtype) for draw in draws]
        expected = np.sum([tensor.astype(np.float64) for tensor in inputs], axis=0)
        for rank in range(3):
            result = found[rank][place]  # type: ignore[index]
            assert result.dtype == dtype
            assert result.shape == shape
            assert (result == found[0][place]).all()  # type: ignore[index]
            assert np.allclose(
                result.astype(np.float64), expected, rtol=2e-3, atol=0.3 if dtype == np.float16 else 1e-4
            )


def test_two_groups_share_a_switch(served: Served) -> None:
    def rank_of(number: int) -> np.ndarray:
        job, rank = divmod(number, 2)
        with AggregationClient(served.address, job, rank, 2) as client:
            return client.all_reduce(np.full(1_000, float(10**job), np.float32))

    found = together(4, rank_of)
    assert [float(total[0]) for total in found] == [2.0, 2.0, 20.0, 20.0]  # type: ignore[index]


def test_without_slots_the_group_gets_an_error(served: Served) -> None:
    with (
        AggregationClient(served.address, 1, 0, 2, slots=300) as client,
        pytest.raises(AggregationError, match="too few slots are free"),
    ):
        client.all_reduce(np.ones(10, np.float32))


def test_a_switch_that_is_down_is_an_error() -> None:
    served = Served()
    address = served.address
    served.stop()
    with (
        AggregationClient(address, 1, 0, 1, timeout_s=0.3) as client,
        pytest.raises(AggregationError, match="did not answer"),
    ):
        client.all_reduce(np.ones(10, np.float32))


def test_a_switch_that_restarts_is_not_noticed() -> None:
    """Both ranks go on with the same session and exact sums."""
    first = Served()
    port, barrier = first.address[1], threading.Barrier(3)
    servers = [first]

    def rank_of(rank: int) -> list[float]:
        found = []
        with AggregationClient(("127.0.0.1", port), 1, rank, 2, timeout_s=30.0) as client:
            for number in range(3):
                found.append(float(client.all_reduce(np.full(500, rank + number, np.int32)).sum()))
                barrier.wait(30)
                barrier.wait(30)
        return found

    def restarts() -> None:
        for _ in range(3):
            barrier.wait(30)
            servers[-1].stop()
            servers.append(Served(port=port))
            barrier.wait(30)

    restarter = threading.Thread(target=restarts)
    restarter.start()
    found = together(2, rank_of)
    restarter.join()
    servers[-1].stop()
    assert found == [[500.0, 1_500.0, 2_500.0]] * 2


def test_a_worker_that_restarts_ends_the_session_of_the_others(served: Served) -> None:
    """The other rank gets an error and no wrong sum; new clients of both find each other."""
    with ThreadPoolExecutor(2) as pool:
        clients = [AggregationClient(served.address, 1, rank, 2) for rank in (0, 1)]
        for future in [pool.submit(client.all_reduce, np.ones(10, np.int32)) for client in clients]:
            assert future.result(30).tolist() == [2] * 10
        clients[1]._socket.close()  # as of a process that was killed
        clients[1] = AggregationClient(served.address, 1, 1, 2)
        waiting = pool.submit(clients[1].all_reduce, np.full(10, 5, np.int32))
        with pytest.raises(AggregationError, match="a worker has restarted"):
            clients[0].all_reduce(np.full(10, 7, np.int32))
        clients[0] = AggregationClient(served.address, 1, 0, 2)
        assert clients[0].all_reduce(np.full(10, 7, np.int32)).tolist() == [12] * 10
        assert waiting.result(30).tolist() == [12] * 10
        for client in clients:
            client.close()


@pytest.mark.parametrize(("rank", "ranks", "slots"), [(2, 2, 8), (0, 65, 8), (0, 2, 0)])
def test_impossible_clients_are_one_sentence(rank: int, ranks: int, slots: int) -> None:
    with pytest.raises(InputError, match="not possible"):
        AggregationClient(("127.0.0.1", 1), 1, rank, ranks, slots)


def test_tensors_of_other_types_are_refused(served: Served) -> None:
    with (
        AggregationClient(served.address, 1, 0, 1) as client,
        pytest.raises(InputError, match="int64 cannot be aggregated"),
    ):
        client.all_reduce(np.ones(3, np.int64))


def test_the_command_serves_until_sigterm() -> None:
    command = kvroute_command("switch", "--port", "0", "--slots", "64")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, _, port = json.loads(process.stdout.readline())["address"].rpartition(":")
            with AggregationClient((host, int(port)), 9, 0, 1, slots=32, timeout_s=30.0) as client:
                assert client.all_reduce(np.arange(5, dtype=np.int32)).tolist() == [0, 1, 2, 3, 4]
        finally:
            process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "1 chunks" in stderr


def test_the_kernel_s_data_plane_without_its_tools_is_a_warning(tmp_path: Path) -> None:
    """Without clang or libbpf the switch sums the packets itself."""
    command = kvroute_command("switch", "--port", "0", "--interface", "lo")
    quiet = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["data_plane"] == "python"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    warning, *_ = stderr.splitlines()
    assert re.match("warning: XDP: (clang|libbpf) is not installed.*; the switch sums the packets in Python", warning)


def test_an_interface_that_does_not_exist_is_one_sentence() -> None:
    command = kvroute_command("switch", "--port", "0", "--interface", "nowhere0")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert not done.stdout
    assert "there is no interface nowhere0" in done.stderr


def test_an_address_in_use_is_one_sentence(served: Served) -> None:
    with pytest.raises(InputError, match="cannot be bound"):
        UdpSwitch("127.0.0.1", served.address[1], 1)


class AlsoToPortZero(Aggregator):
    """An aggregator that also answers to port 0, to which no kernel sends."""

    def receive(self, content: bytes, source: Hashable, now_s: float) -> list[tuple[Hashable, bytes]]:
        return [(("127.0.0.1", 0), content), *super().receive(content, source, now_s)]


def test_an_address_that_cannot_be_sent_to_does_not_stop_the_switch() -> None:
    switch = UdpSwitch("127.0.0.1", 0, 64)
    switch.aggregator = AlsoToPortZero(64, 1)
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(switch.serve, stopped.is_set)
        try:
            with AggregationClient(switch.address, 1, 0, 1, slots=4) as client:
                assert client.all_reduce(np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]
        finally:
            stopped.set()
            serving.exception(30)
            switch.close()
    serving.result()


def test_whether_a_switch_answers(served: Served) -> None:
    """The question needs no slots and begins no job."""
    assert is_answering(served.address, 99, 60.0)
    with AggregationClient(served.address, 1, 0, 1, slots=256) as client:
        assert client.all_reduce(np.ones(3, np.float32)).tolist() == [1.0] * 3
        assert is_answering(served.address, 99, 60.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert not is_answering(silent.getsockname(), 99, 0.05)


def test_a_closed_client_is_an_error_and_can_begin_again(served: Served) -> None:
    client = AggregationClient(served.address, 1, 0, 1)
    client.close()
    with pytest.raises(AggregationError, match="closed"):
        client.all_reduce(np.ones(3, np.float32))
    with client.again() as other:
        assert other.all_reduce(np.ones(3, np.float32)).tolist() == [1.0] * 3
