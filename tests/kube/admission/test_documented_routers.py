"""Each KvRouter of the documentation and of deploy/examples passes the admission webhook."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kube.admission.reviews import answers, review
from tests.kube.resources.router_examples import topology

from kvroute.kube.admission.validation import AdmissionView
from kvroute.kube.resources import ClusterTopologySpec, read_spec
from kvroute.kube.resources.resolution import Catalog
from kvroute.serve.config.preflight import deployment_of

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def documented() -> Iterator[Any]:
    """Yield each KvRouter with its place."""
    for path in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy/examples").glob("*.yaml")]):
        text = path.read_text(encoding="utf-8")
        for number, block in enumerate(BLOCK.findall(text) if path.suffix == ".md" else [text]):
            if "kind: KvRouter" in block:
                for found in yaml.safe_load_all(block):
                    if found["kind"] == "KvRouter":
                        yield pytest.param(found, id=f"{path.name}-{number}")


def served(text: str) -> None:
    """Read a cluster file as a gateway does."""
    deployment_of(text, "cluster.yaml", environ=None)


@pytest.mark.parametrize("manifest", list(documented()))
def test_it_is_admitted(manifest: dict[str, Any]) -> None:
    """Its topology has the levels of docs/kubernetes-operator.md."""
    levels = read_spec(topology(zone="x/zone", block="x/block", rack="x/rack"), ClusterTopologySpec)
    view = AdmissionView(Catalog(own={"cluster": levels}), check_file=served)
    [response] = asyncio.run(answers(view, ("validate", review("CREATE", manifest))))
    assert response["allowed"], response["status"]["message"]
