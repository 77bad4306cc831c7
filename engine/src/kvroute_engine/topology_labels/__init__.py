"""Topology labels in a worker's container: read from a Downward API volume before the engine starts.

It needs no Kubernetes client and no access to the API server.
"""

from kvroute_engine.topology_labels.files import read_labels
from kvroute_engine.topology_labels.worker import (
    MissingTopology,
    TopologyWorkerSpec,
    engine_environment,
    wait_for_labels,
)

__all__ = ["MissingTopology", "TopologyWorkerSpec", "engine_environment", "read_labels", "wait_for_labels"]
