"""A cluster's network on this machine: namespaces, cables, routes, queues, delay lines and background traffic."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Network

import msgspec

from kvroute.testbed import namespaces
from kvroute.testbed.delay import LEAST_S
from kvroute.testbed.programs import Programs
from kvroute.testbed.queues import QUEUE_BYTES, Discipline, Limit, leaves_of, lines, packets
from kvroute.testbed.runs import ADDRESSES, NamedTestbed, addresses
from kvroute.testbed.wiring import HUB, Wiring, background_ends, wire
from kvroute.topology import Cluster
from kvroute.types import SAME_NODE, TIER_COUNT, InputError

CONTROL = "cubic"
"""TCP congestion control between hosts, whatever the machine's own is. BBR is not suitable: it measures paths, and
these have round trips of microseconds behind queues of many milliseconds."""
_LATER = 200
"""Routing table of packets that have passed a delay line."""
_OUTSIDE, _HUB = 1, 2
"""Indices of the addresses at the two ends of the device that leads outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """How a cluster is built as a testbed."""

    scale: float = 1e-3
    """Factor for rates and for KV bytes alike, so that durations are true."""
    queues: Discipline = "fair"
    background: tuple[float, ...] = (0.0,) * TIER_COUNT
    """Share of every link of a tier that real background traffic uses."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise InputError(f"a scale of {self.scale:g}", where="--scale", hint="give more than 0, at most 1")
        if len(self.background) != TIER_COUNT or any(not 0 <= share < 1 for share in self.background):
            raise InputError(f"background is {self.background}", hint=f"give {TIER_COUNT} shares in [0, 1)")


@dataclass(slots=True)
class NamespaceNetwork:
    """Network of one testbed. `NamedTestbed.remove` removes it.

    Raises:
        InputError: by every method: no root, a missing tool or kernel feature, a cluster that cannot be wired.
    """

    run: NamedTestbed
    cluster: Cluster
    build: Build
    programs: Programs
    wiring: Wiring = field(init=False)
    addresses: IPv4Network = field(init=False)

    def check(self) -> None:
        """Check that the network can be built, before anything is created.

        Raises:
            InputError: also if a testbed of this name exists.
        """
        namespaces.check()
        if remains := self.run.remains():
            hint = f"run `kvroute testbed down --name {self.run.name}` first"
            raise InputError(f"testbed {self.run.name} already exists ({remains[0]})", hint=hint)
        self.check_wiring()

    def check_wiring(self) -> None:
        """Check only the cluster, and set `wiring`."""
        self.wiring = wire(self.cluster, ADDRESSES)
        dict(self._limits())

    def lay(self) -> None:
        """Create namespaces, cables, routes, queues and background traffic. Call `check` first."""
        with addresses(self.run) as found:
            self.addresses, self.wiring = found, wire(self.cluster, found)
            limits = dict(self._limits())
            self.run.folder.mkdir()
            for number, place in enumerate((HUB, *self.wiring.places)):
                namespaces.make(self.run.namespace(place), 1 + 1009 * self.build.seed + number, self._window_bytes())
            self._join_outside()
        self._join()
        self._delay()
        for place in self.wiring.places:
            name = self.run.namespace(place)
            namespaces.batch(name, "ip", self._inside(place))
            window = self._window_bytes()
            shaping = (
                line
                for end in self.wiring.ends_at(place)
                for line in lines(*limits[end.link], window, leaves_of(end.equal))
            )
            namespaces.batch(name, "tc", shaping)
        self._others()

    def _window_bytes(self) -> float:
        """Return the maximum bytes in flight of a connection.

        They keep the longest path busy and do not overflow the connection's own queue. Networks for KV caches lose no
        packets, and a loss would cost a short transfer more time than the transfer itself takes.
        """
        rates = [end.bytes_per_s for end in self.wiring.ends if end.tier > SAME_NODE]
        rtt_s = 2 * max(self.wiring.latency_s.values(), default=0.0)
        return max(QUEUE_BYTES, 4 * rtt_s * max(rates, default=0.0) * self.build.scale)

    def _limits(self) -> Iterator[tuple[int, tuple[str, Limit, Discipline]]]:
        for end in self.wiring.ends:
            limit = Limit.of(end.bytes_per_s, self.build.scale, self.build.background[end.tier])
            yield end.link, (end.device, limit, self.build.queues)

    def _join_outside(self) -> None:
        """Create the device that leads from outside to the hub."""
        hub, device = self.run.namespace(HUB), self.run.device
        here, there = self.addresses[_OUTSIDE], self.addresses[_HUB]
        namespaces.run("ip", "link", "add", device, "type", "veth", "peer", "name", "out", "netns", hub)
        namespaces.run("ip", "address", "add", str(here), "peer", str(there), "dev", device)
        namespaces.run("ip", "link", "set", device, "up")
        namespaces.run("ip", "route", "add", str(self.addresses), "via", str(there), "dev", device)
        up = ("link set lo up", f"address add {there} peer {here} dev out", "link set out up")
        namespaces.batch(hub, "ip", up)

    def _join(self) -> None:
        """Create the cables between places, and one from the hub to every host."""
        pairs = [(cable.up.device, cable.up.place, cable.down.device, cable.down.place) for cable in self.wiring.cables]
        pairs += [(f"h{n}", HUB, "hub", host.name) for n, host in enumerate(self.wiring.hosts)]
        namespace = self.run.namespace
        namespaces.run(
            "ip",
            "-batch",
            "-",
            text="".join(
                f"link add {a} netns {namespace(here)} type veth peer name {b} netns {namespace(there)}\n"
                for a, here, b, there in pairs
            ),
        )
        hub = []
        for number, host in enumerate(self.wiring.hosts):
            hub += [f"link set h{number} up", f"route add {host.address}/32 dev h{number}"]
        namespaces.batch(namespace(HUB), "ip", hub)

    def _inside(self, place: str) -> Iterator[str]:
        """Yield the `ip` commands for a place's devices, addresses and routes."""
        wiring = self.wiring
        yield "link set lo up"
        ends = {end.link: end for end in wiring.ends_at(place)}
        for end in ends.values():
            yield f"address add {end.address}/31 dev {end.device}"
            # Queues that take turns by packets would count a bundle of segments as one packet.
            yield f"link set {end.device} gso_max_segs 1 txqueuelen {packets(self._window_bytes())} up"
        host = next((host for host in wiring.hosts if host.name == place), None)
        source = ""
        if host is not None:
            # Set by route: a namespace may not choose a congestion control that the machine does not allow to all.
            source = f" src {host.address} congctl {CONTROL}"
            yield f"address add {host.address}/32 dev lo"
            yield "link set hub up"
            out = f"via {self.addresses[_HUB]} dev hub onlink"
            yield f"route add {self.addresses[_OUTSIDE]}/32 {out} src {host.address}"
        for far in wiring.hosts:
            if (place, far.name) in wiring.neighbours:
                yield f"route add {far.address}/32 via {self.addresses[_HUB]} dev hub onlink{source}"
            elif links := wiring.routes.get((place, far.name)):
                hops = [f"nexthop via {ends[link].beyond} dev {ends[link].device}" for link in links]
                out = " ".join(hops) if len(hops) > 1 else hops[0].removeprefix("nexthop ")
                if host is not None and (delay_s := self.delay_s(place, far.name)):
                    yield f"route add {far.address}/32 {out} table {_LATER}"
                    out = f"dev {self._delays()[place, delay_s]}"
                yield f"route add {far.address}/32{source} {out}"

    def delay_s(self, source: str, target: str) -> float:
        """Return the delay that a line adds in one direction between two hosts, in seconds; 0 if it needs no line."""
        latency_s = self.wiring.latency_s[source, target]
        return latency_s if latency_s >= LEAST_S else 0.0

    def _delays(self) -> dict[tuple[str, float], str]:
        """Return the device of each host and delay, numbered within the host."""
        found: dict[tuple[str, float], str] = {}
        for source, target in self.wiring.latency_s:
            key = source, self.delay_s(source, target)
            if key[1] and key not in found:
                found[key] = f"d{sum(host == source for host, _ in found)}"
        return found

    def _delay(self) -> None:
        """Create delay lines for hosts that are far from others. Packets that leave a line take the normal route."""
        delays = self._delays()
        if not delays:
            return
        plan, ready = self.run.folder / "lines.json", self.run.folder / "delay.json"
        plan.write_bytes(
            msgspec.json.encode([(self.run.namespace(host), name, s) for (host, s), name in delays.items()])
        )
        command = [sys.executable, "-m", "kvroute.testbed.delay", str(plan), str(ready)]
        self.programs.wait_ready(self.programs.begin(command, "delay"), ready)
        for (host, _), name in delays.items():
            namespace = self.run.namespace(host)
            namespaces.accept_own(namespace, name)
            up = (f"link set {name} txqueuelen 10000 up", f"rule add iif {name} lookup {_LATER} priority 100")
            namespaces.batch(namespace, "ip", up)

    def _others(self) -> None:
        """Start the background traffic, if requested."""
        loaded = background_ends(self.wiring, self.build.background)
        if loaded:
            limits = dict(self._limits())
            plan = [
                (self.run.namespace(end.place), str(end.beyond), limits[end.link][1].bits_per_s * share / 8)
                for end, share in loaded
            ]
            sinks = sorted({self.run.namespace(self._beyond(end.link)) for end, _ in loaded})
            path = self.run.folder / "others.json"
            path.write_bytes(msgspec.json.encode((plan, sinks)))
            self.programs.begin([sys.executable, "-m", "kvroute.testbed.others", str(path)], "others")

    def _beyond(self, link: int) -> str:
        for cable in self.wiring.cables:
            if link in (cable.up.link, cable.down.link):
                return cable.down.place if link == cable.up.link else cable.up.place
        raise AssertionError(link)
