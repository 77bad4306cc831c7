"""Agents on emulated engines whose storage reads cross limited NICs: `python -m bench.storage_nics.emulated`.

The cluster of examples/dualpath.yaml with storage NICs of 10 Gbps, at 0.4 % of its bandwidth and KV size, so that a
small machine keeps up with all packets: one prefill and two decode engines, each a process in a network namespace of
its own with a storage NIC (token bucket), and Redis as the store. The agents are those of `bench.gateway.storage`. The
rows compare the turns per second of the read paths with the prefill node alone, and the bytes that each NIC has
received, as the kernel counts them. The notes have the prediction of the simulator. Root only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
import yaml
from bench.gateway.program import Program, served
from bench.gateway.storage import EXAMPLE, READS, Outcome, predicted, rows, run_agents
from bench.measurement import Failed, show
from bench.storage_nics.network import STORE_PORT, StorageNics
from bench.wan.network import Unavailable

from kvroute import llm

NAMES = ("prefill0", "decode0", "decode1")
KV_SCALE = 4e-3
"""Real bytes per modelled byte of KV."""
BLOCK_TOKENS, HEADER_BYTES = 64, 4096
NIC_GBPS = 10
KVROUTE = str(Path(sys.executable).with_name("kvroute"))


def block_bytes() -> float:
    """Return the real size of a block, without the header of the store."""
    return float(llm.model("deepseek-v3.2").block_bytes(BLOCK_TOKENS)) * KV_SCALE


def nic_bits_per_s() -> float:
    """Return the rate of a token bucket: KV crosses it at the scaled rate of the file, headers of blocks beside it."""
    return NIC_GBPS * 1e9 * KV_SCALE * (1 + HEADER_BYTES / block_bytes())


@dataclass
class Engines:
    """The running engines, and the network of their storage NICs."""

    network: StorageNics
    folder: Path
    programs: dict[str, Program] = field(default_factory=dict)
    endpoints: dict[str, Any] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start an engine on its node."""
        number = NAMES.index(name)
        store = f"redis://{self.network.store_address(number)}:{STORE_PORT}/0"
        command = [KVROUTE, "emulate", str(EXAMPLE), "--instance", name, "--host", self.network.address(number)]
        command += ["--kv-scale", str(KV_SCALE), "--block-tokens", str(BLOCK_TOKENS), "--store", store]
        with self.network.node(number):
            self.programs[name] = Program(command, name=name)
        self.endpoints[name] = self.programs[name].document()["instances"][name]

    def end(self, name: str) -> None:
        """End an engine at once."""
        self.programs[name].end()

    def log(self, reads: str) -> Path:
        """Return the path of the event log of a gateway."""
        return self.folder / f"{reads}.log"

    def cluster(self, reads: str, *, logged: bool = False) -> Path:
        """Write the cluster file with one read path, and return its path."""
        document = yaml.safe_load(EXAMPLE.read_text())
        document["storage"]["reads"] = reads
        document["gateway"]["prompt"] = {"block_tokens": BLOCK_TOKENS}
        if logged:
            document["gateway"]["log"] = {"events": str(self.log(reads))}
        for node in document["nodes"]:
            node["nics"]["storage"]["capacity"] = f"{NIC_GBPS} Gbps"
        for instance in document["instances"]:
            instance["endpoint"] = self.endpoints[instance["name"]]
        path = self.folder / f"{reads}.yaml"
        path.write_bytes(msgspec.json.encode(document))
        return path


@contextmanager
def engines(folder: Path) -> Iterator[Engines]:
    """Run the store and all engines.

    Raises:
        Unavailable: the machine cannot provide such a network.
        Failed: a program does not start.
    """
    redis = shutil.which("redis-server")
    if redis is None:
        raise Unavailable("there is no redis-server")
    with StorageNics(len(NAMES), nic_bits_per_s()) as network, ExitStack() as stack:
        with network.store():
            command = [redis, "--port", str(STORE_PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
            store = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
        stack.callback(store.wait)
        stack.callback(store.kill)
        running = Engines(network, folder)
        for name in NAMES:
            running.start(name)
            stack.callback(running.end, name)
        yield running


@contextmanager
def gateway(running: Engines, reads: str, *, logged: bool = False) -> Iterator[tuple[Program, Path]]:
    """Run `kvroute serve` with one read path; yield the program and its ready file."""
    ready = running.folder / f"{reads}.ready.json"
    for old in (ready, running.log(reads)):
        old.unlink(missing_ok=True)
    command = [KVROUTE, "serve", str(running.cluster(reads, logged=logged)), "--port", "0", "--admin-port", "0"]
    with Program([*command, "--ready-file", str(ready)], name="kvroute") as program:
        yield program, ready


async def measured(running: Engines, reads: str, agents: int, turns: int) -> Outcome:
    """Run the agents with one read path, on engines and a store without any KV."""
    with gateway(running, reads) as (program, ready):
        addresses = await served(ready, program)
        before = running.network.received_bytes()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            rate_per_s, cached_share = await run_agents(session, addresses["url"], agents, turns)
        after = running.network.received_bytes()
    received = {name: float(now - then) for name, now, then in zip(NAMES, after, before, strict=True)}
    return Outcome(reads, rate_per_s, received, cached_share, predicted(running.cluster(reads), agents, turns))


def outcomes(agents: int, turns: int) -> list[Outcome]:
    """Run every read path. Raises Failed if the network cannot be built, or a turn fails."""
    found = []
    for reads in READS:
        with tempfile.TemporaryDirectory() as name:
            try:
                with engines(Path(name)) as running:
                    found.append(uvloop.run(measured(running, reads, agents, turns)))
            except Unavailable as error:
                raise Failed(str(error)) from None
    return found


def main() -> None:
    """Run every read path in turn; print rows or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    given = parser.parse_args()
    show(rows(outcomes(given.agents, given.turns), "shaped NICs"), given.json)


if __name__ == "__main__":
    main()
