"""Why a gateway is not made, or not ready: names that others have, pods that are not ready, images that are missing."""

from __future__ import annotations

import dataclasses

import pytest
from tests.kube.operator.cluster_examples import engines, gateway_pod, pod
from tests.kube.operator.cluster_model import SETTINGS, ClusterModel
from tests.kube.operator.reconciled import NOW_S, conditions, replaced, run
from tests.kube.resources.router_examples import router

from kvroute.kube.operator.gateway_objects import KINDS
from kvroute.kube.operator.observed import Ref
from kvroute.kube.operator.reconcile import reconcile
from kvroute.kube.operator.watched import WatchedObject, kept_pod


@pytest.mark.parametrize(("api_version", "kind"), KINDS)
def test_with_a_name_that_is_taken_nothing_is_made(api_version: str, kind: str) -> None:
    """A gateway must not mount another one's configuration, nor have another one's rights; the condition says why."""
    name = "chat-cluster" if kind == "ConfigMap" else "chat"
    other = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": "serving"}, "spec": {}}
    cluster = ClusterModel([router(replicas=2), other, *engines()], service_monitors=True)
    run(cluster)
    assert cluster.get(kind, name)["spec"] == {}
    assert conditions(cluster)["Ready"] == (
        "False",
        "NameTaken",
        f"{kind} serving/{name} belongs to another owner, so the objects of this KvRouter are not made or changed; "
        "delete what is not in use, or give the KvRouter another name.",
    )
    assert [made for _, made in KINDS if cluster.of(made)] == [kind]
    subjects = [subject["name"] for binding in cluster.of("ClusterRoleBinding") for subject in binding["subjects"]]
    assert subjects == ([] if kind == "ServiceAccount" else ["chat"])
    cluster.delete(Ref(api_version, kind, "serving", name))
    run(cluster)
    assert conditions(cluster)["Ready"][:2] == ("True", "Serving")


def test_a_foreign_binding_of_all_gateways_is_a_condition() -> None:
    """Without it gateways cannot read nodes."""
    other = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding"}
    cluster = ClusterModel([router(), other | {"metadata": {"name": SETTINGS.nodes_binding}}, *engines()])
    run(cluster)
    assert conditions(cluster)["Ready"][1] == "NameTaken"
    assert conditions(cluster)["Ready"][2].startswith(f"ClusterRoleBinding {SETTINGS.nodes_binding} belongs to another")
    assert conditions(cluster)["Ready"][2].endswith("delete what is not in use.")


def test_a_running_gateway_stays_when_a_name_is_taken() -> None:
    """Its Deployment and its rights stay as they are, until the name is free."""
    cluster = ClusterModel([router(), *engines()])
    run(cluster)
    cluster.delete(Ref("v1", "Service", "serving", "chat"))
    cluster.create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "serving"}})
    replaced(cluster, router(policy="netkv"))
    before = cluster.get("Deployment", "chat")
    run(cluster)
    assert cluster.get("Deployment", "chat") == before
    assert conditions(cluster)["Ready"][1] == "NameTaken"
    assert cluster.of("ClusterRoleBinding")[0]["subjects"]


@pytest.mark.parametrize("secrets", [(), ("regcred", "other")])
def test_an_image_that_cannot_be_pulled_is_named_with_its_secrets(secrets: tuple[str, ...]) -> None:
    """The kubelet knows that it fails, and the condition says where which Secret must be."""
    obj = router()
    cluster = ClusterModel([obj, *engines()])
    settings = dataclasses.replace(SETTINGS, pull_secrets=secrets)
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}

    def message() -> str:
        cluster.execute(reconcile(dataclasses.replace(cluster.snapshot(), settings=settings), NOW_S))
        return conditions(cluster)["Ready"][2]

    where = "create the Secret regcred, the Secret other with credentials of its registry in the namespace serving."
    gateway = gateway_pod("chat", ready=False)
    gateway["status"]["containerStatuses"] = [{"name": "gateway"} | waiting]
    cluster.create(gateway)
    begin = (
        "No gateway pod is ready: the image of the container gateway of the pod serving/chat-gateway cannot be pulled"
    )
    fix = where if secrets else "set spec.imagePullSecrets if the registry needs credentials."
    assert message() == f"{begin}; {fix}"
    cluster.create(gateway_pod("chat"))
    for name in ("decode-0", "decode-1"):
        engine = pod(name, "decode", ready=False)
        engine["status"]["initContainerStatuses"] = [{"name": "kvroute-topology"} | waiting]
        cluster.create(engine)
    begin = "No decode engine is ready: the image of the container kvroute-topology of the pod serving/decode-0"
    fix = (
        where
        if secrets
        else "set imagePullSecrets of the chart (--image-pull-secret) if the registry needs credentials."
    )
    assert message() == f"{begin} cannot be pulled; {fix}"


def test_the_kept_status_of_a_pod_has_images_that_cannot_be_pulled() -> None:
    """The reason alternates with each attempt of the kubelet; what is kept does not."""

    def kept(reason: str) -> WatchedObject:
        state = {"waiting": {"reason": reason}} if reason else {"running": {}}
        status = {"initContainerStatuses": [{"name": "kvroute-topology", "state": state}, {"name": "x", "state": {}}]}
        return kept_pod(WatchedObject(status=status))

    assert kept("ErrImagePull") == kept("ImagePullBackOff") != kept("PodInitializing")
    assert kept("PodInitializing") == kept("")


def test_ready_gateways_are_counted_by_their_pods() -> None:
    """Ready pods of this gateway count: no others, and none that end."""
    others = [gateway_pod("chat", "waits", ready=False), gateway_pod("code"), gateway_pod("chat", namespace="other")]
    ends = gateway_pod("chat", "ends")
    ends["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster = ClusterModel([router(), *engines(), *others, ends])
    cluster.execute(reconcile(cluster.snapshot(), NOW_S))
    assert conditions(cluster)["Ready"][1] == "NoGateway"
    for name in ("one", "two"):
        cluster.create(gateway_pod("chat", name))
    cluster.execute(reconcile(cluster.snapshot(), NOW_S))
    assert conditions(cluster)["Ready"][1] == "Serving"
    assert cluster.get("KvRouter", "chat")["status"]["readyReplicas"] == 2
