"""Max-min fair sharing of links by transfers: one solver for the simulator, the planner and what-if questions."""

from kvroute.flows.fairness import max_min_rates
from kvroute.flows.network import FlowId, FlowNetwork, LinkId

__all__ = ["FlowId", "FlowNetwork", "LinkId", "max_min_rates"]
