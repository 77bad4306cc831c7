"""The operator: from KvRouters, topologies, nodes and pods to the changes that a cluster needs, and their execution."""
