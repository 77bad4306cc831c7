"""A testbed: a network, engines inside it, and a gateway outside that reaches all of them.

The gateway reaches the engines over a separate network without limits, so the links carry only KV caches.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvroute.testbed.engines import served, unpaced
from kvroute.testbed.network import Build, NamespaceNetwork
from kvroute.testbed.programs import Programs
from kvroute.testbed.runs import NamedTestbed, SavedTestbed
from kvroute.testbed.wiring import Wiring
from kvroute.topology import Cluster
from kvroute.types import Endpoint


@dataclass(slots=True)
class Testbed:
    """Testbed of one cluster. Its creator calls `remove`; if the creator dies before, `NamedTestbed.remove` removes it.

    Raises:
        InputError: by every method: no root, a missing tool or kernel feature, a cluster that cannot be wired, a
            program that does not get ready.
    """

    run: NamedTestbed
    cluster: Cluster
    build: Build
    network: NamespaceNetwork = field(init=False)
    _programs: Programs = field(init=False)
    _gateway: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._programs = Programs(self.run)
        self.network = NamespaceNetwork(self.run, self.cluster, self.build, self._programs)

    @property
    def wiring(self) -> Wiring:
        """Wiring of its network, available after `check`."""
        return self.network.wiring

    def check(self) -> None:
        """Check that the testbed can be built, before anything is created."""
        self.network.check()

    def lay(self) -> None:
        """Create only the network. Call `check` first."""
        self.network.lay()

    def start_engines(self, more: Sequence[str] = ()) -> dict[str, Endpoint]:
        """Start one process of emulated engines in every host. `more` are further options of `kvroute emulate`."""
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
            answer = self._programs.wait_ready(process, ready)
            found |= msgspec.json.decode(answer, type=dict[str, dict[str, Endpoint]])["instances"]
        return found

    def start_gateway(self, endpoints: Mapping[str, Endpoint], options: Sequence[str] = ()) -> SavedTestbed:
        """Start `kvroute serve` with these options, outside the network, and record that the testbed is up."""
        file, ready = self.run.folder / "cluster.yaml", self.run.folder / "gateway.json"
        file.write_text(served(self.cluster, endpoints).to_yaml(), encoding="utf-8")
        ports = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
        self._gateway = self._programs.begin([*_kvroute("serve"), str(file), *ports, *options], "gateway")
        answer = self._programs.wait_ready(self._gateway, ready)
        found = msgspec.json.decode(answer, type=dict[str, str])
        state = SavedTestbed(
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
        """Stop the gateway. Another one can be started."""
        gateway, self._gateway = self._gateway, None
        assert gateway is not None, "it is already started"
        self._programs.end(gateway)
        (self.run.folder / "gateway.json").unlink()

    def remove(self) -> None:
        """Remove everything."""
        self.run.remove()
        self._programs.forget()

    def leave(self) -> None:
        """Keep everything when this process ends. `NamedTestbed.remove` can remove it later."""
        self._programs.forget(wait=False)


def _kvroute(command: str) -> list[str]:
    return [sys.executable, "-m", "kvroute.cli.app", command]
