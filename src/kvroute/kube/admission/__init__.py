"""Admission checks: what may be applied to a cluster, and what engine pods get when they are created."""
