"""What engine pods get when they are created: files, an init container, variables; never twice, and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.kube.admission.reviews import SETTINGS, answers, engine_pod, patch_of, patched, review
from tests.kube.resources.router_examples import Manifest, constrained, router, topology

from kvroute.kube.admission.injection import INIT_CONTAINER, MOUNTED_AT, VOLUME, inject
from kvroute.kube.admission.review import AdmissionRequest, GroupVersionKind
from kvroute.kube.admission.validation import AdmissionView
from kvroute.kube.resources import ClusterTopologySpec, read_spec
from kvroute.kube.resources.resolution import Catalog
from kvroute_engine.topology_labels import TopologyWorkerSpec

CATALOG = Catalog(own={"cluster": read_spec(topology(), ClusterTopologySpec)})
VIEW = AdmissionView(CATALOG, (constrained("rack", mismatchPolicy="fallback"),))


def request(pod: Manifest, operation: str = "CREATE") -> AdmissionRequest:
    """Return the request for a pod, as it is read from a review."""
    kind = GroupVersionKind(version="v1", kind="Pod")
    return AdmissionRequest(uid="1", kind=kind, operation=operation, namespace="serving", object=pod)


def created(pod: Manifest, view: AdmissionView = VIEW) -> tuple[Manifest, list[str]]:
    """Create a pod through the webhook over HTTPS; return it and the warnings."""
    [response] = asyncio.run(answers(view, ("mutate", review("CREATE", pod))))
    return patched(pod, patch_of(response)), response.get("warnings", [])


def names(items: list[Manifest]) -> list[str]:
    return [item["name"] for item in items]


def test_the_image_of_the_init_container_has_its_pull_secrets() -> None:
    """Beside those of the pod; one that it has already is not added again."""
    settings = dataclasses.replace(SETTINGS, pull_secrets=("kvroute", "own"))
    pod = engine_pod()
    made = patched(pod, list(inject(request(pod), VIEW, settings).patch))
    assert made["spec"]["imagePullSecrets"] == [{"name": "kvroute"}, {"name": "own"}]
    pod["spec"]["imagePullSecrets"] = [{"name": "own"}]
    made = patched(pod, list(inject(request(pod), VIEW, settings).patch))
    assert made["spec"]["imagePullSecrets"] == [{"name": "own"}, {"name": "kvroute"}]
    without = patched(engine_pod(), list(inject(request(engine_pod()), VIEW, SETTINGS).patch))
    assert "imagePullSecrets" not in without["spec"]


STATES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "volumes": st.sampled_from([[], [{"name": "model", "emptyDir": {}}], [{"name": VOLUME, "emptyDir": {}}]]),
        "initContainers": st.sampled_from(
            [[], [{"name": "load", "image": "x"}], [{"name": INIT_CONTAINER, "image": "x"}]]
        ),
        "nodeSelector": st.just({"gpu": "h100"}),
    },
)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"image": st.just("x")},
        optional={
            "env": st.sampled_from([[], [{"name": "DYN_TOPOLOGY_ENABLED", "value": "false"}]]),
            "volumeMounts": st.sampled_from([[], [{"name": "model", "mountPath": "/m"}]]),
        },
    ),
    min_size=1,
    max_size=3,
)


@given(spec=STATES, containers=CONTAINERS)
def test_a_second_injection_changes_nothing(spec: dict[str, Any], containers: list[dict[str, Any]]) -> None:
    """Whatever the pod has already, it has every part once, and what was there stays."""
    pod = engine_pod()
    pod["spec"] = spec | {
        "containers": [{"name": f"c{index}"} | container for index, container in enumerate(containers)]
    }
    once = patched(pod, list(inject(request(pod), VIEW, SETTINGS).patch))
    assert inject(request(once), VIEW, SETTINGS).patch == ()
    assert names(once["spec"]["volumes"]).count(VOLUME) == 1
    assert names(once["spec"]["initContainers"]).count(INIT_CONTAINER) == 1
    for before, after in zip(pod["spec"]["containers"], once["spec"]["containers"], strict=True):
        assert names(after["env"]).count("DYN_TOPOLOGY_ENABLED") == 1
        assert after["env"][: len(before.get("env", []))] == before.get("env", [])
        assert names(after["volumeMounts"]).count(VOLUME) == 1
    for key in spec:
        assert once["spec"][key] == spec[key] or once["spec"][key][: len(spec[key])] == spec[key]


def test_the_parts_of_an_injection() -> None:
    """A worked example: one file for each level, for every container; the init container runs kvroute's own image."""
    pod, warnings = created(engine_pod())
    [volume] = pod["spec"]["volumes"]
    assert [(item["path"], item["fieldRef"]["fieldPath"]) for item in volume["downwardAPI"]["items"]] == [
        ("zone", "metadata.labels['kvroute.io/topology.zone']"),
        ("rack", "metadata.labels['kvroute.io/topology.rack']"),
    ]
    [waiting] = pod["spec"]["initContainers"]
    assert waiting["image"] == SETTINGS.image
    assert waiting["command"] == ["kvroute", "kube", "run-worker", "--wait"]
    assert waiting["securityContext"]["runAsNonRoot"]
    environment = {item["name"]: item["value"] for item in waiting["env"]}
    read = TopologyWorkerSpec.read(environment)
    assert (read.enabled, read.level, read.policy, str(read.folder)) == (True, "rack", "fallback", MOUNTED_AT)
    assert environment["DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL"] == environment["DYN_KV_TRANSFER_DOMAIN"] == "rack"
    assert environment["DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY"] == "fallback"
    assert environment["DYN_KV_TRANSFER_ENFORCEMENT"] == "preferred"
    assert float(environment.pop("KVROUTE_TOPOLOGY_WAIT_S")) == read.wait_s
    for container in pod["spec"]["containers"]:
        assert container["volumeMounts"] == waiting["volumeMounts"]
        assert environment.items() <= {item["name"]: item["value"] for item in container["env"]}.items()
    assert pod["spec"]["containers"][0]["env"][0] == {"name": "A", "value": "b"}
    assert warnings == []


def test_an_annotation_limits_it_to_the_container_of_the_engine() -> None:
    pod, _ = created(engine_pod(annotations={"kvroute.io/container": "engine"}))
    assert [VOLUME in names(container.get("volumeMounts", [])) for container in pod["spec"]["containers"]] == [
        True,
        False,
    ]


def test_an_explicit_label_projects_one_level() -> None:
    explicit = constrained("zone", clusterTopologyName=None, label="topology.kubernetes.io/zone")
    pod, _ = created(engine_pod(), AdmissionView(Catalog(), (explicit,)))
    assert [item["path"] for item in pod["spec"]["volumes"][0]["downwardAPI"]["items"]] == ["zone"]


def test_roles_of_other_projects_count() -> None:
    """Pods of Dynamo and llm-d need no label of kvroute."""
    for labels in ({"nvidia.com/dynamo-component-type": "decode"}, {"llm-d.ai/role": "prefill"}):
        pod, _ = created(engine_pod(labels={"app": "engine"} | labels))
        assert names(pod["spec"]["volumes"]) == [VOLUME]


def test_pods_that_stay_as_they_are() -> None:
    """No engine, not selected, in another namespace, no constraint, or not being created."""
    untouched = [
        engine_pod("none"),
        engine_pod(labels={"app": "engine"}),
        engine_pod(labels={"app": "other", "kvroute.io/role": "prefill"}),
        engine_pod(namespace="elsewhere"),
    ]
    assert [created(pod) for pod in untouched] == [(pod, []) for pod in untouched]
    assert created(engine_pod(), AdmissionView(CATALOG, (router(),))) == (engine_pod(), [])
    assert inject(request(engine_pod(), "UPDATE"), VIEW, SETTINGS).patch == ()


def test_a_router_that_cannot_be_resolved_gives_a_warning() -> None:
    """Pods are created all the same; the next KvRouter of the list that can be resolved counts."""
    broken = AdmissionView(CATALOG, (constrained("hall"),))
    pod, warnings = created(engine_pod(), broken)
    assert pod == engine_pod()
    assert len(warnings) == 1
    assert "KvRouter serving/chat" in warnings[0]
    second = constrained("rack")
    second["metadata"] = second["metadata"] | {"name": "second"}
    pod, warnings = created(engine_pod(), AdmissionView(CATALOG, (second, constrained("hall"))))
    assert names(pod["spec"]["volumes"]) == [VOLUME]
    assert len(warnings) == 1
