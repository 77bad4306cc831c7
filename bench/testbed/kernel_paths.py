"""The links of a connection on a testbed, read from the kernel at every place with several links."""

from __future__ import annotations

import re
from functools import lru_cache

from kvroute.testbed import Testbed
from kvroute.testbed.namespaces import run
from kvroute.testbed.wiring import Host, LinkDevice


class KernelPaths:
    """The links of a running testbed."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._ends: dict[int, LinkDevice] = {end.link: end for end in testbed.wiring.ends}
        self._opposite = {
            here.link: there
            for cable in testbed.wiring.cables
            for here, there in ((cable.up, cable.down), (cable.down, cable.up))
        }
        self._link_of = lru_cache(maxsize=None)(self._query)

    def of(self, source: Host, target: Host, source_port: int, target_port: int) -> list[int]:
        """Return link ids in order for a TCP connection between two hosts of different nodes."""
        place, input_device, path = source.name, "", []
        while place != target.name:
            links = self._testbed.wiring.routes[place, target.name]
            link = links[0]
            if len(links) > 1:
                link = self._link_of(
                    place, input_device, str(source.address), str(target.address), source_port, target_port
                )
            assert link in links, "the kernel uses a link outside the routes"
            path.append(link)
            there = self._opposite[link]
            place, input_device = there.place, there.device
        return path

    def _query(self, place: str, input_device: str, source: str, target: str, sport: int, dport: int) -> int:
        arguments = [
            "route",
            "get",
            target,
            "from",
            source,
            *(["iif", input_device] if input_device else []),
            "ipproto",
            "tcp",
        ]
        arguments += ["sport", str(sport), "dport", str(dport)]
        output = run("ip", "-n", self._testbed.run.namespace(place), *arguments)
        match = re.search(r" dev l(\d+)", output)
        assert match, f"no device in {output!r}"
        return int(match[1])
