"""Laws of the operator: it converges, from anywhere and after any crash, and leaves alone what is not its own."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kube.operator.cluster_examples import node, pod
from tests.kube.operator.cluster_model import ClusterModel
from tests.kube.resources.router_examples import Manifest, constrained, router, topology

from kvroute.kube.discovery.labels import ROLE, TOPOLOGY_PREFIX
from kvroute.kube.operator.actions import PatchMetadata
from kvroute.kube.operator.observed import Ref, ref_of
from kvroute.kube.operator.pod_labels import WRITTEN
from kvroute.kube.operator.reconcile import reconcile
from kvroute.kube.operator.role_switch import DRAINED_SINCE, OBSTACLE, ROLE_BEFORE, TARGET_ROLE

START_S = 1.8e9
ROUNDS_MAX = 40

NAMES = ("chat", "code")
ROUTERS = st.lists(
    st.sampled_from(
        [
            router(),
            constrained(),
            constrained("zone", mismatchPolicy="fallback"),
            constrained("hall"),
            constrained("zone", clusterTopologyName=None, label="topology.kubernetes.io/zone"),
            router(polcy=1),
            router(replicas=1, resources={"requests": {"cpu": "1000m"}, "limits": {}}),
        ]
    ),
    max_size=2,
)
LABELS = st.fixed_dictionaries(
    {},
    optional={
        TARGET_ROLE: st.sampled_from(["prefill", "decode", "cook"]),
        f"{TOPOLOGY_PREFIX}rack": st.sampled_from(["r1", "old"]),
        "app": st.just("other"),
    },
)
NOTES = st.fixed_dictionaries(
    {},
    optional={
        WRITTEN: st.sampled_from(["rack", "zone", "rack,zone"]),
        ROLE_BEFORE: st.just("decode"),
        DRAINED_SINCE: st.sampled_from(["2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z", "?"]),
        OBSTACLE: st.just("RoleChangeWaits"),
    },
)
PODS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "both", "none"]),
        st.sampled_from(["", "n1", "n2", "gone"]),
        st.booleans(),
        LABELS,
        NOTES,
    ),
    max_size=5,
)


def _foreign(api_version: str, kind: str, name: str, namespace: str = "serving") -> Manifest:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": {"a": 1}}


OTHERS = st.lists(
    st.sampled_from(
        [
            _foreign("v1", "Service", "chat"),
            _foreign("apps/v1", "Deployment", "db"),
            _foreign("v1", "ConfigMap", "chat-cluster", "other"),
        ]
    ),
    max_size=3,
    unique_by=lambda obj: obj["kind"],
)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterModel:
    """Draw any state of a cluster: users' objects, and what an operator that stopped anywhere may have left."""
    objects: list[Manifest] = [node("n1", zone="z1", rack="r1"), node("n2", zone="z2")]
    objects += [topology()] if draw(st.booleans()) else []
    for name, obj in zip(NAMES, draw(ROUTERS), strict=False):
        objects.append(copy.deepcopy(obj) | {"metadata": obj["metadata"] | {"name": name, "uid": f"router-{name}"}})
    for index, (role, on, ready, labels, notes) in enumerate(draw(PODS)):
        objects.append(pod(f"e{index}", role, on, ready=ready, labels=labels, annotations=notes))
    objects += draw(OTHERS)
    return ClusterModel(objects, service_monitors=draw(st.booleans()))


def converge(cluster: ClusterModel, now: float = START_S) -> float:
    """Reconcile until nothing is left to do; return the time then."""
    for _ in range(ROUNDS_MAX):
        actions = reconcile(cluster.snapshot(), now)
        if not actions:
            return now
        cluster.execute(actions)
        cluster.settle()
        now += 1e9 if any(DRAINED_SINCE in pod["metadata"].get("annotations", {}) for pod in cluster.of("Pod")) else 10
    raise AssertionError([*actions])


def content(cluster: ClusterModel) -> dict[Ref, Any]:
    """Return all objects without what depends on the number and time of writes."""
    found = {}
    for ref, obj in cluster.objects.items():
        kept = copy.deepcopy(obj)
        kept["metadata"].pop("resourceVersion")
        for condition in kept.get("status", {}).get("conditions", []):
            condition.pop("lastTransitionTime", None)
        found[ref] = kept
    return found


@given(cluster=clusters())
def test_it_converges_and_then_does_nothing(cluster: ClusterModel) -> None:
    """When nothing is left to do, nothing is left to do later either."""
    now = converge(cluster)
    cluster.settle()
    assert reconcile(cluster.snapshot(), now + 1) == ()
    assert reconcile(cluster.snapshot(), now + 1e6) == ()


@settings(max_examples=60)
@given(cluster=clusters(), data=st.data())
def test_a_crash_after_any_action_changes_nothing(cluster: ClusterModel, data: st.DataObject) -> None:
    """An operator that stops in the middle of a list of actions leaves a cluster that ends as any other one."""
    undisturbed = copy.deepcopy(cluster)
    converge(undisturbed)
    now = START_S
    for _ in range(data.draw(st.integers(1, 3))):
        actions = reconcile(cluster.snapshot(), now)
        cluster.execute(actions[: data.draw(st.integers(0, len(actions)))])
        cluster.settle()
        now += 1
    converge(cluster, now)
    assert content(cluster) == content(undisturbed)


@given(cluster=clusters())
def test_objects_of_others_stay_as_they_are(cluster: ClusterModel) -> None:
    """Nodes, topologies, foreign objects with a wanted name, and labels of pods that the operator has not written."""
    before = content(cluster)
    converge(cluster)
    after = content(cluster)
    for ref, obj in before.items():
        if ref.kind not in ("KvRouter", "Pod"):
            assert after[ref] == obj
        assert after[ref].get("spec") == obj.get("spec")
        written = obj["metadata"].get("annotations", {}).get(WRITTEN, "")
        for key, value in obj["metadata"].get("labels", {}).items():
            own = key in (ROLE, TARGET_ROLE) or key.removeprefix(TOPOLOGY_PREFIX) in written.split(",")
            assert own or after[ref]["metadata"]["labels"][key] == value


@given(cluster=clusters(), seed=st.integers(0, 100))
def test_the_order_of_what_is_observed_has_no_effect(cluster: ClusterModel, seed: int) -> None:
    snapshot = cluster.snapshot()
    mixed: dict[str, Any] = {}
    for field in ("routers", "nodes", "pods", "owned"):
        values = list(getattr(snapshot, field))
        random.Random(seed).shuffle(values)
        mixed[field] = tuple(values)
    assert reconcile(dataclasses.replace(snapshot, **mixed), START_S) == reconcile(snapshot, START_S)


@given(cluster=clusters())
def test_no_label_flaps(cluster: ClusterModel) -> None:
    """While nodes and KvRouters stay, each topology label of a pod is written or removed once at most."""
    writes: list[tuple[Ref, str]] = []
    now = START_S
    for _ in range(6):
        actions = reconcile(cluster.snapshot(), now)
        for action in actions:
            if isinstance(action, PatchMetadata):
                writes += [(action.ref, key) for key in action.labels or {} if key.startswith(TOPOLOGY_PREFIX)]
        cluster.execute(actions)
        cluster.settle()
        now += 10
    assert len(writes) == len(set(writes))


@given(cluster=clusters())
def test_nothing_remains_of_a_deleted_router(cluster: ClusterModel) -> None:
    """Its objects, the labels of its pods and its finalizer go; nothing else does."""
    others = {ref for ref in cluster.objects if ref.kind != "KvRouter"}
    now = converge(cluster)
    for obj in cluster.of("KvRouter"):
        cluster.delete(ref_of(obj))
    converge(cluster, now)
    assert {ref for ref in cluster.objects if ref.kind != "ClusterRoleBinding"} == others
    for found in cluster.of("Pod"):
        assert not found["metadata"]["annotations"].get(WRITTEN)
    for binding in cluster.of("ClusterRoleBinding"):
        assert binding["subjects"] == []
