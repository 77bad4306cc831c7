"""A testbed put up and taken down: a network, engines inside, a gateway outside that reaches them all.

The gateway's way to the engines is beside the cluster's network, and without limits: what the links carry is KV caches
alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvroute.testbed.engines import served, unpaced
from kvroute.testbed.network import Build, Network
from kvroute.testbed.programs import Programs
from kvroute.testbed.runs import Run, State
from kvroute.testbed.wiring import Wiring
from kvroute.topology import Cluster
from kvroute.types import Endpoint


@dataclass(slots=True)
class Testbed:
    """One cluster's. Whoever makes it calls `remove`; after a death in between, `Run.remove` does.

    Raises:
        InputError: by every method: no root, no such tool or kernel, a cluster that cannot be wired, a
            program that says nothing.
    """

    run: Run
    cluster: Cluster
    build: Build
    network: Network = field(init=False)
    _programs: Programs = field(init=False)
    _gateway: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._programs = Programs(self.run)
        self.network = Network(self.run, self.cluster, self.build, self._programs)

    @property
    def wiring(self) -> Wiring:
        """Of its network, once that is checked."""
        return self.network.wiring

    def check(self) -> None:
        """That it can be had, before anything is made."""
        self.network.check()

    def lay(self) -> None:
        """The network alone; `check` comes before it."""
        self.network.lay()

    def start_engines(self, more: Sequence[str] = ()) -> dict[str, Endpoint]:
        """One process of emulated engines in every host; `more`: further options of `kvroute emulate`."""
        file = self.run.folder / "engines.yaml"
        file.write_text(unpaced(self.cluster).to_yaml(), encoding="utf-8")
        waits: dict[Path, subprocess.Popen[bytes]] = {}
        for host in self.wiring.hosts:
            ready = self.run.folder / f"{host.program}.json"
            command = ["ip", "netns", "exec", self.run.namespace(host.name), *_kvroute("emulate"), str(file)]
            command += [f"--instance={name}" for name in host.instances]
            command += ["--host", str(host.address), "--ready-file", str(ready)]
            command += ["--kv-scale", repr(self.build.scale), "--seed", str(self.build.seed), *more]
            waits[ready] = self._programs.begin(command, host.program)
        found: dict[str, Endpoint] = {}
        for ready, process in waits.items():
            said = self._programs.heard(process, ready)
            found |= msgspec.json.decode(said, type=dict[str, dict[str, Endpoint]])["instances"]
        return found

    def start_gateway(self, endpoints: Mapping[str, Endpoint], options: Sequence[str] = ()) -> State:
        """`kvroute serve` with these options, outside; writes down that the testbed is up."""
        file, ready = self.run.folder / "cluster.yaml", self.run.folder / "gateway.json"
        file.write_text(served(self.cluster, endpoints).to_yaml(), encoding="utf-8")
        ports = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
        self._gateway = self._programs.begin([*_kvroute("serve"), str(file), *ports, *options], "gateway")
        said = self._programs.heard(self._gateway, ready)
        found = msgspec.json.decode(said, type=dict[str, str])
        state = State(
            run=self.run.name,
            url=found["url"],
            admin=found["admin"],
            cluster=str(file),
            hosts={name: str(host.address) for host in self.wiring.hosts for name in host.instances},
            scale=self.build.scale,
            queues=self.build.queues,
        )
        (self.run.folder / "state.json").write_bytes(msgspec.json.encode(state))
        return state

    def stop_gateway(self) -> None:
        """Another one may come."""
        gateway, self._gateway = self._gateway, None
        assert gateway is not None, "it has been started"
        self._programs.end(gateway)
        (self.run.folder / "gateway.json").unlink()

    def remove(self) -> None:
        """Take everything away."""
        self.run.remove()
        self._programs.forget()

    def leave(self) -> None:
        """Let everything stand when this process ends: it is `Run.remove` that takes it away."""
        self._programs.forget(wait=False)


def _kvroute(command: str) -> list[str]:
    return [sys.executable, "-m", "kvroute.cli.app", command]
