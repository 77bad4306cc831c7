"""vLLM's own KV connectors on CPUs: servers with them, and what these report about their transfers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.live.services import missing
from tests.live.vllm.conftest import (
    BIN,
    BLOCK_TOKENS,
    HERE,
    LAYER_BYTES,
    ROOT,
    Pair,
    Server,
    connector_options,
    free_ports,
    ready_until_done,
    start,
)

if TYPE_CHECKING:
    from kvroute.types import KvProtocol, Role

LAYERS = 4
_MEBIBYTE = 1 << 20
_LOGGED = re.compile(r"KV Transfer metrics: Num successful transfers=(\d+),.* Avg MB per transfer=([0-9.]+)")


@dataclass(frozen=True)
class StockConnector:
    """One of vLLM's connectors, and how a server on this host is started with it."""

    name: str
    package: str
    """Package that the connector imports."""
    module: str
    """Module beside this one that makes it work on a CPU and injects faults."""
    protocol: KvProtocol
    mover: Role
    """Role of the servers that move the KV, which count it and have the fault file."""
    moved_bytes: Callable[[Server], float]
    """Bytes that a server has moved, by its connector's own count."""
    variables: Callable[[list[int]], Mapping[str, str]]
    """Environment of a server with these ports."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the connector itself."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's settings of a connector."""

    @contextmanager
    def serving(self, folder: Path, alone: Server) -> Iterator[Pair]:
        """Run a prefill and two decode servers in a folder, beside the server `alone`."""
        imports = [str(BIN / "python"), "-c", f"import {self.package}"]
        if (found := subprocess.run(imports, capture_output=True, text=True)).returncode:
            missing(f"vLLM's environment cannot import {self.package}: run `make vllm`\n{found.stderr}")
        model = alone.log.parent / "model"
        roles = {"prefill0": "kv_producer", "decode0": "kv_consumer", "decode1": "kv_consumer"}
        prefill, decode, other = (self.start(role, name, model, folder) for name, role in roles.items())
        pair = Pair(model, folder, prefill, decode, other, alone, protocol=self.protocol, start=self.start)
        with ready_until_done(pair):
            yield pair

    def movers(self, pair: Pair) -> list[Server]:
        """Return the servers that move the KV."""
        return [pair.prefill] if self.mover == "prefill" else [pair.decode, pair.other]

    def moved(self, pair: Pair) -> float:
        """Return the bytes that the servers of the pair have moved."""
        return sum(self.moved_bytes(server) for server in self.movers(pair) if server.alive)

    def inject(self, pair: Pair, fault: str) -> None:
        """Inject `stall` or `corrupt`; empty: remove the fault."""
        for server in self.movers(pair):
            if fault:
                server.fault_file.write_text(fault, encoding="utf-8")
            else:
                server.fault_file.unlink(missing_ok=True)

    def stalled(self, pair: Pair) -> bool:
        """Return whether half of the KV of a request has been moved, and the rest waits."""
        return any(_mark(server).exists() for server in self.movers(pair))

    def forget_stall(self, pair: Pair) -> None:
        """Remove what a server that was killed in a stall has left."""
        for server in self.movers(pair):
            _mark(server).unlink(missing_ok=True)

    def start(self, role: str, name: str, model: Path, folder: Path, ports: list[int] | None = None) -> Server:
        """Start a server; it is not ready yet. Args: as of `conftest.start_member`."""
        ports = ports or free_ports(4)
        connector = {
            "kv_connector": self.name,
            "kv_connector_module_path": self.module,
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"fault_file": str(folder / f"{name}.fault"), **self.options},
            **self.settings,
        }
        variables = {
            "PYTHONPATH": f"{ROOT / 'engine/src'}:{HERE}",
            "VLLM_LOG_STATS_INTERVAL": "1",
            **self.variables(ports),
        }
        return start(name, model, folder, ports, connector_options(connector, name, ports), variables=variables)


def logged_bytes(server: Server) -> float:
    """Return the bytes that a server has moved, by the lines that its connector logs once a second."""
    text = server.log.read_text(encoding="utf-8", errors="replace")
    mebibytes = sum(int(transfers) * float(size) for transfers, size in _LOGGED.findall(text))
    return round(mebibytes * _MEBIBYTE / LAYER_BYTES) * LAYER_BYTES  # the log has three decimals of each mean


def _mark(server: Server) -> Path:
    return server.fault_file.with_suffix(".stalled")


MOONCAKE_TIMEOUT_S = 5
"""Time after which a prefill server frees blocks that no server has asked for. A decode server waits 60 s more."""
MOONCAKE = StockConnector(
    name="MooncakeConnector",
    package="mooncake.engine",
    module="mooncake_on_cpu",
    protocol="mooncake",
    mover="prefill",
    moved_bytes=logged_bytes,  # it has no metrics
    variables=lambda ports: {
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports[3]),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(MOONCAKE_TIMEOUT_S),
        "MC_FORCE_TCP": "1",
    },
    options={"mooncake_protocol": "tcp"},
)
NIXL_LEASE_S = 30
"""Time after which a prefill server frees blocks, even if a decode server is still reading them: longer than a read
takes while other processes use the cores."""
NIXL = StockConnector(
    name="NixlConnector",
    package="nixl._api",
    module="nixl_on_cpu",
    protocol="vllm",
    mover="decode",
    moved_bytes=lambda server: server.metric("vllm:nixl_bytes_transferred_sum"),
    variables=lambda ports: {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[3]),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
    },
    options={"kv_lease_duration": NIXL_LEASE_S},
    settings={"kv_buffer_device": "cpu"},
)
NIXL_PUSH = replace(NIXL, name="NixlPushConnector", mover="prefill", protocol="nixl-push")


def prompt_bytes(tokens: int) -> int:
    """Return the size of the KV cache of a prompt in whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * LAYERS * LAYER_BYTES


def external_tokens(pair: Pair) -> float:
    """Return the prompt tokens that the decode servers have taken from a connector instead of computing them."""
    name, source = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
    return sum(server.metric(name, source=source) for server in (pair.decode, pair.other) if server.alive)
