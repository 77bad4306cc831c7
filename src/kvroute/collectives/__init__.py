"""All-reduce schemes (rings, hierarchical rings, in-network aggregation) as sets of flows, and their costs."""

from kvroute.collectives.costs import all_seconds, bound_s, link_bytes, seconds
from kvroute.collectives.iterations import InstanceTraffic, IterationTraffic, instance_traffic, unshared_links
from kvroute.collectives.schemes import (
    INA_SCHEMES,
    Aggregation,
    AllReduce,
    Collective,
    CollectiveFlow,
    all_reduce,
)
from kvroute_engine.agent.schemes import SCHEMES, Scheme

__all__ = [
    "INA_SCHEMES",
    "SCHEMES",
    "Aggregation",
    "AllReduce",
    "Collective",
    "CollectiveFlow",
    "InstanceTraffic",
    "IterationTraffic",
    "Scheme",
    "all_reduce",
    "all_seconds",
    "bound_s",
    "instance_traffic",
    "link_bytes",
    "seconds",
    "unshared_links",
]
