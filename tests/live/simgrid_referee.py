"""SimGrid as reference: reads a JSON list of flow scenarios on stdin, prints a JSON list of their completion times.

Runs under the Python that has SimGrid's bindings. A process can have only one engine, so every scenario has its own
process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, this_actor

FLAGS = [
    "--log=root.threshold:critical",
    "--cfg=contexts/factory:thread",
    "--cfg=network/model:CM02",
    "--cfg=network/bandwidth-factor:1.0",
    "--cfg=network/latency-factor:1.0",
    "--cfg=network/weight-S:0.0",
    "--cfg=network/TCP-gamma:0",
    "--cfg=network/crosstraffic:0",
    "--cfg=network/optim:Full",
    "--cfg=surf/precision:1e-9",
    "--cfg=maxmin/precision:1e-9",
]
"""Plain max-min: no TCP effects, no latency."""


def completion_times_s(scenario: dict[str, Any]) -> list[float]:
    """Simulate a scenario in which every flow has two hosts of its own and a route over its links."""
    engine = Engine(["referee", *FLAGS])
    zone = NetZone.create_full_zone("fabric")
    links = {link["id"]: zone.create_link(link["id"], link["capacity_Bps"]).seal() for link in scenario["links"]}
    ends_s = [0.0] * len(scenario["flows"])

    def send(k: int, source: Any, target: Any) -> None:
        flow = scenario["flows"][k]
        this_actor.sleep_until(flow["start_s"])
        Comm.sendto(source, target, flow["size_B"])
        ends_s[k] = Engine.clock

    hosts = []
    for k, flow in enumerate(scenario["flows"]):
        source, target = (zone.create_host(f"{side}{k}", 1e9).seal() for side in ("source", "target"))
        route = [LinkInRoute(links[link]) for link in flow["links"]]
        zone.add_route(source.netpoint, target.netpoint, None, None, route, False)
        hosts.append((source, target))
    zone.seal()
    for k, (source, target) in enumerate(hosts):
        Actor.create(f"flow{k}", source, send, k, source, target)
    engine.run()
    return ends_s


def in_own_process(scenario: dict[str, Any]) -> list[float]:
    """Fork, simulate in the child, and read its result."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        with os.fdopen(writer, "w") as pipe:
            json.dump(completion_times_s(scenario), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer: list[float] = json.load(pipe)
    os.wait()
    return answer


if __name__ == "__main__":
    json.dump([in_own_process(scenario) for scenario in json.load(sys.stdin)], sys.stdout)
