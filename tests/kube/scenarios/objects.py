"""What the recordings of single objects leave out: files 03 to 06, 09 and 14."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.kube.replay import Replay
from tests.kube.scenario import Project, Scenario, Step

CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
PODS = "/api/v1/namespaces/default/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
EVENTS = "/api/v1/namespaces/default/events"
MERGE = "application/merge-patch+json"
OTHER_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
BUMP = Step("POST", OTHER_LEASES, {"metadata": {"generateName": "other-"}})
"""A write of another kind in another namespace: it moves the version of the server."""


def config_map(name: str, labels: dict[str, str] | None = None, **metadata: Any) -> Step:
    """Return the creation of a ConfigMap as the recorder made it."""
    made: dict[str, Any] = {"name": name, **metadata}
    if labels:
        made["labels"] = labels
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": made, "data": {"a": "1"}}
    return Step("POST", CONFIG_MAPS, body)


def pod(name: str, **spec: Any) -> dict[str, Any]:
    """Return a pod as the recorder made it."""
    containers = [{"name": "w", "image": "x:1"}]
    made = {"automountServiceAccountToken": False, "containers": containers, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": made}


def delete(path: str, **options: Any) -> Step:
    """Return a deletion."""
    return Step("DELETE", path, options or None)


def merge(path: str, body: Any, **binds: str) -> Step:
    """Return a merge patch."""
    return Step("PATCH", path, body, MERGE, binds)


def without_finalizers(path: str) -> Step:
    """Return the patch that removes all finalizers."""
    return merge(path, {"metadata": {"finalizers": None}})


MT = delete(f"{LEASES}/mt")
CRUD = Scenario(
    before={
        "03-crud/endpointslice-list": (BUMP,),
        "03-crud/lease-microtime-2020-01-01T00:00:01.500000+00:00": (MT,),
        "03-crud/lease-microtime-2020-01-01T01:00:01.500000+01:00": (MT,),
        "03-crud/lease-microtime-None": (MT,),
    }
)

CTT = delete(f"{CONFIG_MAPS}/ctt")
FV = delete(f"{CONFIG_MAPS}/fv")


def large(count: int, data: bool = False) -> bytes:
    """Return a ConfigMap with a large annotation or value."""
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": "1"}}
    if data:
        body["data"] = {"a": "b" * count}
    else:
        body["metadata"]["annotations"] = {"a": "b" * count}
    return json.dumps(body).encode()


REPEATED = b'{"metadata":{"name":"fv"},"data":{"a":"1","a":"2"},"data":{"b":"3"}}'
ERRORS = Scenario(
    before={
        **{
            f"04-errors/post-content-type-{kind}": (CTT,)
            for kind in ("application/json; charset=utf-8", "application/json;charset=UTF-8", "APPLICATION/JSON")
        },
        **{
            f"04-errors/{case}": (FV,)
            for case in (
                "unknown-field-post-Ignore", "unknown-field-post-default", "duplicate-field-Strict",
                "case-mismatch-field",
            )
        },
        "04-errors/query-watch-odd-value": (CTT,),
    },
    bodies={
        "04-errors/annotations-too-large": large(270_000),
        "04-errors/too-large-body": large(3_300_000, data=True),
        "04-errors/too-large-configmap": large(1_100_000, data=True),
        "04-errors/too-large-for-etcd": json.dumps(
            pod("big", containers=[{"name": "w", "image": "x:1", "env": [{"name": "A", "value": "b" * 1_600_000}]}])
        ).encode(),
        "04-errors/duplicate-field-Strict": REPEATED,
        "04-errors/duplicate-field-Warn": REPEATED,
    },
    without_media=frozenset({"04-errors/post-content-type-none", "04-errors/patch-content-type-none"}),
)  # fmt: skip


def patched_pod(found: Any) -> Any:
    """Return the parts of a patched pod that the recorder kept."""
    containers = [[container["name"], container["image"]] for container in found["spec"]["containers"]]
    conditions = found["status"].get("conditions")
    return {"status": "see", "containers": containers, "metadata": found["metadata"], "conditions": conditions}


def patched_deployment(found: Any) -> Any:
    """Return the parts of a patched Deployment that the recorder kept."""
    spec = found["spec"]
    return {
        "generation": found["metadata"]["generation"], "podSpec": spec["template"]["spec"], "strategy": spec["strategy"]
    }  # fmt: skip


def if_object(project: Project) -> Project:
    """Return a projection that leaves failures as they are."""
    return lambda found: found if found.get("kind") == "Status" else project(found)


SMP_PODS = (
    "smp-container-by-name", "smp-delete-from-primitive-list", "smp-primitive-list-merges", "smp-set-element-order",
    "smp-replace-directive", "smp-null-removes", "smp-status-conditions", "smp-status-conditions-merge",
    "smp-status-condition-delete", "merge-status-conditions-replace-list",
)  # fmt: skip
SMP_DEPLOYMENTS = ("smp-ports-by-containerport", "smp-env-merge", "smp-volume-retainkeys", "smp-list-replace-directive")
MANY = [{"op": "add", "path": f"/data/{number}", "value": "1"} for number in range(10_001)]
PATCH = Scenario(
    bodies={"05-patch/json-too-many-operations": json.dumps(MANY).encode()},
    projections={
        **{f"05-patch/{case}": if_object(patched_pod) for case in SMP_PODS},
        **{f"05-patch/{case}": if_object(patched_deployment) for case in SMP_DEPLOYMENTS},
    },
)


def scaled(found: Any) -> Any:
    """Return the parts of a Deployment that the recorder kept."""
    metadata = found["metadata"]
    return {
        "generation": metadata["generation"], "managedFields": metadata["managedFields"],
        "replicas": found["spec"]["replicas"],
    }  # fmt: skip


APPLY = Scenario(
    projections={
        f"06-ssa/{case}": if_object(scaled)
        for case in ("deployment-create", "deployment-get", "deployment-give-up-replicas")
    }
)

PP = f"{CONFIG_MAPS}/pp"
RENEW_PP = (without_finalizers(PP), config_map("pp"))
PHASES = (
    "unbound-setup", "unbound-delete", "bound-setup", "bound-delete", "bound-get", "bound-delete-again",
    "bound-delete-longer", "bound-delete-shorter", "terminating-label-patch", "terminating-status-patch", "bound-force",
    "succeeded-setup", "succeeded-status", "succeeded-delete", "grace-zero-setup", "grace-zero-delete",
    "finalizer-force-setup", "finalizer-force-delete", "finalizer-force-get", "finalizer-removed",
)  # fmt: skip


def phase(found: Any) -> Any:
    """Return metadata and phase of a pod."""
    return {"metadata": found["metadata"], "phase": found["status"]["phase"]}


HELD: dict[str, Any] = {"finalizers": ["example.com/f"]}
DELETE = Scenario(
    before={
        "09-delete/finalizer-delete": (config_map("f", **HELD),),
        "09-delete/terminating-put-without-finalizers": (
            Step("POST", CONFIG_MAPS, {"metadata": {"name": "f2", **HELD}, "data": {"a": "1"}}),
            Step(
                "DELETE", f"{CONFIG_MAPS}/f2", binds={"uid2": "metadata.uid", "rv3": "metadata.resourceVersion"}
            ),
        ),
        "09-delete/precondition-wrong-uid": (
            Step(
                "POST", CONFIG_MAPS, {"metadata": {"name": "f3"}},
                binds={"uid4": "metadata.uid", "rv5": "metadata.resourceVersion"},
            ),
        ),
        "09-delete/propagation-Foreground": (config_map("pp"),),
        "09-delete/propagation-Orphan": RENEW_PP,
        "09-delete/propagation-Background": RENEW_PP,
        "09-delete/propagation-Bogus": (config_map("pp"),),
        "09-delete/propagation-query-parameter": (delete(PP), config_map("pp")),
        "09-delete/orphan-dependents-and-policy": RENEW_PP,
        "09-delete/options-bad-json": (config_map("pp"),),
        "09-delete/options-content-type": (config_map("pp"),),
        "09-delete/collection-dry-run": (
            *(config_map(f"dc{number}", {"dc": "1"}) for number in range(3)), config_map("dc3", {"dc": "1"}, **HELD),
        ),
        "09-delete/owner-reference-child": (
            Step("POST", CONFIG_MAPS, {"metadata": {"name": "own"}}, binds={"uid22": "metadata.uid"}),
        ),
    },
    fresh={"rv4": "1"},
    projections={f"09-delete/pod-{case}": if_object(phase) for case in PHASES},
)  # fmt: skip


def part(*path: str) -> Project:
    """Return a projection to a part of the answer."""

    def project(found: Any) -> Any:
        for name in path:
            found = found[name]
        return found

    return project


def named(found: Any) -> Any:
    """Return the names of the items of a list."""
    return [item["metadata"]["name"] for item in found["items"]]


async def eight_puts(replay: Replay) -> Any:
    """Return the statuses of eight parallel updates that are based on one version."""
    path = f"{LEASES}/leader"
    _, held = await replay.send("GET", path)
    bodies = [{**held, "spec": {**held["spec"], "holderIdentity": f"h{number}"}} for number in range(8)]
    answers = await asyncio.gather(*(replay.send("PUT", path, body) for body in bodies))
    return {"statuses": sorted(status for status, _ in answers)}


MISC = Scenario(
    observations={"14-misc/lease-race-of-8-parallel-puts": eight_puts},
    before={
        "14-misc/namespace-delete": (
            Step("POST", "/api/v1/namespaces/t-ns/configmaps", {"metadata": {"name": "c"}, "data": {"a": "1"}}),
        ),
        "14-misc/events-delete-collection": (
            Step("POST", EVENTS, {"metadata": {"name": "e"}, "involvedObject": {"namespace": "default"}}),
        ),
    },
    projections={
        "14-misc/namespace-update-in-terminating": lambda found: {"data": found["data"]},
        "14-misc/namespace-finalizer-patch-main": part("spec"),
        "14-misc/event-long-message": lambda found: {"kind": found["kind"], "messageLength": len(found["message"])},
        "14-misc/events-field-selector": named,
        "14-misc/events-v1-field-selector": named,
        "14-misc/events-v1-put-create": lambda found: {"kind": found["kind"]},
        "14-misc/events-delete-collection": lambda found: {"kind": found["kind"], "items": len(found["items"])},
        "14-misc/priorityclass-system": if_object(
            lambda found: {name: found["spec"][name] for name in ("priority", "preemptionPolicy")}
        ),
        "14-misc/podsecurity-label": part("metadata"),
        "14-misc/podsecurity-enforce": part("metadata"),
        "14-misc/downward-api-pod": if_object(part("spec")),
        "14-misc/duplicate-env": if_object(lambda found: {"env": len(found["spec"]["containers"][0]["env"])}),
        "14-misc/podsecurity-warning": lambda found: {"kind": found["kind"]},
    },
    fresh={"uid4": "00000000-0000-4000-8000-000000000104"},
)
