"""A star of network namespaces: workers on shaped, lossy wires to one switch.

Every worker is a host with one interface. Its wire is a bridge in a namespace of its own, which shapes both directions
and drops packets, so both hold for the kernel's data plane, too, which sends past the queues of its interfaces.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvroute.testbed import namespaces
from kvroute.testbed.queues import FRAME_BYTES, QUEUE_BYTES
from kvroute_engine.switch.xdp.libbpf import Map, Program

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PORT = 7300
KV_PORT = 7400
"""TCP port of KV transfers that compete with all-reduces."""
_OTHERS, _UDP, _KV, _SHORT = 2, 3, 4, 5
_SHORT_BYTES = 100
"""Largest frame that passes the queues of data, such as an acknowledgement of TCP. Where acknowledgements wait behind
data of the other direction, TCP sends in bursts, and a link is idle in between."""


@dataclass
class Star:
    """The namespaces, while they exist."""

    prefix: str
    workers: int
    settings: Map
    wire: Program

    @property
    def switch(self) -> str:
        """Namespace of the switch."""
        return f"{self.prefix}switch"

    @property
    def interfaces(self) -> list[str]:
        """Interfaces of the switch, one for each worker."""
        return [f"p{worker}" for worker in range(self.workers)]

    def host(self, worker: int) -> str:
        """Return the namespace of a worker."""
        return f"{self.prefix}w{worker}"

    def address(self, worker: int) -> str:
        """Return the address of a worker."""
        return f"10.77.{worker}.2"

    def switch_address(self, worker: int) -> str:
        """Return the switch's address on a worker's wire."""
        return f"10.77.{worker}.1"

    def lose(self, share: float) -> None:
        """Drop this share of the packets on every wire, in both directions."""
        self.settings.set(struct.pack("=I", 0), struct.pack("=Q", round(share * 1e6)))

    @property
    def lost(self) -> int:
        """Packets that were dropped."""
        found = self.settings.get(struct.pack("=I", 1))
        assert found is not None
        return int(struct.unpack("=Q", found)[0])


@contextmanager
def star(workers: int, bits_per_s: float | None = None) -> Iterator[Star]:
    """Build a star, and remove it at the end. `bits_per_s`: rate of every wire in each direction; None: unlimited."""
    prefix = f"kvr{os.getpid()}-"
    with ExitStack() as cleanup:
        wire = Program(HERE / "wire.c", {})
        cleanup.callback(wire.close)
        found = Star(prefix, workers, wire.map("settings", 8), wire)
        for name in (found.switch, f"{prefix}wires", *(found.host(worker) for worker in range(workers))):
            namespaces.make(name, 1, QUEUE_BYTES)
            cleanup.callback(namespaces.run, "ip", "netns", "del", name)
        for worker in range(workers):
            _wire(found, worker, bits_per_s, cleanup)
        yield found


def _wire(found: Star, worker: int, bits_per_s: float | None, cleanup: ExitStack) -> None:
    wires, host = f"{found.prefix}wires", found.host(worker)
    near, far, port = f"w{worker}", f"s{worker}", f"p{worker}"
    namespaces.run("ip", "link", "add", near, "netns", wires, "type", "veth", "peer", "name", "eth0", "netns", host)
    namespaces.run(
        "ip", "link", "add", far, "netns", wires, "type", "veth", "peer", "name", port, "netns", found.switch
    )
    up = [f"link add b{worker} type bridge", f"link set b{worker} up"]
    up += [line for end in (near, far) for line in (f"link set {end} master b{worker}", f"link set {end} up")]
    namespaces.batch(wires, "ip", up)
    for name, device, address in (
        (host, "eth0", found.address(worker)),
        (found.switch, port, found.switch_address(worker)),
    ):
        lines = [f"address add {address}/24 dev {device}", f"link set {device} gso_max_segs 1 up", "link set lo up"]
        namespaces.batch(name, "ip", lines)
    namespaces.batch(host, "ip", [f"route add default via {found.switch_address(worker)}"])
    with namespaces.inside(wires):
        for end in (near, far):
            cleanup.callback(os.close, found.wire.attach("wire", _index(end)))
    if bits_per_s is not None:
        for end in (near, far):
            namespaces.batch(wires, "tc", _shaping(end, bits_per_s))


def _index(device: str) -> int:
    """Return the index of an interface of the thread's own namespace."""
    return int(json.loads(namespaces.run("ip", "-json", "link", "show", device))[0]["ifindex"])


def _shaping(device: str, bits_per_s: float) -> Iterator[str]:
    """Yield the `tc` lines for a rate that three classes share equally if they want it: UDP, KV transfers, all other
    TCP. Short frames go first."""
    rate, third = f"{round(bits_per_s)}bit", f"{round(bits_per_s / 3)}bit"
    burst = max(2 * FRAME_BYTES, round(bits_per_s * 4e-3 / 8))
    yield f"qdisc add dev {device} root handle 1: htb default {_OTHERS}"
    yield f"class add dev {device} parent 1: classid 1:1 htb rate {rate} ceil {rate} burst {burst} cburst {burst}"
    for number in (_OTHERS, _UDP, _KV, _SHORT):
        first = 0 if number == _SHORT else 1
        leaf = f"htb rate {third} ceil {rate} burst {burst} cburst {burst} quantum {FRAME_BYTES} prio {first}"
        yield f"class add dev {device} parent 1:1 classid 1:{number} {leaf}"
        yield f"qdisc add dev {device} parent 1:{number} bfifo limit {4 * QUEUE_BYTES}"
    program = [
        (0x80, 0, 0, 0),  # ld len
        (0x25, 1, 0, _SHORT_BYTES),  # jgt
        (0x06, 0, 0, 0x1_0000 | _SHORT),  # ret
        (0x30, 0, 0, 23),  # ldb [23]: protocol
        (0x15, 0, 1, 17),  # jeq: UDP
        (0x06, 0, 0, 0x1_0000 | _UDP),  # ret
        (0x28, 0, 0, 34),  # ldh [34]: source port
        (0x15, 2, 0, KV_PORT),  # jeq
        (0x28, 0, 0, 36),  # ldh [36]: target port
        (0x15, 0, 1, KV_PORT),  # jeq
        (0x06, 0, 0, 0x1_0000 | _KV),  # ret
        (0x06, 0, 0, 0x1_0000 | _OTHERS),  # ret
    ]
    code = f"{len(program)}," + ",".join(" ".join(map(str, step)) for step in program)
    yield f"filter add dev {device} parent 1: protocol ip prio 1 bpf bytecode '{code}'"


def start(namespace: str, *command: str, **environment: str) -> subprocess.Popen[str]:
    """Start a Python module or program in a namespace."""
    return _popen(namespace, (sys.executable, *command), os.environ | environment, None)


def start_rank(
    found: Star,
    worker: int,
    command: Sequence[str | Path],
    settings: Path,
    text: str,
    *,
    environment: Mapping[str, str] | None = None,
    log: TextIO | None = None,
) -> subprocess.Popen[str]:
    """Start a rank of PyTorch's backend `kvroute` on a worker.

    `text` is written to `settings`, the file of the backend's settings; SWITCH in it stands for the switch's address
    on the worker's wire. `log`: where stderr goes; None: a pipe.
    """
    settings.write_text(text.replace("SWITCH", f"{found.switch_address(worker)}:{PORT}"), encoding="utf-8")
    own = {"KVROUTE_ALL_REDUCE": str(settings), "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT / "engine/src")}
    return _popen(found.host(worker), [str(word) for word in command], os.environ | own | dict(environment or {}), log)


def _popen(
    namespace: str, command: Sequence[str], environment: Mapping[str, str], log: TextIO | None
) -> subprocess.Popen[str]:
    inside = ["ip", "netns", "exec", namespace, *command]
    stderr = subprocess.PIPE if log is None else log
    return subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


@contextmanager
def switch(found: Star, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `kvroute switch` in its namespace; yield the process and its data plane."""
    process = start(found.switch, "-m", "kvroute.cli.app", "switch", "--host", "0.0.0.0", "--port", str(PORT), *options)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)["data_plane"]
    finally:
        process.terminate()
        process.communicate(timeout=30)


def xdp(found: Star) -> Sequence[str]:
    """Return the options of a switch that uses the kernel's data plane on all its interfaces."""
    return [word for name in found.interfaces for word in ("--interface", name)]
