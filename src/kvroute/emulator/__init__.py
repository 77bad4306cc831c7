"""Emulated engines without a GPU: the simulator's instances in real time, with real HTTP and real KV bytes over TCP."""

from kvroute.emulator.cluster import EmulatedCluster, EmulatedClusterSpec, EndpointList

__all__ = ["EmulatedCluster", "EmulatedClusterSpec", "EndpointList"]
