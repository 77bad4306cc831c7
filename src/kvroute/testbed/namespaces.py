"""Named network namespaces: created, entered, and configured with `ip` and `tc`. All kernel configuration goes through
it.

Requires root and Linux. All names that it creates have the prefix that the caller gives.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvroute.types import InputError

FOLDER = Path("/run/netns")
_NEWNET = 0x4000_0000
_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSCTLS = {
    "ip_forward": "1",
    "conf/all/rp_filter": "0",
    "conf/default/rp_filter": "0",
    "fib_multipath_hash_policy": "3",
    "fib_multipath_hash_fields": "55",
    "tcp_no_metrics_save": "1",
}
"""Multipath uses addresses, protocol and ports (0x37): policy 1 would use a number internal to the socket, which `ip
route get` does not show. Without `tcp_no_metrics_save` a connection would start with metrics of an earlier one."""
_OPTIONAL = {"tcp_rto_min_us": "10000"}
"""Not in older kernels. Otherwise 200 ms of silence after a lost tail would come from the machine, not from the
network."""


class Unavailable(InputError):
    """This machine cannot have such a network. The message says what is missing."""


def run(*command: str, text: str | None = None) -> str:
    """Run a command and return its output.

    Raises:
        Unavailable: the command failed; contains its error output.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if not line.startswith("Warning")] or ["no error output"]
        raise Unavailable(f"`{' '.join(command)}` failed: {'; '.join(errors[:2])}", hint="use a recent Linux")
    return done.stdout


def check_tools() -> None:
    """Check the minimum requirements: root and iproute2.

    Raises:
        Unavailable: one of them is missing.
    """
    if os.geteuid():
        raise Unavailable("network namespaces need root", hint="run it with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"there is no `{tool}`", hint="install iproute2")


def check() -> None:
    """Check whether this machine supports a testbed. It tries all required features in a namespace without a name.

    Raises:
        Unavailable: not root, or a tool or a part of the kernel is missing.
    """
    check_tools()
    needs = {
        "veth pairs (CONFIG_VETH)": "ip link add one type veth peer name two",
        "htb queues (CONFIG_NET_SCH_HTB)": "tc qdisc add dev one root handle 1: htb default 1",
        "htb classes": "tc class add dev one parent 1: classid 1:1 htb rate 1mbit",
        "bfifo queues (CONFIG_NET_SCH_FIFO)": "tc qdisc add dev one parent 1:1 bfifo limit 9000",
        "BPF filters (CONFIG_NET_CLS_BPF)": "tc filter add dev one parent 1: protocol ip bpf bytecode '1,6 0 0 0'",
        "several routing tables (CONFIG_IP_MULTIPLE_TABLES)": "ip rule add iif one lookup 200 priority 100",
    }
    with nameless():
        for what, command in needs.items():
            try:
                run(*shlex.split(command))
            except Unavailable as error:
                raise Unavailable(f"this kernel has no {what}", where=error.what, hint="load or build it") from None


@contextmanager
def nameless() -> Iterator[None]:
    """Move the calling thread into a new network namespace for the block. The namespace is removed afterwards."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _LIBC.unshare(_NEWNET):
            why = os.strerror(ctypes.get_errno())
            raise Unavailable(f"no network namespace can be created: {why}", hint="run it as root, outside a sandbox")
        yield
    finally:
        _enter(home)
        os.close(home)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Move the calling thread into a namespace for the block. A socket that is created there stays there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(FOLDER / name, os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        yield
    finally:
        _enter(home)
        os.close(home)


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def named(prefix: str) -> list[str]:
    """Return the namespaces whose names begin with `prefix`, ascending."""
    return sorted(path.name for path in FOLDER.glob(f"{prefix}*")) if FOLDER.is_dir() else []


def make(name: str, seed: int, window_bytes: float) -> None:
    """Create a namespace that forwards packets.

    `seed` (1 or more) is for its choices among equal links. Connections into it accept at most `window_bytes` at once.
    """
    run("ip", "netns", "add", name)
    least = min(131_072, round(window_bytes))
    own = {"fib_multipath_hash_seed": str(seed), "tcp_rmem": f"4096 {least} {round(window_bytes)}"}
    with inside(name):
        for key, value in (_SYSCTLS | own).items():
            try:
                Path("/proc/sys/net/ipv4", key).write_text(value, encoding="ascii")
            except OSError as error:
                hint = "use Linux 6.11 or later" if "seed" in key else "load or build it"
                raise Unavailable(f"this kernel has no net.ipv4.{key} ({error.strerror})", hint=hint) from None
        for key, value in _OPTIONAL.items():
            if (path := Path("/proc/sys/net/ipv4", key)).exists():
                path.write_text(value, encoding="ascii")


def accept_own(name: str, device: str) -> None:
    """Let a namespace accept its own packets from a device: they passed through the device on their way out."""
    with inside(name):
        Path("/proc/sys/net/ipv4/conf", device, "accept_local").write_text("1", encoding="ascii")


def batch(name: str, tool: str, lines: Iterable[str]) -> None:
    """Run many `ip` or `tc` commands inside a namespace."""
    if text := "".join(f"{line}\n" for line in lines):
        run(tool, "-n", name, "-batch", "-", text=text)


def links(prefix: str) -> dict[str, tuple[str, ...]]:
    """Return the devices outside all namespaces whose names begin with `prefix`, with their IPv4 addresses."""
    devices: list[Mapping[str, object]] = json.loads(run("ip", "-json", "address", "show") or "[]")
    found = {}
    for device in devices:
        addresses = device.get("addr_info")
        assert isinstance(addresses, list)
        if str(device["ifname"]).startswith(prefix):
            found[str(device["ifname"])] = tuple(
                address["local"] for address in addresses if address["family"] == "inet"
            )
    return found
