"""Ethernet frames of workers, to run the switch's XDP program on without a network."""

from __future__ import annotations

import json
import struct

from bench.all_reduce.star import PORT

from kvroute.testbed import namespaces
from kvroute_engine.switch.xdp import PacketSource

_HEADERS = struct.Struct("!6s6sHBBHHHBBH4s4sHHHH")


def veth_peers(workers: int) -> list[PacketSource]:
    """Create interfaces p0, p1, ... in the thread's own namespace; return addresses of one worker behind each."""
    for worker in range(workers):
        namespaces.run("ip", "link", "add", f"p{worker}", "type", "veth", "peer", "name", f"x{worker}")
    index = {load["ifname"]: load["ifindex"] for load in json.loads(namespaces.run("ip", "-json", "link"))}
    return [PacketSource(f"10.0.{w}.2", 4000 + w, index[f"p{w}"], f"10.0.{w}.1") for w in range(workers)]


def frame(peer: PacketSource, payload: bytes) -> bytes:
    """Return an Ethernet frame from a worker to the switch."""
    source, target = (bytes(map(int, address.split("."))) for address in (peer.host, peer.local))
    macs = bytes(5) + bytes([1]), bytes(5) + bytes([2 + peer.port % 100])
    ip = (0x45, 0, 28 + len(payload), 0, 0x4000, 64, 17, 0, source, target)
    return _HEADERS.pack(*macs, 0x0800, *ip, peer.port, PORT, 8 + len(payload), 0) + payload
