"""`kvroute scheduler` and `kvroute agent` as processes: tables, restarts, ends, and wrong input."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.cli_rig import Kvroute
from tests.collectives.scheduler.agent_clusters import write_cluster
from tests.commands import kvroute_command
from tests.waiting import PATIENCE_S

from kvroute_engine.agent.files import TABLE, TableFile, read_file


class Process:
    """A command, and its ready line."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            kvroute_command(*map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=PATIENCE_S)[1]
        self.ready = json.loads(line)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit code and what was written to stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str | Path) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield begin
    for task in started:
        if task.process.poll() is None:
            task.process.kill()
        task.process.communicate(timeout=PATIENCE_S)


def becomes(condition: Callable[[], bool]) -> bool:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def metric(page: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{page}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def lasting_port() -> int:
    """Return a free port that the system gives to no connection, so that it is free again after its listener's end."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_a_scheduler_that_is_killed_and_starts_again(tmp_path: Path, start: Callable[..., Process]) -> None:
    """The agent keeps its table, whose age grows, and gets one with a higher version."""
    cluster, folder = write_cluster(tmp_path), tmp_path / "run"
    (tmp_path / "class/net/eth0/device").mkdir(parents=True)
    (tmp_path / "class/net/eth0/statistics").mkdir()
    for name in ("tx_bytes", "rx_bytes"):
        (tmp_path / "class/net/eth0/statistics" / name).write_text("5\n")
    fast = ("--period", "50ms", "--settle", "100ms")
    first = start("scheduler", cluster, "--listen", f"127.0.0.1:{lasting_port()}", *fast)
    assert first.ready["groups"] == 1
    address = first.ready["address"]
    agent = start(
        *("agent", "--scheduler", address, "--node", "a0", "--folder", folder),
        *("--sysfs", tmp_path, "--metrics-port", "0"),
    )
    page = agent.ready["metrics"]
    assert agent.ready["version"] == 0
    assert becomes((folder / TABLE).exists)
    first.process.kill()
    assert becomes(lambda: metric(page, "kvroute_agent_connected") == 0)
    lost = read_file(folder / TABLE, TableFile)
    assert lost is not None
    assert abs(lost.version - time.time() * 1e3) < 3.6e6, "versions begin with the time in milliseconds"
    assert becomes(lambda: metric(page, "kvroute_agent_table_age_seconds") > 1.0)
    assert read_file(folder / TABLE, TableFile) == lost
    second = start("scheduler", cluster, "--listen", address, *fast)
    assert becomes(lambda: metric(page, "kvroute_agent_table_version") > lost.version)
    assert metric(page, "kvroute_agent_connected") == 1
    assert becomes(lambda: metric(page, "kvroute_agent_table_age_seconds") < 1.0)
    code, errors = agent.end()
    assert code == 0
    assert [line.partition(" (")[0] for line in errors.splitlines()] == [
        f"no scheduler at {address}",
        f"the scheduler at {address} is back; table {lost.version} is " + errors.split(" is ")[-1].strip(),
    ]
    code, errors = second.end(signal.SIGINT)
    assert (code, "Traceback" in errors) == (0, False)
    assert errors.splitlines()[-1] == "server a0 is gone"


def test_a_running_scheduler_ends_at_once_with_connected_agents(tmp_path: Path, start: Callable[..., Process]) -> None:
    """Its streams end, and the agent says so."""
    scheduler = start("scheduler", write_cluster(tmp_path), "--listen", "127.0.0.1:0", "--settle", "0s")
    address = scheduler.ready["address"]
    agent = start("agent", "--scheduler", address, "--node", "a1", "--folder", tmp_path, "--sysfs", tmp_path)
    assert becomes((tmp_path / TABLE).exists)
    assert scheduler.end()[0] == 0
    assert becomes(lambda: agent.process.poll() is None)
    code, errors = agent.end()
    assert code == 0
    assert errors.startswith(f"no scheduler at {address} (")


def test_an_unknown_node_ends_the_agent(tmp_path: Path, kvroute: Kvroute, start: Callable[..., Process]) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    scheduler = start(
        "scheduler", write_cluster(tmp_path), "--listen", "127.0.0.1:0", "--token-file", token, "--metrics-port", "0"
    )
    address = scheduler.ready["address"]
    known = ["--scheduler", address, "--folder", str(tmp_path), "--sysfs", str(tmp_path)]
    ended = kvroute("agent", *known, "--node", "b7", "--token-file", str(token))
    assert ended.code == 2
    what = "rack-of-3 has no node 'b7'; use one of: a0, a1, a2"
    assert ended.err == f"kvroute: scheduler {address}: {what}\n"
    ended = kvroute("agent", *known, "--node", "a0")
    assert ended.code == 2
    assert "the token is missing or wrong" in ended.err
    with urllib.request.urlopen(f"http://{scheduler.ready['metrics']}/metrics", timeout=PATIENCE_S) as answer:
        assert "kvroute_scheduler_agent_connected{" not in answer.read().decode()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--listen", "0.0.0.0:7400"],
            "--listen: every machine that reaches 0.0.0.0 could report loads and get tables",
        ),
        (["--listen", "here"], "--listen: 'here' is not an address; write HOST:PORT"),
        (["--listen", "0.0.0.0:0", "--cert", "CERT", "--key", "CERT"], "--listen: every machine that reaches 0.0.0.0"),
        (["--token-file", "SHORT"], "--token-file: SHORT has no token of 16 characters or more; write one with"),
        (["--token-file", "ABSENT"], "--token-file: ABSENT cannot be read (No such file or directory); write one"),
        (["--cert", "CERT"], "--client-ca: a certificate and its key belong together; give --cert and --key"),
        (["--client-ca", "CERT"], "--client-ca: a client CA needs TLS; give --cert and --key, too"),
        (["--cert", "SHORT", "--key", "SHORT"], "--cert: SHORT is not a PEM file; it begins with -----BEGIN"),
        (["--period", "1ms"], "invalid value for '--period': '1ms' is not 10 ms or more"),
    ],
)
def test_wrong_settings_of_the_scheduler_are_one_sentence(
    kvroute: Kvroute, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    names = {"SHORT": "short\n", "CERT": "-----BEGIN CERTIFICATE-----\n"}
    for name, content in names.items():
        (tmp_path / name).write_text(content)
    places = {name: str(tmp_path / name) for name in (*names, "ABSENT")}
    cluster = str(write_cluster(tmp_path))
    ended = kvroute("scheduler", cluster, *[places.get(argument, argument) for argument in arguments])
    assert ended.code == 2
    for name, place in places.items():
        sentence = sentence.replace(name, place)
    assert ended.err.startswith(f"kvroute: {sentence}")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "an agent is that of one server or one switch; give --node or --switch"),
        (["--node", "a0", "--switch", "access"], "an agent is that of one server or one switch; give --node or"),
        (["--switch", "access"], "--switch: the slots of the switch are unknown; give --status-file, too"),
        (["--node", "a0", "--scheduler", "x"], "--scheduler: 'x' is not an address; write HOST:PORT"),
        (["--node", "a0", "--nic", "eth0"], "--nic: 'eth0' is not a device and a port; write eth0=0"),
        (["--node", "a0", "--nic", "nic-x=0"], "--nic: nic-x is neither in /sys/class/net nor in /sys/class/infinib"),
        (["--node", "a0", "--folder", "/proc/kvroute"], "--folder: /proc/kvroute is not a writable folder"),
    ],
)
def test_wrong_settings_of_an_agent_are_one_sentence(
    kvroute: Kvroute, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    given = [*([] if "--scheduler" in arguments else ["--scheduler", "127.0.0.1:1"]), *arguments]
    ended = kvroute("agent", *given, *([] if "--folder" in arguments else ["--folder", str(tmp_path)]))
    assert ended.code == 2
    assert ended.err.startswith(f"kvroute: {sentence}")
    assert len(ended.err.splitlines()) == 1


def test_an_address_of_another_machine_is_one_sentence(tmp_path: Path) -> None:
    """In a process of its own, because gRPC prints causes of its own as well."""
    arguments = ["scheduler", str(write_cluster(tmp_path)), "--listen", "192.0.2.1:0", "--insecure"]
    command = [sys.executable, "-m", "kvroute.cli.app", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    what = (
        "192.0.2.1:0 cannot be bound; choose an address of this machine and a free port, and a certificate with its key"
    )
    assert (done.returncode, done.stderr) == (2, f"kvroute: --listen: {what}\n")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("grpc", ["scheduler", "x.yaml"]),
        ("google.protobuf", ["agent", "--scheduler", "h:1", "--node", "a0"]),
        ("prometheus_client", ["agent", "--scheduler", "h:1", "--node", "a0"]),
    ],
)
def test_without_the_extra_the_command_says_how_to_install_it(module: str, command: list[str]) -> None:
    """As far as an import can show it."""
    code = f"import sys; sys.modules[{module!r}] = None; from kvroute.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr == f"kvroute: {module} is not installed; pip install 'kvroute-engine[agents]'\n"


def test_the_core_of_the_scheduler_needs_no_extra() -> None:
    """The simulator uses it."""
    absent = "for name in ('grpc', 'google.protobuf', 'prometheus_client'): sys.modules[name] = None"
    code = f"import sys\n{absent}\nimport kvroute.collectives.scheduler.tables, kvroute.sim.groups.periodic_table"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
