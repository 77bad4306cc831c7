"""What the operator does for a KvRouter, step by step: labels, objects of the gateway, conditions and Events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml
from tests.kube.operator.cluster_examples import engines, node, pod
from tests.kube.operator.cluster_model import SETTINGS, ClusterModel
from tests.kube.operator.reconciled import NOW_S, conditions, replaced, run
from tests.kube.resources.router_examples import Manifest, constrained, router, topology

from kvroute.kube.operator.actions import Apply, Delete, Emit, PatchMetadata, SetStatus, covers
from kvroute.kube.operator.gateway_workload import CONFIG_HASH
from kvroute.kube.operator.observed import Observed, Ref, ref_of
from kvroute.kube.operator.reconcile import FINALIZER, reconcile
from kvroute.kube.resources import ClusterTopologySpec, read_spec
from kvroute.policies.names import decode_policy
from kvroute.topology.schema import Network
from kvroute.types import InputError
from kvroute_engine.files.units import read_quantity

ROUTER = Ref("kvroute.io/v1alpha1", "KvRouter", "serving", "chat")


def labels(cluster: ClusterModel, name: str) -> dict[str, str]:
    """Return the topology labels of a pod."""
    found = cluster.get("Pod", name)["metadata"]["labels"]
    return {key: value for key, value in found.items() if key.startswith("kvroute.io/topology.")}


def cluster_file(cluster: ClusterModel) -> Any:
    """Return the cluster file of the gateway."""
    return yaml.safe_load(cluster.get("ConfigMap", "chat-cluster")["data"]["cluster.yaml"])


def test_labels_come_from_the_node_after_scheduling() -> None:
    """A pod without a node waits; each level of the topology becomes a label."""
    cluster = ClusterModel([topology(), constrained(), node("n1", zone="z1", rack="r1"), pod("a"), *engines()])
    run(cluster)
    assert labels(cluster, "a") == {}
    wanted = {"kvroute.io/topology.zone": "z1", "kvroute.io/topology.rack": "r1"}
    assert labels(cluster, "prefill-0") == labels(cluster, "decode-1") == wanted
    cluster.create(pod("a", on="n1"))
    run(cluster)
    assert labels(cluster, "a") == wanted


def test_an_explicit_label_needs_no_topology() -> None:
    explicit = constrained("zone", clusterTopologyName=None, label="topology.kubernetes.io/zone")
    cluster = ClusterModel([explicit, node("n1", zone="z1", rack="r1"), *engines()])
    run(cluster)
    assert labels(cluster, "prefill-0") == {"kvroute.io/topology.zone": "z1"}
    assert cluster_file(cluster)["gateway"]["constraint"] == "datacenter:required"


def test_labels_follow_the_topology_and_the_node() -> None:
    """A level that is taken away takes its label with it; a node's label that changes is copied again."""
    cluster = ClusterModel([topology(), constrained(), node("n1", zone="z1", rack="r1"), *engines()])
    run(cluster)
    cluster.create(node("n1", zone="z1", rack="r2"))
    cluster.create(topology(rack="example.com/rack"))
    run(cluster)
    assert labels(cluster, "prefill-0") == {"kvroute.io/topology.rack": "r2"}


def test_a_label_of_the_owner_of_a_pod_stays() -> None:
    """It counts even if the node says something else."""
    own = pod("a", on="n1", labels={"kvroute.io/topology.rack": "mine"})
    cluster = ClusterModel([topology(), constrained(), node("n1", zone="z1", rack="r1"), own])
    run(cluster)
    assert labels(cluster, "a") == {"kvroute.io/topology.zone": "z1", "kvroute.io/topology.rack": "mine"}
    cluster.delete(ROUTER)
    run(cluster)
    assert labels(cluster, "a") == {"kvroute.io/topology.rack": "mine"}


def test_a_node_without_the_label_is_named() -> None:
    cluster = ClusterModel([topology(), constrained(), node("n1", zone="z1"), *engines()])
    run(cluster)
    assert conditions(cluster)["EnginesLabelled"] == (
        "False",
        "NodeLabelMissing",
        "4 engine pods lack a level: the node of decode-0 has no label example.com/rack.",
    )
    cluster.create(node("n1", zone="z1", rack="r1"))
    run(cluster)
    assert conditions(cluster)["EnginesLabelled"][1] == "Labelled"
    assert cluster.get("KvRouter", "chat")["status"]["labelledPods"] == 4


def test_conditions_of_a_router_that_serves() -> None:
    """Times of conditions change only with their status."""
    cluster = ClusterModel([topology(), constrained(), node("n1", zone="z1", rack="r1"), *engines()])
    run(cluster)
    found = conditions(cluster)
    assert {name: status for name, (status, _, _) in found.items()} == dict.fromkeys(found, "True")
    status = cluster.get("KvRouter", "chat")["status"]
    assert (status["readyReplicas"], status["engines"]) == (1, {"prefill": 2, "decode": 2, "both": 0})
    assert {condition["lastTransitionTime"] for condition in status["conditions"]} == {"2027-01-15T08:00:00Z"}
    cluster.delete(ref_of(pod("decode-0")))
    cluster.delete(ref_of(pod("decode-1")))
    run(cluster, NOW_S + 60)
    assert conditions(cluster)["Ready"] == ("False", "NoEngines", "No decode engine is ready.")
    times = {
        condition["type"]: condition["lastTransitionTime"]
        for condition in cluster.get("KvRouter", "chat")["status"]["conditions"]
    }
    assert times["Ready"] == "2027-01-15T08:01:00Z"
    assert times["TopologyResolved"] == "2027-01-15T08:00:00Z"
    reasons = [event.reason for event in cluster.events.values()]
    assert reasons.count("Serving") == reasons.count("NoEngines") == 1


@pytest.mark.parametrize(
    ("objects", "sentence"),
    [
        ([], "the ClusterTopology 'cluster' does not exist"),
        ([topology(zone="a")], "'rack' is no domain of the ClusterTopology 'cluster'"),
    ],
)
def test_without_its_level_no_gateway_is_made(objects: list[Manifest], sentence: str) -> None:
    """A gateway without its constraint would send KV where it must not go."""
    cluster = ClusterModel([*objects, constrained(), node("n1"), *engines()])
    run(cluster)
    assert cluster.of("Deployment") == ()
    assert sentence in conditions(cluster)["TopologyResolved"][2]
    assert conditions(cluster)["Ready"][:2] == ("False", "TopologyUnresolved")


def test_a_gateway_and_labels_outlive_the_topology() -> None:
    """A topology that cannot be read for a while changes nothing."""
    cluster = ClusterModel([topology(), constrained(), node("n1", zone="z1", rack="r1"), *engines()])
    run(cluster)
    before, file = labels(cluster, "prefill-0"), cluster_file(cluster)
    cluster.delete(ref_of(topology()))
    actions = run(cluster)
    assert [type(action) for action in actions if not isinstance(action, Emit)] == [SetStatus]
    assert (labels(cluster, "prefill-0"), cluster_file(cluster)) == (before, file)


def test_an_invalid_spec_is_a_condition() -> None:
    """It is possible where the webhook was not installed when the KvRouter was created."""
    cluster = ClusterModel([router(polcy="netkv")])
    run(cluster)
    assert conditions(cluster)["Ready"] == (
        "False",
        "InvalidSpec",
        "spec.polcy: the key 'polcy' is unknown; did you mean 'policy'?",
    )


def test_objects_that_are_not_wanted_any_more_are_deleted() -> None:
    """One gateway needs no PodDisruptionBudget; `monitoring: false` takes the ServiceMonitor away."""
    cluster = ClusterModel([router(replicas=2)], service_monitors=True)
    run(cluster)
    assert cluster.of("PodDisruptionBudget")
    assert cluster.of("ServiceMonitor")
    replaced(cluster, router(replicas=1, monitoring=False))
    deleted = [action.ref.kind for action in run(cluster) if isinstance(action, Delete)]
    assert sorted(deleted) == ["PodDisruptionBudget", "ServiceMonitor"]
    assert not cluster.of("PodDisruptionBudget") + cluster.of("ServiceMonitor")


def test_a_changed_cluster_file_replaces_the_pods() -> None:
    """The digest of the file is an annotation of the pod template."""
    cluster = ClusterModel([router()])
    run(cluster)

    def digest() -> str:
        found = cluster.get("Deployment", "chat")["spec"]["template"]["metadata"]["annotations"]
        text: str = found[CONFIG_HASH]
        return text

    before = digest()
    replaced(cluster, router(resources={"requests": {"cpu": 2}}))
    run(cluster)
    assert digest() == before
    replaced(cluster, router(policy="netkv"))
    run(cluster)
    assert digest() != before


def test_a_weight_selects_the_policy_that_has_one() -> None:
    """It is Dynamo's soft cost, inside the boundary of the level."""
    cluster = ClusterModel([topology(), constrained(kvTransferWeight=50)])
    run(cluster)
    gateway = cluster_file(cluster)["gateway"]
    assert (gateway["policy"], gateway["parameters"]) == ("soft-topology", {"kv_transfer_weight": 50.0})
    assert gateway["constraint"] == "rack:required"
    assert decode_policy(gateway["policy"], **gateway["parameters"])


def test_the_network_of_a_router_comes_before_that_of_the_topology() -> None:
    """Each level of the topology is a tier of the cluster file, which the gateway can read."""
    levels = topology()
    levels["spec"]["levels"][0]["networkQoS"] = {"bandwidth": "25 Gbps", "latency": "500 us"}
    levels["spec"]["levels"][1]["networkQoS"] = {"bandwidth": "400 Gbps"}
    own = constrained()
    own["spec"]["network"] = {"tierBandwidth": {"rack": "200 Gbps"}, "latency": {"node": "2 us"}}
    cluster = ClusterModel([levels, own])
    run(cluster)
    network = cluster_file(cluster)["network"]
    assert network == {
        "latency": {"datacenter": "500 us", "node": "2 us"},
        "tier_bandwidth": {"datacenter": "25 Gbps", "rack": "200 Gbps", "wan": "100 Gbps"},
    }
    assert msgspec.convert(network, Network, dec_hook=read_quantity)


def test_drift_is_repaired_and_an_unset_number_of_replicas_is_left_to_others() -> None:
    cluster = ClusterModel([router()])
    run(cluster)
    changed = cluster.get("Deployment", "chat")
    changed["spec"]["replicas"] = 7
    cluster.settle()
    assert not any(isinstance(action, Apply) for action in run(cluster))
    assert cluster.get("Deployment", "chat")["spec"]["replicas"] == 7
    cluster.get("Deployment", "chat")["spec"]["template"]["spec"]["serviceAccountName"] = "root"
    assert [action.obj["kind"] for action in run(cluster) if isinstance(action, Apply)] == ["Deployment"]
    assert cluster.get("Deployment", "chat")["spec"]["template"]["spec"]["serviceAccountName"] == "chat"


def test_the_finalizer_waits_for_the_labels() -> None:
    """It is there before the first label, and goes when the last label is gone."""
    cluster = ClusterModel([topology(), constrained(), node("n1", zone="z1", rack="r1"), *engines()])
    first = reconcile(cluster.snapshot(), NOW_S)[0]
    assert isinstance(first, PatchMetadata)
    assert (first.ref, first.finalizers) == (ROUTER, (FINALIZER,))
    run(cluster)
    cluster.delete(ROUTER)
    actions = run(cluster)
    assert isinstance(actions[-1], PatchMetadata)
    assert (actions[-1].ref, actions[-1].finalizers) == (ROUTER, ())
    assert labels(cluster, "prefill-0") == {}
    assert not cluster.of("KvRouter")


def test_all_gateways_may_read_nodes_and_none_else() -> None:
    cluster = ClusterModel([router(), router("code", "other")])
    run(cluster)
    [binding] = cluster.of("ClusterRoleBinding")
    assert binding["roleRef"]["name"] == SETTINGS.nodes_role
    subjects = [(subject["namespace"], subject["name"]) for subject in binding["subjects"]]
    assert subjects == [("other", "code"), ("serving", "chat")]


def test_grove_topologies_count_without_kvroutes() -> None:
    """Grove's resource is read where it is installed."""
    grove = {"kind": "ClusterTopologyBinding", "metadata": {"name": "cluster"}}
    grove["spec"] = {"levels": [{"domain": "rack", "key": "nvidia.com/rack"}]}
    machine = node("n1", **{"nvidia.com/rack": "r9"})
    observed = Observed(
        SETTINGS, routers=(constrained(),), grove_topologies=(grove,), nodes=(machine,), pods=(pod("a", on="n1"),)
    )
    patched = [action for action in reconcile(observed, NOW_S) if isinstance(action, PatchMetadata)]
    assert patched[1].labels == {"kvroute.io/topology.rack": "r9"}


def test_a_topology_that_cannot_be_read_counts_as_absent() -> None:
    broken = topology() | {"spec": {"levels": [{"domain": "rack"}]}}
    cluster = ClusterModel([broken, constrained()])
    run(cluster)
    assert "does not exist" in conditions(cluster)["TopologyResolved"][2]
    with pytest.raises(InputError):
        read_spec(broken, ClusterTopologySpec)


@pytest.mark.parametrize(
    ("wanted", "actual", "same"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ([{"name": "x", "v": 1}], [{"name": "y"}, {"name": "x", "v": 1, "w": 2}], True),
        ([{"name": "x", "v": 1}], [{"name": "x", "v": 2}], False),
        ([1, 2], [1, 2, 3], False),
        (["a"], ["b"], False),
        ("1000m", "1", True),
        ("1Gi", "1024Mi", True),
        ("1G", "1Gi", False),
        (1, "1", True),
        (True, "true", False),
        ([], [{"name": "x"}], False),
        ({"a": {}}, {"a": None}, False),
    ],
)
def test_comparison_with_what_the_server_holds(wanted: Any, actual: Any, same: bool) -> None:
    """More fields and other spellings of a quantity are no difference."""
    assert covers(wanted, actual) is same
