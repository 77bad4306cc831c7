"""Names that help pages list, written out so that a page imports neither policies nor traces; a test compares them."""

from __future__ import annotations

DECODE_POLICIES = (
    "round-robin", "load-aware", "cache-aware", "cla", "dualpath", "soft-topology", "netkv-topo", "netkv-static",
    "netkv", "netkv-queued", "foresight", "foresight-closed", "foresight-joint",
)  # fmt: skip
DEFAULT_DECODE_POLICY = "foresight-joint"
PREFILL_POLICIES = ("round-robin", "least-loaded", "cache-aware", "dualpath")
PROFILES = ("chatbot", "rag", "long-context")
READINGS = ("paper", "literal", "realistic")
GROUPINGS = ("milp", "greedy", "paper")
THINK_MAX_S = 60.0
