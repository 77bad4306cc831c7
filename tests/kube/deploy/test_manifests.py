"""What a user installs: manifests are valid for several versions of Kubernetes, and rights are no more than needed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kube.admission.reviews import SETTINGS, patched, review
from tests.kube.deploy.deployed import DEPLOY, ROOT, VERSIONS, problems, read, rules
from tests.kube.resources.router_examples import Manifest

from kvroute.kube.admission.injection import VOLUME, inject
from kvroute.kube.admission.review import read_review
from kvroute.kube.admission.validation import CONSTRAINT_ANNOTATION, AdmissionView, validate
from kvroute.kube.discovery.labels import ROLE, ROLE_ALIASES
from kvroute.kube.operator.gateway_objects import wanted_objects
from kvroute.kube.operator.observed import Observed, OperatorSpec
from kvroute.kube.operator.rights import IMPLIED, NAMED, RIGHTS
from kvroute.kube.resources import ClusterTopologySpec, KvRouterSpec, read_spec
from kvroute.kube.resources.engines import role_of
from kvroute.kube.resources.resolution import Catalog, resolve

BASE = read(DEPLOY / "kustomize/base/kvroute.yaml")
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
STACKS = [path for path in EXAMPLES if path.name != "topology.yaml"]
[TOPOLOGY] = read(DEPLOY / "examples/topology.yaml")
CATALOG = Catalog(own={"cluster": read_spec(TOPOLOGY, ClusterTopologySpec)})


def found(kind: str, name: str) -> Manifest:
    """Return one object of the kustomize base."""
    [obj] = [obj for obj in BASE if (obj["kind"], obj["metadata"]["name"]) == (kind, name)]
    return obj


def granted(kind: str, name: str) -> dict[tuple[str, str], set[str]]:
    """Return the verbs of a role, by group and resource."""
    verbs: dict[tuple[str, str], set[str]] = {}
    for rule in rules(BASE, kind, name):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                verbs.setdefault((group, resource), set()).update(rule["verbs"])
    return verbs


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "path",
    [*sorted(DEPLOY.glob("kustomize/*/*.yaml")), *sorted(DEPLOY.glob("crds/*.io.yaml")), *EXAMPLES],
    ids=lambda path: path.name,
)
def test_manifests_are_valid(path: Path, version: str) -> None:
    """Unknown fields count as errors, as for `kubectl apply`."""
    assert {obj["kind"]: found for obj in read(path) if (found := problems(obj, version))} == {}


def test_a_wrong_manifest_is_found() -> None:
    """The validation itself works."""
    wrong = found("Deployment", "kvroute-operator")
    wrong = wrong | {"spec": wrong["spec"] | {"replicas": "two", "replica": 1}}
    assert problems(wrong, VERSIONS[0])
    assert problems({"apiVersion": "kvroute.io/v1alpha1", "kind": "KvRouter", "spec": {"polcy": 1}}, VERSIONS[0])


def test_the_operator_has_exactly_the_rights_that_it_uses() -> None:
    """One table in the code lists every verb; the operator's API client sends nothing else."""
    wanted = {key: set(verbs) for key, verbs in (RIGHTS | IMPLIED).items()}
    have = granted("ClusterRole", "kvroute-operator")
    for key, verbs in granted("Role", "kvroute-operator").items():
        have.setdefault(key, set()).update(verbs)
    assert have == wanted


def test_rights_are_limited_to_names_where_that_is_possible() -> None:
    """Only `create` cannot be limited. Secrets and Leases are those of the operator's namespace."""
    named: dict[tuple[str, str], tuple[str, ...]] = {}
    every = [*rules(BASE, "ClusterRole", "kvroute-operator"), *rules(BASE, "Role", "kvroute-operator")]
    for rule in every:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        for resource in rule["resources"]:
            if "resourceNames" in rule:
                named[rule["apiGroups"][0], resource] = tuple(rule["resourceNames"])
                assert "create" not in rule["verbs"]
            else:
                assert (rule["apiGroups"][0], resource) not in NAMED or rule["verbs"] == ["create"]
    assert named == NAMED
    assert set(granted("Role", "kvroute-operator")) == {("coordination.k8s.io", "leases"), ("", "secrets")}


def test_gateways_read_pods_and_nodes_only() -> None:
    """The operator binds these two roles, by the names of its settings."""
    names = {field.name: field.default for field in dataclasses.fields(OperatorSpec)}
    assert granted("ClusterRole", str(names["gateway_role"])) == {("", "pods"): {"list", "watch"}}
    assert granted("ClusterRole", str(names["nodes_role"])) == {("", "nodes"): {"list", "watch"}}


def test_webhooks_select_what_the_code_handles() -> None:
    """A webhook for each label that gives a role and belongs to engines alone; `model` is the label of anything."""
    hooks = found("MutatingWebhookConfiguration", "kvroute")["webhooks"]
    keys = {hook["objectSelector"]["matchExpressions"][0]["key"] for hook in hooks}
    assert keys <= {ROLE, *ROLE_ALIASES}
    assert {ROLE, *ROLE_ALIASES} - keys <= {"model", "disaggregatedset.x-k8s.io/role"}
    for hook in [*hooks, *found("ValidatingWebhookConfiguration", "kvroute")["webhooks"]]:
        assert len(hook["name"].split(".")) >= 3
        assert hook["admissionReviewVersions"] == ["v1"]
        assert hook["clientConfig"]["service"]["path"] in ("/validate", "/mutate")
    [workloads] = [
        hook
        for hook in found("ValidatingWebhookConfiguration", "kvroute")["webhooks"]
        if hook["name"] == "workloads.kvroute.io"
    ]
    assert set(re.findall(r"'([^']+)'", workloads["matchConditions"][0]["expression"])) == {CONSTRAINT_ANNOTATION}


def test_the_operator_runs_without_privileges() -> None:
    """The namespace of the base enforces the restricted Pod Security Standard."""
    _assert_restricted(found("Deployment", "kvroute-operator")["spec"]["template"]["spec"])


@pytest.mark.parametrize("name", ["crds/clustertopologies.kvroute.io.yaml", "crds/kvrouters.kvroute.io.yaml"])
def test_the_chart_has_the_same_definitions(name: str) -> None:
    assert (DEPLOY / "helm/kvroute/files" / name).read_bytes() == (DEPLOY / name).read_bytes()


def test_the_chart_has_the_same_alerts_and_dashboard() -> None:
    """deploy/prometheus and deploy/grafana are the sources; the chart has copies, and renders the alerts unchanged."""
    files = DEPLOY / "helm/kvroute/files"
    assert (files / "kvroute-alerts.yml").read_bytes() == (DEPLOY / "prometheus/kvroute-alerts.yml").read_bytes()
    assert (files / "kvroute.json").read_bytes() == (DEPLOY / "grafana/kvroute.json").read_bytes()
    rule, dashboard = read(DEPLOY / "kustomize/monitoring/monitoring.yaml")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/kvroute-alerts.yml").read_text())
    assert dashboard["data"]["kvroute.json"] == (DEPLOY / "grafana/kvroute.json").read_text()


def test_kustomizations_name_files_that_exist() -> None:
    for path in DEPLOY.rglob("kustomization.yaml"):
        [kustomization] = read(path)
        for name in kustomization["resources"]:
            place = (path.parent / name).resolve()
            assert place.is_file() or (place / "kustomization.yaml").is_file()


def test_versions_agree() -> None:
    """Chart, image tag and package have one version."""
    [chart] = read(DEPLOY / "helm/kvroute/Chart.yaml")
    [version] = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert chart["version"] == chart["appVersion"] == version
    [container] = found("Deployment", "kvroute-operator")["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith(f":{version}")


@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.name)
def test_examples_are_admitted_and_injected(path: Path) -> None:
    """Every object passes the webhook; the KvRouter selects engines of both phases; each gets its topology files."""
    [router, *workloads] = read(path)
    view = AdmissionView(CATALOG, (router,))
    roles = []
    for obj in (TOPOLOGY, router, *workloads):
        assert validate(read_review(_body(obj)), view).problems == ()
    for workload in workloads:
        template = workload["spec"]["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        pod["metadata"] = pod["metadata"] | {"name": "p", "namespace": "serving"}
        roles.append(role_of(pod["metadata"]["labels"]))
        changed = patched(pod, list(inject(read_review(_body(pod)), view, SETTINGS).patch))
        assert VOLUME in [volume["name"] for volume in changed["spec"]["volumes"]]
        assert [problems(changed, version) for version in VERSIONS] == [[]] * len(VERSIONS)
        assert workload["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert roles == ["prefill", "decode"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.name)
def test_objects_of_gateways_are_valid(path: Path, version: str) -> None:
    """What the operator applies for each example, with and without keys and numbers of replicas."""
    router = read(path)[0]
    for more in ({}, {"keysSecretRef": {"name": "keys"}, "nodeSelector": {"a": "b"}, "imagePullSecrets": ["pull"]}):
        given = router | {"spec": router["spec"] | more, "metadata": router["metadata"] | {"uid": "1"}}
        spec = read_spec(given, KvRouterSpec)
        assert spec.kv_cache_transfer_topology is not None
        resolved = resolve(spec.kv_cache_transfer_topology, CATALOG)
        observed = Observed(OperatorSpec(image="kvroute:1"), service_monitors=True)
        made = wanted_objects(given, spec, resolved, observed)
        assert {obj["kind"]: found for obj in made if (found := problems(dict(obj), version))} == {}
        [deployment] = [obj for obj in made if obj["kind"] == "Deployment"]
        _assert_restricted(deployment["spec"]["template"]["spec"])


def _assert_restricted(pod: dict[str, Any]) -> None:
    """Check the restricted Pod Security Standard, and a root file system that cannot be written."""
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}


def _body(obj: Manifest) -> bytes:
    import json

    return json.dumps(review("CREATE", obj)).encode()
