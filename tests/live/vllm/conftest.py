"""vLLM servers on free loopback ports, started once per test session: one for prefill and two for decode with kvroute's
connector, and a single one without it, which tests of other connectors use too."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bench.all_reduce.star import star
from tests.live.services import missing
from tests.live.vllm.starter import Preloaded, Started

from kvroute.testbed import namespaces
from kvroute.types import KvProtocol
from kvroute_engine.switch.xdp import XdpUnavailable

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BIN = ROOT / ".venv-vllm" / "bin"
READY_S = 420.0
BLOCK_TOKENS = 32
BLOCKS = 512
MODEL = "tiny"
DTYPE = "float32"
"""Type of the servers whose tokens are compared: bfloat16 may round the last bits of a decode and of a prefill
differently."""
LAYER_BYTES = 2 * 2 * 64 * BLOCK_TOKENS * 4
"""Size of one block of one layer in bytes: keys and values, 2 heads of 64 numbers, in float32."""
HOLD_S = 20.0
"""Time for which the prefill server keeps blocks that are not fetched, in seconds: longer than a decode server takes to
fetch them on a machine with few cores."""


@dataclass
class Server:
    """One `vllm serve` process group."""

    name: str
    ports: list[int]
    """Ports of HTTP, KV events, their replay, and, on a prefill server, KV or the bootstrap server."""
    process: Started
    log: Path
    fault_file: Path

    @property
    def url(self) -> str:
        """The URL without a path."""
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def events(self) -> str:
        """Address of the KV events."""
        return f"tcp://127.0.0.1:{self.ports[1]}"

    @property
    def replay(self) -> str:
        """Address of the replay of KV events."""
        return f"tcp://127.0.0.1:{self.ports[2]}"

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def ready(self) -> bool:
        """Return whether the server answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0):
                return True
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        """Send and receive JSON."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read()
        content: dict[str, Any] = json.loads(text) if text else {}
        return content

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have `labels`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples if all(label in line for label in wanted))

    def kill(self) -> None:
        """Kill the whole process group at once."""
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Pair:
    """The servers: one for prefill and two for decode, which tests may kill, and one `alone`."""

    model: Path
    folder: Path
    prefill: Server
    decode: Server
    other: Server
    alone: Server
    """A server without connector and without prefix cache: it computes all of every prompt, and shows how it renders
    prompts."""
    hold_s: float = HOLD_S
    protocol: KvProtocol = "vllm"
    start: Callable[[str, str, Path, Path, list[int]], Server] | None = None
    """Starts a member, given role of the connector, name, model, folder and ports; None: `start_member` does."""

    @property
    def servers(self) -> list[Server]:
        """The servers of the cluster."""
        return [self.prefill, self.decode, self.other]

    @property
    def python(self) -> Path:
        """The Python of vLLM's environment."""
        return BIN / "python"

    def environment(self) -> dict[str, str]:
        """Return the environment of vLLM's processes."""
        return environment()

    def restart_dead_servers(self) -> None:
        """Start dead servers again on their old ports."""
        if not self.prefill.alive:
            self.prefill = self._started_again("kv_producer", self.prefill)
        if not self.decode.alive:
            self.decode = self._started_again("kv_consumer", self.decode)
        if not self.other.alive:
            self.other = self._started_again("kv_consumer", self.other)
        wait_ready(self.servers)

    def _started_again(self, role: str, dead: Server) -> Server:
        start = self.start or start_member
        return start(role, dead.name, self.model, self.folder, dead.ports)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without connector and without prefix cache; it may still be starting."""
    if not (BIN / "vllm").exists():
        missing("vLLM is not installed: run tests/live/vllm/install.sh")
    folder = tmp_path_factory.mktemp("reference")
    model = make_model(folder)
    server = start("alone", model, folder, free_ports(3), ["--no-enable-prefix-caching", "--enable-scale-out"])
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, reference: Server) -> Iterator[Pair]:
    """All servers with kvroute's connector; their logs are in pytest's temporary folder."""
    folder = tmp_path_factory.mktemp("vllm")
    model = reference.log.parent / "model"
    prefill = start_member("kv_producer", "prefill0", model, folder)
    decode, other = (start_member("kv_consumer", name, model, folder) for name in ("decode0", "decode1"))
    servers = Pair(model, folder, prefill, decode, other, reference)
    with ready_until_done(servers):
        yield servers


@contextmanager
def ready_until_done(pair: Pair) -> Iterator[None]:
    """Wait until all servers of a pair answer; kill its members at the end."""
    try:
        wait_ready([*pair.servers, pair.alone])
        yield
    finally:
        for server in pair.servers:
            server.kill()


def make_model(folder: Path, *sizes: int, script: str = "make_model") -> Path:
    """Create the tiny model in a folder; return its own folder. Args: `sizes` are width and layers of another one;
    `script` is the module that makes it."""
    model = folder / "model"
    command = [str(BIN / "python"), "-m", f"tests.live.vllm.{script}", str(model), *map(str, sizes)]
    making = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert making.returncode == 0, making.stderr
    return model


@pytest.fixture
def pair(cluster: Pair) -> Pair:
    """All servers, up and without an injected fault."""
    cluster.prefill.fault_file.unlink(missing_ok=True)
    cluster.restart_dead_servers()
    return cluster


def start_member(
    role: str,
    name: str,
    model: Path,
    folder: Path,
    ports: list[int] | None = None,
    dtype: str = DTYPE,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    **more: Any,
) -> Server:
    """Start a server of the cluster in `role` (`kv_producer` or `kv_consumer`); it is not ready yet. Args: `options` of
    vLLM; `variables` are added to its environment; `more` are options of the connector."""
    ports = ports or free_ports(4)
    connector = {
        "kv_connector": "KvrouteConnector",
        "kv_connector_module_path": "kvroute_engine.connector.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "token_env": "KVROUTE_TEST_TOKEN",
            "instance": name,
            "timeout_s": 5.0,
            "hold_s": HOLD_S,
            "dscp": {"kv": 10},
            "fault_file": str(folder / f"{name}.fault"),
            "layerwise": role == "kv_producer",
            "port": ports[3],
            **more,
        },
    }
    return start(name, model, folder, ports, [*connector_options(connector, name, ports), *options], dtype, variables)


def connector_options(connector: dict[str, Any], name: str, ports: list[int]) -> list[str]:
    """Return the options of a server with a connector, and with KV events on its ports."""
    publisher = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # vLLM binds to an address with a star, and connects to any other one.
        "endpoint": f"tcp://*:{ports[1]}",
        "replay_endpoint": f"tcp://*:{ports[2]}",
        "topic": f"kv@{name}",
    }
    return ["--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(publisher)]


def start(
    name: str,
    model: Path,
    folder: Path,
    ports: list[int],
    options: list[str],
    dtype: str = DTYPE,
    variables: Mapping[str, str] | None = None,
) -> Server:
    """Start a server; it is not ready yet. Prompts of more than 2,048 tokens are computed in chunks. Args: `variables`
    are added to its environment."""
    arguments = [
        *("serve", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(ports[0]), "--dtype", dtype, "--max-model-len", "4096"),
        *("--max-num-seqs", "32", "--max-num-batched-tokens", "2048", "--enforce-eager"),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
        *("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *options),
    ]
    log = folder / f"{name}.log"
    # Several API servers share metrics by a setting that prometheus_client reads while it is imported.
    fresh = "--data-parallel-size" in options
    process = preloaded().start(arguments, {**environment(), **(variables or {})}, folder, log, fresh=fresh)
    return Server(name, ports, process, log, folder / f"{name}.fault")


@cache
def preloaded() -> Preloaded:
    """Return the process whose forks are the servers of this test session."""
    return Preloaded(BIN / "python", environment())


def pytest_sessionfinish() -> None:
    """End the process that has imported vLLM."""
    if preloaded.cache_info().currsize:
        preloaded().close()


def environment() -> dict[str, str]:
    """Return an environment that is quiet, offline and single-threaded; the connector comes from this checkout."""
    quiet = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "KVROUTE_TEST_TOKEN": "a secret of the tests",
    }
    return os.environ | quiet | {"PYTHONPATH": str(ROOT / "engine/src")}


def wait_ready(servers: list[Server]) -> None:
    """Wait until all answer; if a process ends before, fail with the tail of its log."""
    deadline = time.monotonic() + READY_S
    waiting = list(servers)
    while waiting:
        for server in list(waiting):
            if not server.alive or time.monotonic() > deadline:
                tail = server.log.read_text(encoding="utf-8", errors="replace")[-4000:]
                pytest.fail(f"{server.name} did not come up; {server.log} ends:\n{tail}")
            if server.ready():
                waiting.remove(server)
        time.sleep(0.25)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now and outside the range that the kernel assigns while a server starts."""
    first_assigned = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    ports: list[int] = []
    for port in random.sample(range(10_000, first_assigned), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError("no free ports")


@pytest.fixture(scope="session")
def all_reduce_components() -> None:
    """Tests of all-reduces need vLLM's environment, root, clang and libbpf."""
    if not (BIN / "python").exists():
        missing("vLLM is not installed: run tests/live/vllm/install.sh")
    try:
        with star(1):
            pass
    except (XdpUnavailable, namespaces.Unavailable) as error:
        missing(str(error))
