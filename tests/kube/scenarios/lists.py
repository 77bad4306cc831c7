"""What the recordings of lists and watches leave out: files 07 and 08."""

from __future__ import annotations

from typing import Any

from tests.kube.scenario import Scenario, Step
from tests.kube.scenarios.objects import (
    BUMP,
    CONFIG_MAPS,
    EVENTS,
    LEASES,
    PODS,
    config_map,
    delete,
    merge,
    pod,
)  # fmt: skip

NODES = "/api/v1/nodes"
STORAGE_COMPACTED = Step("POST", "/_control/compact", {"cached": False})


def at(name: str) -> Step:
    """Return a list whose version is what a placeholder stands for."""
    return Step("GET", CONFIG_MAPS, binds={name: "metadata.resourceVersion"})


def numbered(number: int) -> Step:
    """Return the creation of one of the seven ConfigMaps of the lists."""
    labels = {"app": "b" if number % 2 else "a", "idx": str(number)}
    if number % 2:
        labels["odd"] = ""
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"l{number}", "labels": labels}}
    return Step("POST", CONFIG_MAPS, {**made, "data": {"a": "1", "n": str(number)}})


def node(name: str, **spec: Any) -> Step:
    """Return the creation of a node with a label."""
    body: dict[str, Any] = {"metadata": {"name": name, "labels": {"x": name}}}
    return Step("POST", NODES, {**body, "spec": spec} if spec else body)


def placed(name: str, node_name: str = "") -> Step:
    """Return the creation of a pod on a node."""
    spec = {"nodeName": node_name} if node_name else {}
    made = pod(name, **spec)
    if name == "f0":
        made["metadata"]["labels"] = {"app": "a"}
    return Step("POST", PODS, made)


def event(name: str) -> Step:
    """Return the creation of an event about the pod p."""
    involved = {"namespace": "default", "name": "p", "kind": "Pod"}
    return Step("POST", EVENTS, {"metadata": {"name": name}, "involvedObject": involved})


def kind(found: Any) -> Any:
    """Return the kind of an answer."""
    return {"kind": found["kind"]} if found["kind"] != "Status" else found


LEADER = {
    "holderIdentity": "B", "leaseDurationSeconds": 4, "acquireTime": "2026-01-01T00:00:00.000000Z",
    "renewTime": "2026-01-01T00:00:00.000000Z",
}  # fmt: skip
LEASE = Step("POST", LEASES, {"metadata": {"name": "kvroute"}, "spec": LEADER})
LISTS = Scenario(
    before={
        "07-lists/label-eq": (LEASE, *(numbered(number) for number in (3, 6, 0, 5, 1, 4, 2))),
        "07-lists/field-pod-name": (
            node("n1"), node("n2", unschedulable=True), placed("f0"), placed("f1", "n1"), placed("f2", "n2"),
        ),
        "07-lists/page-2": (config_map("l9"), delete(f"{CONFIG_MAPS}/l4")),
        "07-lists/continue-expired": (STORAGE_COMPACTED,),
        "07-lists/events-page-1": tuple(event(f"ev{number}") for number in range(5)),
        "07-lists/events-continue-expired": (event("ev2a"), STORAGE_COMPACTED),
        "07-lists/fresh": (BUMP,),
        "07-lists/rv-unset-match-unset": (config_map("m1"),),
        "07-lists/all-namespaces": (BUMP,),
    },
    fresh={"rv9": "999999999", "rv8": "1", "continue": "garbage"},
    projections={
        "07-lists/get-rv-zero": kind,
        "07-lists/get-rv-old": kind,
        "07-lists/table-no-object": lambda found: {"rows": found["rows"]},
        "07-lists/list-of-single-kind-get": lambda found: {
            "items": [{"metadata": item["metadata"]} for item in found["items"]]
        },
    },
)  # fmt: skip

W1, W2, W3 = (f"{CONFIG_MAPS}/{name}" for name in ("w1", "w2", "w3"))
W3_LIFE = (config_map("w3"), merge(W3, {"data": {"x": "1"}}), merge(W3, {"data": {"x": "1"}}), delete(W3))
BEATS = (
    "1795348446.448249", "1795348450.4570713", "1795348454.465726", "1795348458.4759872", "1795348462.4825747",
    "1795348466.492417", "1795348470.5013187", "1795348474.509561", "1795348478.518513", "1795348482.5274312",
    "1795348486.5376582", "1795348490.5447698", "1795348494.5516007", "1795348498.558578", "1795348502.5661623",
    "1795348506.573579", "1795348510.5814648", "1795348514.5893078", "1795348518.597359", "1795348522.6048026",
    "1795348526.6120465", "1795348530.6194968", "1795348534.627472", "1795348538.6340091", "1795348542.6402385",
    "1795348546.6468863", "1795348550.6537108", "1795348554.663252", "1795348558.6701357", "1795348562.6764925",
)  # fmt: skip
"""Values that the recorder wrote while it waited for bookmarks."""


def set_w1(**data: str) -> Step:
    """Return a change of the first watched object."""
    return merge(W1, {"data": data})


def set_w2(**data: str) -> Step:
    """Return a change of the second watched object."""
    return merge(W2, {"data": data})


def label(path: str, value: str) -> Step:
    """Return a change of the label that watches select by."""
    return merge(path, {"metadata": {"labels": {"a": value}}})


def bind(name: str, node_name: str) -> Step:
    """Return the binding of a pod to a node."""
    body = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node_name}}
    return Step("POST", f"{PODS}/{name}/binding", body)


RE = (config_map("re"), delete(f"{CONFIG_MAPS}/re"))
FIN = f"{CONFIG_MAPS}/fin"
DC = (config_map("dc1", {"dc": "1"}), config_map("dc2", {"dc": "1"}), delete(f"{CONFIG_MAPS}?labelSelector=dc"))
WATCHES = Scenario(
    before={
        "08-watch/no-rv": (LEASE, config_map("w1", {"a": "1"}), set_w1(x="1"), config_map("w2", {"a": "2"})),
        "08-watch/resume": W3_LIFE,
        "08-watch/resume-from-object-rv": (merge(W1, {"data": {"x": "2b"}}, rv13="metadata.resourceVersion"),),
        "08-watch/timeout": (BUMP, at("rv16")),
        "08-watch/bookmark-before-timeout": (BUMP, at("rv17")),
        "08-watch/send-initial-events": (*(set_w2(bm=beat) for beat in BEATS), BUMP),
        "08-watch/send-initial-events-selector": (BUMP,),
        "08-watch/field-selector-node": (BUMP, at("rv31")),
        "08-watch/single-object": (config_map("w2", {"a": "2"}), delete(W2), BUMP, at("rv38")),
        "08-watch/single-object-path": (delete(f"{CONFIG_MAPS}/other"), at("rv40")),
        "08-watch/deprecated-path": (merge(W1, {"data": {"q": "2"}}, rv41="metadata.resourceVersion"),),
        "08-watch/other-namespace-silent": (BUMP, at("rv54")),
        "08-watch/all-namespaces": (at("rv55"),),
        "08-watch/too-old-uncached-kind": (set_w1(t="5"), STORAGE_COMPACTED),
    },
    during={
        "08-watch/no-rv": W3_LIFE,
        "08-watch/rv-0": W3_LIFE,
        "08-watch/resume-current": (set_w1(x="2"),),
        "08-watch/resume-from-object-rv": (set_w1(x="3"),),
        "08-watch/bookmark-before-timeout": (set_w2(bm="1"),),
        "08-watch/bookmark-other-kind-moves": (BUMP,),
        "08-watch/send-initial-events": (set_w2(y="1"),),
        "08-watch/send-initial-events-false": (set_w2(y="2"),),
        "08-watch/selector-crossing": (
            set_w1(z="1"), label(W1, "2"), set_w1(z="2"), label(W1, "1"), label(W2, "1"), delete(W2),
        ),
        "08-watch/field-selector-node": (
            placed("wp"), bind("wp", "n7"), merge(f"{PODS}/wp/status", {"status": {"phase": "Running"}}),
            delete(f"{PODS}/wp", gracePeriodSeconds=0),
        ),
        "08-watch/field-selector-unassigned": (placed("wq"), bind("wq", "n8")),
        "08-watch/single-object": (config_map("other"), set_w1(q="1")),
        "08-watch/deprecated-path": (set_w1(q="3"),),
        "08-watch/finalizer-delete": (
            config_map("fin", finalizers=["a.example/x"]), delete(FIN), merge(FIN, {"metadata": {"finalizers": None}}),
        ),
        "08-watch/deletecollection": DC,
        "08-watch/recreate-same-name": (*RE, *RE),
        "08-watch/dry-run-no-event": (
            Step("POST", f"{CONFIG_MAPS}?dryRun=All", {"metadata": {"name": "dry"}}),
        ),
        "08-watch/other-namespace-silent": (
            Step("POST", "/api/v1/namespaces/kube-system/configmaps", {"metadata": {"name": "elsewhere"}}),
        ),
        "08-watch/all-namespaces": (set_w1(an="1"),),
        "08-watch/pod-graceful-delete": (
            placed("gd", "n1"), delete(f"{PODS}/gd"), delete(f"{PODS}/gd", gracePeriodSeconds=0),
        ),
        "08-watch/table": (set_w1(t="1"), set_w1(t="2")),
        "08-watch/partial-metadata": (set_w1(t="3"),),
        "08-watch/accept-stream": (set_w1(t="4"),),
    },
    fresh={"rv15": "999999999", "rv99": "1", "rv65": "2"},
)  # fmt: skip
