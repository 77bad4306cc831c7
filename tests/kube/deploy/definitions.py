"""Writes the CustomResourceDefinitions to deploy/crds: `python -m tests.kube.deploy.definitions`."""

from __future__ import annotations

from pathlib import Path

from kvroute.kube.resources.crd import definition_text, definitions

FOLDER = Path(__file__).resolve().parents[3] / "deploy/crds"

if __name__ == "__main__":
    for definition in definitions():
        (FOLDER / f"{definition['metadata']['name']}.yaml").write_text(definition_text(definition), encoding="utf-8")
