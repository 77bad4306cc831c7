"""The admission table of the proposal, row by row over HTTPS, and everything else that is rejected."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from tests.kube.admission.reviews import answers, engine_pod, message, review
from tests.kube.resources.router_examples import Manifest, constrained, router, topology

from kvroute.kube.admission.validation import CONSTRAINT_ANNOTATION, AdmissionView
from kvroute.kube.resources import ClusterTopologySpec, read_grove_levels, read_spec
from kvroute.kube.resources.resolution import Catalog
from kvroute.serve.config.preflight import deployment_of

CLUSTER = read_spec(topology(), ClusterTopologySpec)
OWN = AdmissionView(Catalog(own={"cluster": CLUSTER}))
GROVE = AdmissionView(
    Catalog(grove={"cluster": read_grove_levels({"spec": {"levels": [{"domain": "rack", "key": "nvidia.com/rack"}]}})})
)
FIELD = "spec.kvCacheTransferTopology"


def judged(view: AdmissionView | None, *reviews: Manifest) -> list[Manifest]:
    """Send reviews to the validating webhook."""
    return asyncio.run(answers(view, *[("validate", body) for body in reviews]))


def deployment(annotations: dict[str, str], on_template: bool) -> Manifest:
    """Return a Deployment of decode engines with annotations."""
    template: dict[str, Any] = {"metadata": {"labels": {"kvroute.io/role": "decode"}}, "spec": {}}
    metadata: dict[str, Any] = {"name": "decode", "namespace": "serving"}
    (template["metadata"] if on_template else metadata)["annotations"] = annotations
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"template": template}}


def _weighted(policy: str) -> Manifest:
    """Return a KvRouter with the soft cost and a decode policy."""
    obj = constrained(kvTransferWeight=2)
    return obj | {"spec": obj["spec"] | {"policy": policy}}


def _timing(**prefill: Any) -> Manifest:
    return {"default": {"prefill": prefill, "decode": {"base": "1 ms"}}}


def _served(text: str) -> None:
    """Read a cluster file as a gateway does, which the operator's command line passes to the webhook."""
    deployment_of(text, "cluster.yaml", environ=None)


def test_row_1_grove_is_not_installed() -> None:
    """Neither Grove's nor kvroute's ClusterTopology can be read."""
    [response] = judged(AdmissionView(), review("CREATE", constrained()))
    assert message(response) == (
        f"{FIELD}.clusterTopologyName: the cluster has no resource ClusterTopology, neither kvroute's nor Grove's; "
        "install the CustomResourceDefinitions of kvroute or Grove, or use label instead"
    )


def test_row_2_the_topology_does_not_exist() -> None:
    view = AdmissionView(Catalog(own={"clusters": CLUSTER}, grove={}))
    empty = AdmissionView(Catalog(own={}))
    [response], [alone] = judged(view, review("CREATE", constrained())), judged(empty, review("CREATE", constrained()))
    expected = f"{FIELD}.clusterTopologyName: the ClusterTopology 'cluster' does not exist; did you mean 'clusters'?"
    assert message(response) == expected
    assert message(alone).endswith("does not exist; create it, or use label instead")
    [cause] = response["status"]["details"]["causes"]
    assert cause["field"] == f"{FIELD}.clusterTopologyName"


@pytest.mark.parametrize("view", [OWN, GROVE])
def test_row_3_the_level_is_no_domain_of_the_topology(view: AdmissionView) -> None:
    [response] = judged(view, review("CREATE", constrained("rak")))
    assert message(response) == (
        f"{FIELD}.level: 'rak' is no domain of the ClusterTopology 'cluster'; did you mean 'rack'?"
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_row_4_a_constraint_on_an_engine_pod(role: str) -> None:
    """The proposal allows the field on frontends only. A KvRouter is one; an engine is none."""
    pod = engine_pod(role, annotations={CONSTRAINT_ANNOTATION: "rack"})
    [response] = judged(OWN, review("CREATE", pod))
    assert message(response) == (
        f"metadata.annotations[{CONSTRAINT_ANNOTATION}]: a constraint belongs to a gateway, not to the {role} pod "
        f"'serving/{role}-0'; remove it, and set {FIELD} of the KvRouter that selects these engines"
    )


@pytest.mark.parametrize(("on_template", "where"), [(True, "spec.template.metadata"), (False, "metadata")])
def test_row_4_a_constraint_on_a_deployment_of_engines(on_template: bool, where: str) -> None:
    [response] = judged(OWN, review("CREATE", deployment({CONSTRAINT_ANNOTATION: "rack"}, on_template)))
    assert message(response).startswith(f"{where}.annotations[{CONSTRAINT_ANNOTATION}]: a constraint belongs")


def test_row_5_an_explicit_label_skips_the_checks() -> None:
    """No topology has to exist, and the level is any name that has a place."""
    explicit = constrained("zone", clusterTopologyName=None, label="topology.kubernetes.io/zone")
    other = constrained("hall", clusterTopologyName=None, label="example.com/hall", place="pod")
    assert [
        response["allowed"]
        for response in judged(AdmissionView(), *[review("CREATE", made) for made in (explicit, other)])
    ]


@pytest.mark.parametrize("view", [OWN, GROVE])
def test_a_level_of_a_topology_is_allowed(view: AdmissionView) -> None:
    """Grove's topologies are as good as kvroute's."""
    new = [constrained(mismatchPolicy=policy) for policy in ("fail", "fallback", "required", "preferred")]
    new += [router(), _weighted("soft-topology"), _weighted("foresight-joint")]
    responses = judged(view, *[review("CREATE", made) for made in new])
    assert [response["allowed"] for response in responses] == [True] * 7


@pytest.mark.parametrize(
    ("manifest", "where", "fix"),
    [
        (router(polcy="netkv"), "spec.polcy", "did you mean 'policy'?"),
        (router(policy="netkw"), "spec.policy", "did you mean 'netkv'?"),
        (constrained(kvTransferWeight=-0.5), f"{FIELD}.kvTransferWeight", "write a number from 0"),
        (_weighted("netkv"), f"{FIELD}.kvTransferWeight", "remove it, or remove spec.policy"),
        (constrained(label="x/zone"), FIELD, "remove one of them"),
        (constrained(clusterTopologyName=None), FIELD, "set clusterTopologyName"),
        (constrained(place="rack"), f"{FIELD}.place", "set place in the ClusterTopology"),
        (constrained("hall", clusterTopologyName=None, label="x/hall"), f"{FIELD}.place", "set place of that level"),
        (router(gateway={"keys": {}}), "spec.gateway.keys", "set spec.keysSecretRef instead"),
        (router(ports={"client": 9090}), "spec.ports", "choose two ports"),
        (router("2chat"), "metadata.name", "begin it with a letter"),
        (router(defaults={"timing": "slow"}), "spec.defaults.timing", "known: default"),
        (router(timing=_timing(kind="quadratic", perToken="1 us")), "spec.timing.default.prefill", "needs perToken2"),
        (router(timing=_timing()), "spec.timing.default.prefill", "needs perToken; add it"),
        (
            router(timing=_timing(kind="piecewise", tokens=[2, 1], times=["1 s", "2 s"])),
            "spec.timing.default.prefill.tokens",
            "sort the points",
        ),
        (router(model="llama-3-70c"), "spec.model", "did you mean"),
        (router(network={"node": {"gpus": 0}}), "spec.network.node.gpus", "write a whole number from 1"),
        (router(gateway={"retries": {"share": 2}}), "spec.gateway.retries.share", "write a number from 0 to 1"),
        (router(gateway={"retrys": {}}), "spec.gateway.retrys", "did you mean 'retries'?"),
        (topology(zone="a", rack="a"), "spec.levels[1].labelKey", "give each level one of its own"),
        (topology(Zone="a"), "spec.levels[0].domain", "write text such as 'zone'"),
        (engine_pod("prefil"), "metadata.labels[kvroute.io/role]", "did you mean 'prefill'?"),
    ],
)
def test_what_is_rejected(manifest: Manifest, where: str, fix: str) -> None:
    [response] = judged(dataclasses.replace(OWN, check_file=_served), review("CREATE", manifest))
    text = message(response)
    assert text.startswith(f"{where}: ")
    assert fix in text
    assert [cause["field"] for cause in response["status"]["details"]["causes"]] == [where]


def test_several_faults_are_reported_at_once() -> None:
    [response] = judged(OWN, review("CREATE", router(policy="x-y", gateway={"listen": {}, "admin": {}})))
    fields = [cause["field"] for cause in response["status"]["details"]["causes"]]
    assert fields == ["spec.policy", "spec.gateway.listen", "spec.gateway.admin"]


def test_a_topology_in_use_keeps_its_level() -> None:
    """It can be deleted, or lose a level, only when no KvRouter uses that any more."""
    used = AdmissionView(Catalog(own={"cluster": CLUSTER}), (constrained("rack"), router("other")))
    without = topology(zone="topology.kubernetes.io/zone")
    more = topology(zone="topology.kubernetes.io/zone", rack="example.com/other")
    calls = [review("DELETE", topology()), review("UPDATE", without, topology()), review("UPDATE", more, topology())]
    deleted, shrunk, changed = judged(used, *calls)
    reason = "the KvRouter 'serving/chat' uses the level 'rack' of this ClusterTopology"
    assert message(deleted) == f"metadata.name: {reason}; change {FIELD} of that KvRouter first"
    assert message(shrunk) == f"spec.levels: {reason}; change {FIELD} of that KvRouter first"
    assert changed["allowed"]
    assert [response["allowed"] for response in judged(OWN, *calls)] == [True] * 3
    assert [response["allowed"] for response in judged(used, review("DELETE", topology("other")))] == [True]


def test_a_router_whose_topology_has_gone_can_be_deleted() -> None:
    """A finalizer is removed by an update, which leaves the spec as it is."""
    old = constrained()
    without_finalizer = constrained() | {"metadata": constrained()["metadata"] | {"finalizers": []}}
    calls = [
        review("UPDATE", without_finalizer, old),
        review("DELETE", old),
        review("UPDATE", constrained("zone"), old),
    ]
    assert [response["allowed"] for response in judged(AdmissionView(), *calls)] == [True, True, False]


def test_subresources_and_deleted_engines_pass() -> None:
    """A status update of a pod has the pod's own metadata, which was accepted or existed before."""
    pod = engine_pod(annotations={CONSTRAINT_ANNOTATION: "rack"})
    calls = [review("UPDATE", pod, pod, subResource="status"), review("DELETE", pod)]
    assert [response["allowed"] for response in judged(OWN, *calls)] == [True, True]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"a": 1}, "the body is no AdmissionReview"),
        (review("CREATE", router()) | {"apiVersion": "admission.k8s.io/v1beta1"}, "set admissionReviewVersions: [v1]"),
    ],
)
def test_other_bodies_get_400(body: Manifest, what: str) -> None:
    [response] = judged(OWN, body)
    assert response["http"] == 400
    assert what in response["text"]


def test_reviews_before_the_cluster_is_known_get_503() -> None:
    """The API server then follows the failurePolicy of the webhook."""
    [response] = judged(None, review("CREATE", router()))
    assert response["http"] == 503
