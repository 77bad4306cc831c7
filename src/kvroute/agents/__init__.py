"""Central scheduler of all-reduce schemes, and the agents that connect it to servers and switches."""
