"""Manifests in the repository, and their validation against the schemas of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import yaml
from tests.kube.resources.router_examples import Manifest

from kvroute.kube.resources.crd import definitions

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
VERSIONS = ("1.31", "1.34", "1.37")
_OTHERS = {"monitoring.coreos.com", "cert-manager.io", "kustomize.config.k8s.io"}
"""Groups of other projects, which have no schema here."""


def read(path: Path) -> list[Manifest]:
    """Return all objects of a file."""
    return [obj for obj in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader) if obj]


def problems(obj: Manifest, version: str) -> list[str]:
    """Return what a version of Kubernetes finds wrong, unknown fields included."""
    group = obj["apiVersion"].rpartition("/")[0]
    if group in _OTHERS:
        return []
    if group == "kvroute.io":
        return [error.message for error in jsonschema_rs.validator_for(_strict(obj["kind"])).iter_errors(obj)]
    try:
        kubernetes_validate.validate(obj, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error.message)]
    return []


def rules(objects: list[Manifest], kind: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rules of a Role or ClusterRole."""
    [found] = [obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, name)]
    yield from found["rules"]


@cache
def _strict(kind: str) -> dict[str, Any]:
    [schema] = [
        definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for definition in definitions()
        if definition["spec"]["names"]["kind"] == kind
    ]
    return _closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that accepts no unknown field, as the API server does with fieldValidation=Strict."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: _closed(part) for name, part in schema["properties"].items()}
        result["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            result[name] = _closed(schema[name])
    return result
