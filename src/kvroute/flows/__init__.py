"""Max-min fair sharing of links by transfers: one solver for the simulator, the planner and what-if queries."""

from kvroute.flows.fairness import fill_to_the_end, max_min_rates
from kvroute.flows.network import FlowId, FlowNetwork, LinkId
from kvroute.flows.scenario import FlowScenario, completion_times, parse_scenario, read_scenario
from kvroute.flows.sets import FlowSet
from kvroute.flows.tcp import connection_bytes_per_s, slow_start_s

__all__ = [
    "FlowId",
    "FlowNetwork",
    "FlowScenario",
    "FlowSet",
    "LinkId",
    "completion_times",
    "connection_bytes_per_s",
    "fill_to_the_end",
    "max_min_rates",
    "parse_scenario",
    "read_scenario",
    "slow_start_s",
]
