"""Live: a small testbed of network namespaces: TCP uses the configured paths, engines answer, and nothing is left
behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import uvloop
from bench.testbed.kernel_paths import KernelPaths
from tests.examples import EXAMPLES

from kvroute import topology
from kvroute.load import TimedRequest, replay_trace
from kvroute.testbed import Build, NamedTestbed, namespaces, processes
from kvroute.testbed import Testbed as Bed
from kvroute.testbed.namespaces import Unavailable, inside
from kvroute.testbed.queues import Discipline, leaf_of, leaves_of

pytestmark = pytest.mark.live
SMALL, WAN = EXAMPLES / "testbed-small.yaml", EXAMPLES / "testbed-wan.yaml"
NBYTES = 60_000
PROMPT = "the quick brown fox jumps over the lazy dog " * 700


def name() -> str:
    """Return a testbed name that only this process uses."""
    return f"t{os.getpid() % 10**6}{time.monotonic_ns() % 10}"


@pytest.fixture
def run() -> Iterator[NamedTestbed]:
    """A testbed run on this machine, removed afterwards whatever the test did."""
    try:
        namespaces.check()
    except Unavailable as reason:
        if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
            pytest.fail(str(reason))
        pytest.skip(str(reason))
    made = NamedTestbed(name())
    yield made
    made.remove()


@contextmanager
def running_testbed(
    run: NamedTestbed, cluster: Path, queues: Discipline = "fair", build: Build | None = None
) -> Iterator[Bed]:
    """Create the network of a testbed without engines."""
    testbed = Bed(run, topology.load(cluster), build or Build(queues=queues))
    testbed.check()
    try:
        testbed.lay()
        yield testbed
    finally:
        testbed.remove()


def machine(run: NamedTestbed) -> dict[str, object]:
    """Return everything that a testbed may leave behind: devices, queues, routes, rules; namespaces, folders and
    processes with its name. Other testbeds may come and go meanwhile."""
    state = {
        what: [line for line in output(*command).splitlines() if "kvt-" not in line or run.device in line]
        for what, command in {
            "links": ["ip", "-o", "link"],
            "queues": ["tc", "qdisc"],
            "routes": ["ip", "route"],
            "rules": ["ip", "rule"],
        }.items()
    }
    mark = f"{processes.MARK}={run.name}".encode()
    marked = [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if pid != os.getpid() and mark in environment(pid)
    ]
    return state | {"namespaces": namespaces.named(run.device), "marked": marked, "folder": run.folder.exists()}


def output(*command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def environment(pid: int) -> bytes:
    """Return the environment of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def connected(testbed: Bed, source: str, target: str, count: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield connections between two instances' hosts, opened by the receiver: (sender's end, receiver's end)."""
    near, far = testbed.wiring.host_of(source), testbed.wiring.host_of(target)
    with inside(testbed.run.namespace(near.name)):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.bind((str(near.address), 0))
        listener.listen(count)
        for _ in range(count):
            with inside(testbed.run.namespace(far.name)):
                receiver = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            receiver.bind((str(far.address), 0))
            receiver.connect(listener.getsockname())
            sender, _ = listener.accept()
            with sender, receiver:
                yield sender, receiver


def counted(testbed: Bed, what: str) -> dict[str, int]:
    """Return the bytes so far by link, or by link and class of its queue."""
    sent_bytes = {}
    for place in testbed.wiring.places:
        for end in testbed.wiring.ends_at(place):
            command = ("-s", "class", "show", "dev", end.device)
            shown = namespaces.run("tc", "-n", testbed.run.namespace(place), *command)
            for leaf, sent in re.findall(r"class htb 1:(\w+) .*\n Sent (\d+) bytes", shown):
                if what == "links" and leaf == "1":
                    sent_bytes[str(end.link)] = int(sent)
                elif what == "leaves":
                    sent_bytes[f"{end.link} {leaf}"] = int(sent)
    return sent_bytes


@pytest.mark.parametrize("queues", ["fair", "fifo"])
def test_connections_use_the_links_that_the_kernel_reports(run: NamedTestbed, queues: Discipline) -> None:
    """Each connection's bytes are on the links that `WanPaths` finds, which include both of two parallel uplinks, and,
    if queues are fair, in the leaf that `leaf_of` computes."""
    taken: set[int] = set()
    with running_testbed(run, SMALL, queues) as testbed:
        paths = KernelPaths(testbed)
        for sender, receiver in connected(testbed, "prefill0", "decode1", 8):
            (source, near), (target, far) = sender.getsockname(), receiver.getsockname()
            hosts = testbed.wiring.host_of("prefill0"), testbed.wiring.host_of("decode1")
            path = paths.of(*hosts, near, far)
            taken.update(path)
            connection = (int(IPv4Address(source)), int(IPv4Address(target)), near << 16 | far)
            equal = {end.link: end.equal for end in testbed.wiring.ends}
            leaves = {link: 0x10 + leaf_of(*connection, leaves_of(equal[link])) for link in path}
            what = "leaves" if queues == "fair" else "links"
            before = counted(testbed, what)
            sender.sendall(bytes(NBYTES))
            left = NBYTES
            while left:
                left -= len(receiver.recv(left))
            after = counted(testbed, what)
            grown = {key for key in after if after[key] - before[key] >= NBYTES}
            assert grown >= {f"{link} {leaf:x}" if queues == "fair" else str(link) for link, leaf in leaves.items()}
            assert len(path) == 4
            links = {key.partition(" ")[0] for key in grown}
            assert links == {str(link) for link in path}, "a link that is not on the path has carried as much"
        ups, _ = testbed.cluster.cables.rack["rack0"]
        assert set(ups) <= taken


def test_a_delay_line_delays_packets(run: NamedTestbed) -> None:
    """The kernel's minimum round trip of a connection between the sites is at least twice the latency."""
    with running_testbed(run, WAN) as testbed:
        near, far = (testbed.wiring.host_of(instance).name for instance in ("prefill0", "decode0"))
        for sender, receiver in connected(testbed, "prefill0", "decode0", 1):
            sender.sendall(bytes(NBYTES))
            left = NBYTES
            while left:
                left -= len(receiver.recv(left))
            information = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            min_rtt_us = int.from_bytes(information[148:152], sys.byteorder)
            assert 20_000 <= 2e6 * testbed.network.delay_s(near, far) <= min_rtt_us < 10_000_000
            assert sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"cubic"


def test_background_traffic_is_on_the_links_of_its_tier(run: NamedTestbed) -> None:
    """Background traffic of the uplinks is in the class for other traffic there, and nowhere else."""
    background = (0.0, 0.0, 0.2, 0.0, 0.0)
    with running_testbed(run, SMALL, build=Build(background=background)) as testbed:
        loaded = {str(link) for link in testbed.cluster.links_of_tier(2)}
        while True:
            leaves = counted(testbed, "leaves")
            others = {key.partition(" ")[0] for key, sent in leaves.items() if key.endswith(" 2") and sent > 0}
            assert others <= loaded
            if others == loaded:
                break


def kvroute(*arguments: str) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-m", "kvroute.cli.app", "testbed", *arguments]


def test_up_serves_requests_and_down_removes_everything(run: NamedTestbed) -> None:
    """Engines in two racks answer through the gateway, and KV caches use the uplinks; killed processes are cleaned up
    too."""
    before = machine(run)
    pairs = ("--policy", "foresight")  # one instance would serve these requests without a transfer
    up = subprocess.run(kvroute("up", str(SMALL), "--name", run.name, *pairs), capture_output=True, text=True)
    assert up.returncode == 0, up.stderr
    state = json.loads(up.stdout)
    assert state == json.loads((run.folder / "state.json").read_text())
    again = subprocess.run(kvroute("up", str(SMALL), "--name", run.name), capture_output=True, text=True)
    assert again.returncode == 2
    assert "already exists" in again.stderr
    body = {"model": "llama-3-70b", "max_tokens": 3, "stream": True}
    requests = [TimedRequest(0.1 * n, json.dumps(body | {"prompt": f"{n} {PROMPT}"}).encode()) for n in range(4)]
    answers = uvloop.run(replay_trace(state["url"], requests))
    assert [answer.error for answer in answers] == [""] * 4
    assert all(answer.ok for answer in answers)
    testbed = Bed(run, topology.load(SMALL), Build())
    testbed.network.check_wiring()
    carried = counted(testbed, "links")
    ups, _ = testbed.cluster.cables.rack["rack0"]
    modelled = 4 * 7_000 * 320 * 1024
    assert sum(carried[str(link)] for link in ups) > modelled * state["scale"]
    gateway = next(pid for pid in processes.marked(run.name) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(gateway, signal.SIGKILL)
    down = subprocess.run(kvroute("down", "--name", run.name), capture_output=True, text=True)
    assert down.returncode == 0, down.stderr
    assert run.remains() == []
    assert machine(run) == before
    twice = subprocess.run(kvroute("down", "--name", run.name), capture_output=True, text=True)
    assert twice.returncode == 0
    assert "had nothing to remove" in twice.stderr


@pytest.mark.parametrize("moment", ["laying", "playing"])
def test_down_cleans_up_after_a_kill(run: NamedTestbed, moment: str) -> None:
    """`run` is killed with -9 while it creates namespaces, or while requests are in flight."""
    before = machine(run)
    command = kvroute("run", str(SMALL), "--name", run.name, "--policy", "netkv", "--requests", "400", "--rate", "2")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ready = run.folder / ("state.json" if moment == "playing" else "")
        while not (ready.is_file() if moment == "playing" else len(namespaces.named(run.prefix)) > 2):
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    assert run.remains()
    down = subprocess.run(kvroute("down", "--name", run.name), capture_output=True, text=True)
    assert down.returncode == 0, down.stderr
    assert run.remains() == []
    assert machine(run) == before


def test_run_compares_and_cleans_up(run: NamedTestbed) -> None:
    """Every request is answered on the kernel's network, with a prediction of the same requests; afterwards everything
    is removed."""
    before = machine(run)
    command = kvroute("run", str(SMALL), "--name", run.name, "--requests", "6", "--rate", "3", "--json")
    done = subprocess.run(
        [*command, "--policy", "round-robin", "--policy", "foresight"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert [comparison["policy"] for comparison in rounds] == ["round-robin", "foresight"]
    for comparison in rounds:
        assert comparison["kernel"]["answered"] == comparison["simulated"]["answered"] == 6
        assert comparison["kernel"]["parts_s"]["transfer"] > 0
        assert 0 < comparison["cpu_share"] <= 1
    assert machine(run) == before
