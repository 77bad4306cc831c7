"""Renders the Helm chart, and writes the kustomize base from it: `python -m tests.kube.deploy.rendering`.

Rendering needs the package helm-python-sdk of the group `live`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.kube.resources.router_examples import Manifest

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/helm/kvroute"
BASE = ROOT / "deploy/kustomize/base/kvroute.yaml"
MONITORING = ROOT / "deploy/kustomize/monitoring/monitoring.yaml"
NAMESPACE = "kvroute-system"
_HEADER = "# Written by `make manifests` from deploy/helm/kvroute.\n"


def rendered(values: dict[str, Any] | None = None, template: str = "") -> list[Manifest]:
    """Return the objects that the chart makes with these values, of all templates or of one."""
    import helm_python as helm

    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values or {})
        texts: dict[str, str] = chart.render(values or {}, name="kvroute", namespace=NAMESPACE)
    chosen = [text for name, text in sorted(texts.items()) if name.endswith(".yaml") and template in name]
    return [obj for text in chosen for obj in yaml.safe_load_all(text) if obj]


def without_helm(objects: list[Manifest]) -> list[Manifest]:
    """Return the objects without what only Helm uses, and without CustomResourceDefinitions."""
    kept = [obj for obj in objects if obj["kind"] != "CustomResourceDefinition"]
    for obj in kept:
        _remove_labels(obj)
    return kept


def base_text() -> str:
    """Return the kustomize base."""
    return _text(without_helm(rendered()))


def monitoring_text() -> str:
    """Return the kustomize component with alert rules and dashboard."""
    values = {"monitoring": {"rules": True, "dashboard": True}}
    return _text(without_helm(rendered(values, "monitoring.yaml")))


def _text(objects: list[Manifest]) -> str:
    return _HEADER + yaml.safe_dump_all(objects, sort_keys=False, width=120, allow_unicode=True)


def _remove_labels(value: Any) -> None:
    if isinstance(value, dict):
        labels = value.get("labels")
        if isinstance(labels, dict):
            labels.pop("app.kubernetes.io/managed-by", None)
        for item in value.values():
            _remove_labels(item)
    elif isinstance(value, list):
        for item in value:
            _remove_labels(item)


if __name__ == "__main__":
    BASE.write_text(base_text(), encoding="utf-8")
    MONITORING.write_text(monitoring_text(), encoding="utf-8")
