"""The examples in the repository, by kind."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PLANS = tuple(sorted([*EXAMPLES.glob("prfaas-*.yaml"), *EXAMPLES.glob("dualpath-*.yaml")]))
NETWORKS = tuple(sorted(EXAMPLES.glob("heroserve-*.yaml")))
"""Cluster files without instances, for `kvroute plan placement`."""
CLUSTERS = tuple(path for path in sorted(EXAMPLES.glob("*.yaml")) if path not in (*PLANS, *NETWORKS))
