"""What the recording of admission webhooks leaves out: file 13."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.kube.replay import Replay
from tests.kube.scenario import Observe, Scenario, Step
from tests.kube.scenarios.objects import CONFIG_MAPS, LEASES, MERGE, PODS, delete, if_object, pod

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
LABELS = {"wh": "all"}
RV = f"{CONFIG_MAPS}/rv"


def webhook(name: str, path: str, **changes: Any) -> dict[str, Any]:
    """Return a webhook that is called for ConfigMaps with the label of its name."""
    rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}
    made: dict[str, Any] = {
        "name": f"{name}.kvroute.dev", "admissionReviewVersions": ["v1"], "sideEffects": "None", "timeoutSeconds": 2,
        "clientConfig": {"url": f"https://127.0.0.1:<port>/{path}", "caBundle": "<caBundle>"}, "rules": [rule],
        "objectSelector": {"matchLabels": {"wh": name}},
    }  # fmt: skip
    return {**made, **changes}


def only(operation: str) -> list[dict[str, Any]]:
    """Return the rule for one operation on ConfigMaps."""
    return [{"operations": [operation], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}]


IGNORE = {"failurePolicy": "Ignore"}
NO_AUTHORITY = {"clientConfig": {"url": "https://127.0.0.1:<port>/allow"}}
REFUSED = {"clientConfig": {"url": "https://127.0.0.1:9/x", "caBundle": "<caBundle>"}}
OTHER = {"clientConfig": {"url": "https://127.0.0.1:<port>/allow", "caBundle": "<other>"}}
EVERYTHING = [{"operations": ["*"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*/*"]}]
SAME_PATH = (
    "allow", "deny", "deny-code", "deny-418", "deny-200", "deny-details", "deny-empty", "warn", "warn-deny", "http500",
    "garbage", "wrong-uid", "no-version", "wrong-version", "no-response", "close",
)  # fmt: skip
VALIDATING = [
    *(webhook(name, name) for name in SAME_PATH),
    webhook("http500-ignore", "http500", **IGNORE),
    webhook("slow-fail", "slow", timeoutSeconds=1),
    webhook("slow-ignore", "slow", timeoutSeconds=1, **IGNORE),
    webhook("badca-fail", "allow", **OTHER),
    webhook("badca-ignore", "allow", **OTHER, **IGNORE),
    webhook("noca", "allow", **NO_AUTHORITY),
    webhook("refused-fail", "x", **REFUSED),
    webhook("refused-ignore", "x", **REFUSED, **IGNORE),
    webhook("deny-ignore", "deny", **IGNORE),
    webhook("cond", "deny", matchConditions=[{"name": "never", "expression": "object.metadata.name == 'other'"}]),
    webhook("nssel", "deny", namespaceSelector={"matchLabels": {"no": "such"}}),
    webhook("dry", "record", sideEffects="NoneOnDryRun"),
    webhook("upd", "deny", rules=only("UPDATE")),
    webhook("del", "deny", rules=only("DELETE")),
    webhook("all", "record", rules=EVERYTHING),
]


CONFIGURATION = {
    "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
    "metadata": {"name": "kv-val"}, "webhooks": VALIDATING,
}  # fmt: skip
"""The body of the first recorded request, whose size alone was recorded."""


def labelled(name: str, label: str) -> Step:
    """Return the creation of a ConfigMap with a label."""
    metadata = {"name": name, "labels": {"wh": label}}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "1"}}
    return Step("POST", CONFIG_MAPS, body)


def reviewed(method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Observe:
    """Return the observation of a request: its status and the call of a webhook, if there was one."""

    async def observe(replay: Replay) -> Any:
        assert replay.webhooks is not None
        before = len(replay.webhooks.calls)
        status, _ = await replay.send(method, path, body, headers)
        calls = replay.webhooks.calls[before:]
        call = calls[-1] if calls else None
        return {
            "status": status, "url": call and call.url, "headers": call and dict(call.headers), "calls": len(calls),
            "review": call and call.review,
        }  # fmt: skip

    return observe


async def replaced(replay: Replay) -> Any:
    """Return the review of an update that is based on what was read."""
    _, held = await replay.send("GET", RV)
    return await reviewed("PUT", RV, {**held, "data": {"z": "2"}})(replay)


async def last_review(replay: Replay) -> Any:
    """Return the last review."""
    assert replay.webhooks is not None
    return replay.webhooks.calls[-1].review


async def last_dry_run(replay: Replay) -> Any:
    """Return the options of the last review."""
    request = (await last_review(replay))["request"]
    return {"dryRun": request["dryRun"], "options": request["options"]}


def record(name: str) -> dict[str, Any]:
    """Return a ConfigMap whose writes are recorded."""
    return {"metadata": {"name": name, "labels": LABELS}, "data": {"a": "1"}}


MERGED = {"Content-Type": MERGE}
APPLIED = {"Content-Type": "application/apply-patch+yaml"}
AS_ACCOUNT = {"Impersonate-User": "system:serviceaccount:kvroute:op", "Impersonate-Group": "system:masters"}
POD = pod("rvp")
POD["metadata"]["labels"] = LABELS
BINDING = {"metadata": {"name": "rvp"}, "target": {"kind": "Node", "name": "n1"}}
EVICTION = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "rvp"}}
APPLIED_BODY = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rva", "labels": LABELS}}
OBSERVATIONS: Mapping[str, Observe] = {
    "13-webhooks/validating-dry-run-review": last_dry_run,
    "13-webhooks/delete-review": last_review,
    "13-webhooks/review-create": reviewed("POST", CONFIG_MAPS, record("rv")),
    "13-webhooks/review-update": reviewed("PATCH", f"{RV}?fieldManager=me", {"data": {"z": "1"}}, MERGED),
    "13-webhooks/review-update-put": replaced,
    "13-webhooks/review-generate-name": reviewed(
        "POST", CONFIG_MAPS, {"metadata": {"generateName": "rvg-", "labels": LABELS}}
    ),
    "13-webhooks/review-apply-create": reviewed("PATCH", f"{CONFIG_MAPS}/rva?fieldManager=A", APPLIED_BODY, APPLIED),
    "13-webhooks/review-delete": reviewed("DELETE", f"{CONFIG_MAPS}/rva", {"propagationPolicy": "Background"}),
    "13-webhooks/review-pod-create": reviewed("POST", PODS, POD),
    "13-webhooks/review-pod-binding": reviewed("POST", f"{PODS}/rvp/binding", BINDING),
    "13-webhooks/review-pod-status": reviewed("PATCH", f"{PODS}/rvp/status", {"status": {"phase": "Running"}}, MERGED),
    "13-webhooks/review-pod-eviction": reviewed("POST", f"{PODS}/rvp/eviction", EVICTION),
    "13-webhooks/review-lease-create": reviewed("POST", LEASES, {"metadata": {"name": "rvl", "labels": LABELS}}),
    "13-webhooks/review-as-viewer-impersonated": reviewed("PATCH", RV, {"data": {"i": "1"}}, {**MERGED, **AS_ACCOUNT}),
    "13-webhooks/review-dry-run": reviewed("POST", f"{CONFIG_MAPS}?dryRun=All", record("rvd")),
    "13-webhooks/review-get-not-reviewed": reviewed("GET", RV),
    "13-webhooks/review-crd-webhookconfig-not-reviewed": reviewed(
        "POST", CONFIGURATIONS, {"metadata": {"name": "labelled", "labels": LABELS}}
    ),
}


def created(found: Any) -> Any:
    """Return the name of a created object."""
    return {"created": found["metadata"]["name"]}


def configured(found: Any) -> Any:
    """Return what the recorder kept of a configuration."""
    return {"accepted": True, "firstWebhook": found["webhooks"][0], "generation": found["metadata"]["generation"]}


CREATED = (
    "allow", "warn", "http500-ignore", "slow-ignore", "badca-ignore", "refused-ignore", "cond", "nssel", "dry",
    "dry-run",
)  # fmt: skip
ADMISSION = Scenario(
    before={
        "13-webhooks/validating-dry-run": (delete(f"{CONFIG_MAPS}/v-dry"),),
        "13-webhooks/validating-update-denied": (labelled("v-upd", "upd"),),
        "13-webhooks/validating-delete-denied": (labelled("v-del", "del"),),
    },
    texts={"13-webhooks/validating-config": json.dumps(CONFIGURATION)},
    observations=OBSERVATIONS,
    substitutes={"rvg-wttxr": "rvg-<rand>"},
    webhooks=True,
    projections={
        **{f"13-webhooks/validating-{case}": if_object(created) for case in CREATED},
        "13-webhooks/validating-config": if_object(configured),
        "13-webhooks/mutating-config": if_object(configured),
        "13-webhooks/service-hook": if_object(configured),
        "13-webhooks/refused-bad-cabundle": if_object(lambda found: {"accepted": True}),
        "13-webhooks/policy-allowed": if_object(lambda found: {"created": True}),
    },
)
