"""What the core knows of the cluster: pools, caches, transfers, sessions, reads."""
