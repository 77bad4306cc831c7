"""The network cost oracle: the router's view of the network, which is always as old as its last measurements."""

from kvroute.oracle.formulas import effective_bytes_per_s, network_wins, staleness_bound
from kvroute.oracle.links import LinkView
from kvroute.oracle.network import NetworkOracle, at_home
from kvroute.oracle.telemetry import CONGESTION_MAX, OracleSpec

__all__ = [
    "CONGESTION_MAX",
    "LinkView",
    "NetworkOracle",
    "OracleSpec",
    "at_home",
    "effective_bytes_per_s",
    "network_wins",
    "staleness_bound",
]
