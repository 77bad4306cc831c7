"""The fuzzing targets by name, and their seed corpora."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
TARGETS: Mapping[str, str] = {
    "client_http": "bytes of a client's connection",
    "engine_http": "bytes of an engine's response",
    "kv_wire": "frames between KV connectors",
    "kv_events": "batches of KV events",
    "metrics_text": "an engine's /metrics pages",
    "cluster_file": "a cluster file",
}


def corpus(target: str) -> list[Path]:
    """Return the seeds of a target and the inputs of its earlier findings."""
    return sorted(path for path in (CORPUS / target).iterdir() if path.is_file())
