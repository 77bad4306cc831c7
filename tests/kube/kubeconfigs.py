"""Kubeconfigs for tests."""

from __future__ import annotations

import json
from pathlib import Path


def kubeconfig(folder: Path, url: str, user: dict[str, str] | None = None) -> Path:
    """Write a kubeconfig for a server."""
    path = folder / "kubeconfig"
    document = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": "llm"}}],
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": user or {}}],
    }
    path.write_text(json.dumps(document))
    return path
