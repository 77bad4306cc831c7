"""The Helm chart, rendered by Helm itself: valid objects for every value, and the same ones as the kustomize base."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kube.deploy.deployed import VERSIONS, problems
from tests.kube.deploy.rendering import BASE, CHART, MONITORING, base_text, monitoring_text, rendered

helm = pytest.importorskip("helm_python")
pytestmark = pytest.mark.live

CERT_MANAGER = {"webhook": {"certificates": {"source": "cert-manager"}}}
VALUES: list[dict[str, Any]] = [
    {},
    CERT_MANAGER,
    {"webhook": {"certificates": {"source": "cert-manager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}}},
    {"monitoring": {"rules": True, "dashboard": True, "ruleLabels": {"release": "prometheus"}}},
    {"networkPolicy": {"enabled": False}, "crds": {"install": False}, "userRoles": {"enabled": False}},
    {
        "imagePullSecrets": ["pull"],
        "image": {"repository": "example/kvroute", "digest": "sha256:" + "0" * 64},
        "operator": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "replicas": 1},
    },
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES)
def test_every_value_gives_valid_objects(values: dict[str, Any], version: str) -> None:
    objects = rendered(values)
    assert {obj["kind"]: found for obj in objects if (found := problems(obj, version))} == {}
    names = [(obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"]) for obj in objects]
    assert len(names) == len(set(names))


def test_the_kustomize_base_is_the_chart_with_its_defaults() -> None:
    """`make manifests` writes it."""
    assert BASE.read_text(encoding="utf-8") == base_text()
    assert MONITORING.read_text(encoding="utf-8") == monitoring_text()


def test_pull_secrets_reach_the_operator_and_what_it_makes() -> None:
    """Gateways and the init containers of engines have the same image."""
    objects = rendered({"imagePullSecrets": ["first", "second"]})
    [operator] = [obj for obj in objects if obj["kind"] == "Deployment"]
    spec = operator["spec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "first"}, {"name": "second"}]
    given = [container for container in spec["containers"][0]["args"] if container.startswith("--image-pull")]
    assert given == ["--image-pull-secret=first", "--image-pull-secret=second"]


def test_definitions_stay_when_the_release_goes() -> None:
    """Deleting a definition would delete every KvRouter of the cluster."""
    definitions = [obj for obj in rendered() if obj["kind"] == "CustomResourceDefinition"]
    assert len(definitions) == 2
    assert {obj["metadata"]["annotations"]["helm.sh/resource-policy"] for obj in definitions} == {"keep"}


def test_cert_manager_takes_the_place_of_own_certificates() -> None:
    """The operator then has no rights on Secrets and webhook configurations."""
    objects = rendered(CERT_MANAGER)
    kinds = {obj["kind"] for obj in objects}
    assert {"Issuer", "Certificate"} <= kinds
    assert "Secret" not in kinds
    for obj in objects:
        for rule in obj.get("rules", []):
            assert not {"secrets", "validatingwebhookconfigurations"} & set(rule["resources"])
        if obj["kind"].endswith("WebhookConfiguration"):
            annotation = obj["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
            assert annotation == "kvroute-system/kvroute-webhook"


@pytest.mark.parametrize(
    "values",
    [
        {"operater": {}},
        {"operator": {"replicas": 0}},
        {"webhook": {"failurePolicy": "Perhaps"}},
        {"image": {"digest": "abc"}},
        {"monitoring": {"rules": "yes"}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    """values.schema.json has every key."""
    with pytest.raises(helm.HelmError):
        rendered(values)


def test_the_chart_has_no_fault_that_helm_finds() -> None:
    assert helm.lint(str(CHART))["errors"] == []
