"""Engines without a GPU: the simulator's instances on the wall clock, with real HTTP and real KV bytes over TCP."""
