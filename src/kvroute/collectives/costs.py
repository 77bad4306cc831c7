"""Time of an all-reduce, from the flows of its scheme: on an idle network, or beside other flows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvroute.collectives.schemes import (
    Aggregation,
    AllReduce,
    Collective,
    CollectiveFlow,
    all_reduce,
)
from kvroute.flows import FlowNetwork
from kvroute.topology.cluster import Cluster
from kvroute.types import FloatArray
from kvroute_engine.agent.schemes import SCHEMES, Scheme


def link_bytes(collective: Collective) -> dict[int, float]:
    """Return the bytes that cross each link, by link id in ascending order."""
    found: dict[int, float] = {}
    for flow in collective.flows:
        for link in flow.links:
            found[link] = found.get(link, 0.0) + flow.nbytes
    return dict(sorted(found.items()))


def bound_s(collective: Collective, capacity_bytes_per_s: FloatArray | Mapping[int, float]) -> float:
    """Return the lower bound of the time on these links: the link that needs longest for its bytes, or a flow at its
    ceiling, plus the latency."""
    links_s = [nbytes / capacity_bytes_per_s[link] for link, nbytes in link_bytes(collective).items()]
    flows_s = [flow.nbytes / flow.ceiling_bytes_per_s for flow in collective.flows]
    return float(max(links_s + flows_s)) + collective.latency_s


def seconds(
    collective: Collective,
    capacity_bytes_per_s: FloatArray,
    others: Sequence[CollectiveFlow] = (),
) -> float:
    """Return the time of an all-reduce that starts together with other flows, such as KV transfers, on the same links.

    Rates are max-min fair over all flows. The all-reduce ends with its last flow.

    Args:
        collective: the flows of the all-reduce.
        capacity_bytes_per_s: capacity by link id, each greater than 0.
        others: flows that start at the same time.
    """
    used, network = _network(capacity_bytes_per_s, [*collective.flows, *others])
    for number, flow in enumerate([*collective.flows, *others]):
        path = [used[link] for link in flow.links]
        network.start(number, path, flow.nbytes, ceiling_bytes_per_s=flow.ceiling_bytes_per_s)
    left, now = len(collective.flows), 0.0
    while left:
        upcoming = network.next_finish()
        assert upcoming is not None, "every link has capacity"
        now = upcoming[0]
        left -= sum(1 for number in network.advance(now) if number < len(collective.flows))
    return now + collective.latency_s


def _network(capacity_bytes_per_s: FloatArray, flows: Iterable[CollectiveFlow]) -> tuple[dict[int, int], FlowNetwork]:
    """Return a network of the links that the flows use, and their numbers in it."""
    links = sorted({link for flow in flows for link in flow.links})
    return {link: number for number, link in enumerate(links)}, FlowNetwork(capacity_bytes_per_s[links])


def all_seconds(
    tensor: AllReduce,
    cluster: Cluster,
    aggregation: Aggregation | None,
    schemes: Iterable[Scheme] = SCHEMES,
    others: Sequence[CollectiveFlow] = (),
) -> dict[Scheme, float]:
    """Return the time of an all-reduce with each scheme that the group can use, in the order of `schemes`."""
    found = {scheme: all_reduce(scheme, tensor, cluster, aggregation) for scheme in schemes}
    capacity = cluster.capacity_bytes_per_s
    return {
        scheme: seconds(collective, capacity, others) for scheme, collective in found.items() if collective is not None
    }
