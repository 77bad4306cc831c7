"""What the recording of pod operations leaves out: file 10."""

from __future__ import annotations

from typing import Any

from tests.kube.scenario import Scenario, Step
from tests.kube.scenarios.objects import PODS, if_object, merge, part, pod


def condensed_pod(found: Any) -> Any:
    """Return metadata, placement and status of a pod."""
    spec = {name: found["spec"][name] for name in ("nodeName", "schedulingGates") if name in found["spec"]}
    return {"metadata": found["metadata"], "spec": spec, "status": found["status"]}


def created(name: str, **binds: str) -> Step:
    """Return the creation of a pod."""
    return Step("POST", PODS, pod(name), binds=binds)


def budgeted(name: str, phase: str) -> tuple[Step, ...]:
    """Return the life of a pod of the disruption budget until it is ready."""
    made = pod(name)
    made["metadata"]["labels"] = {"ev": "1"}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]}
    create = Step("POST", PODS, {**made, "spec": {**made["spec"], "nodeName": "pn2"}})
    return create, merge(f"{PODS}/{name}/status", {"status": status})


def generation(field: str) -> Any:
    """Return a projection to generation and a field of the spec, or the status."""
    if field == "status":
        return lambda found: {"generation": found["metadata"]["generation"], "status": found["status"]}
    return lambda found: {"generation": found["metadata"]["generation"], field: found["spec"][field]}


CONDENSED = (
    "bind-setup", "bind-get", "create-with-nodename", "create-with-missing-node", "gated-setup",
    "gated-add-nodeselector", "gate-removed", "status-patch", "status-via-main-ignored", "spec-and-label-via-status",
    "status-observedgeneration", "status-bad-phase", "status-create-ignored", "status-get", "ephemeral-containers",
    "evicted-pod",
)  # fmt: skip
LOOPBACK = {"status": {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
POD_OPERATIONS = Scenario(
    before={
        "10-podops/bind-missing-node": (created("b2"), created("b3", uid3="metadata.uid")),
        "10-podops/ephemeral-containers": (merge(f"{PODS}/b1/status", LOOPBACK),),
        "10-podops/node-status-patch": (Step("POST", "/api/v1/nodes", {"metadata": {"name": "pn1"}}),),
        "10-podops/evict-pdb-not-processed": (
            *budgeted("e0", "Running"), *budgeted("e1", "Running"), *budgeted("e2", "Succeeded"),
        ),
    },
    fresh={"uid2": "00000000-0000-4000-8000-000000000002", "rv13": "1"},
    projections={
        **{f"10-podops/{case}": if_object(condensed_pod) for case in CONDENSED},
        "10-podops/node-status-via-main-ignored": part("status"),
        "10-podops/node-label-via-status": part("metadata"),
        "10-podops/node-podcidr": part("spec"),
        "10-podops/pod-of-deleted-node": lambda found: {"nodeName": found["spec"]["nodeName"]},
        "10-podops/pdb-after": part("status"),
        "10-podops/deployment-setup": generation("status"),
        "10-podops/deployment-status-patch": generation("status"),
        "10-podops/scale-generation": generation("replicas"),
        "10-podops/deployment-label-via-status": lambda found: {
            "labels": found["metadata"].get("labels"), "replicas": found["spec"]["replicas"],
        },
    },
)  # fmt: skip
