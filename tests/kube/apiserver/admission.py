"""What the API server's own admission plugins add to objects, and what they refuse."""

from __future__ import annotations

import copy

from tests.kube.apiserver import pods
from tests.kube.apiserver.requests import Request
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import ApiError, Cause, Object, forbidden, not_found
from tests.kube.apiserver.store import Store

IMMORTAL = ("default", "kube-system", "kube-public", "kube-node-lease")
NAMESPACES = Resource("", "v1", "Namespace", "namespaces", False)
NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}


def check_namespace(store: Store, request: Request, name: str) -> None:
    """Raise ApiError if the namespace of a new object does not exist, or is being deleted."""
    if not request.resource.namespaced:
        return
    held = store.get(("", "namespaces", "", request.namespace))
    if held is None:
        raise not_found(NAMESPACES.where(request.namespace))
    if held["metadata"].get("deletionTimestamp"):
        text = f"namespace {request.namespace} is being terminated"
        cause = Cause("NamespaceTerminating", text, "metadata.namespace")
        message = f"unable to create new content in namespace {request.namespace} because it is being terminated"
        raise forbidden(request.resource.where(name), message, (cause,))


def admit_create(store: Store, request: Request, found: Object) -> Object:
    """Return a new object with what the plugins add; raise ApiError 403."""
    if found["kind"] == "Node" and not request.resource.custom:
        made = copy.deepcopy(found)
        taints = made["spec"].setdefault("taints", [])
        if NOT_READY["key"] not in [taint.get("key") for taint in taints]:
            taints.append(dict(NOT_READY))
        return made
    if found["kind"] != "Pod" or request.resource.custom:
        return found
    made = copy.deepcopy(found)
    _check_account(store, request, made)
    _check_priority(request, made)
    pods.admit(made)
    made["status"] = pods.initial_status(made["spec"], made["metadata"]["creationTimestamp"])
    return made


def _check_account(store: Store, request: Request, pod: Object) -> None:
    account = pod["spec"].get("serviceAccountName", "default")
    if store.get(("", "serviceaccounts", request.namespace, account)) is None:
        where = f"{request.namespace}/{account}"
        text = f'error looking up service account {where}: serviceaccount "{account}" not found'
        raise forbidden(request.resource.where(pod["metadata"].get("name", "")), text)


def _check_priority(request: Request, pod: Object) -> None:
    name = pod["spec"].get("priorityClassName", "")
    if name and name not in pods.PRIORITIES:
        text = f"no PriorityClass with name {name} was found"
        raise forbidden(request.resource.where(pod["metadata"].get("name", "")), text)


def check_delete(request: Request) -> None:
    """Raise ApiError 403 for a namespace that must stay."""
    if request.resource.plural == "namespaces" and request.name in IMMORTAL:
        raise forbidden(request.resource.where(request.name), "this namespace may not be deleted")


def pod_warnings(pod: Object) -> list[str]:
    """Return the warnings about a valid pod that may surprise."""
    warnings = []
    if len(pod["metadata"]["name"]) > 63:
        warnings.append(
            "metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label "
            "is recommended: [must be no more than 63 characters]"
        )
    for at, container in enumerate(pod["spec"].get("containers") or []):
        seen: set[str] = set()
        for number, variable in enumerate(container.get("env") or []):
            if variable["name"] in seen:
                warnings.append(
                    f'spec.containers[{at}].env[{number}]: hides previous definition of "{variable["name"]}", which '
                    "may be dropped when using apply"
                )
            seen.add(variable["name"])
    return warnings


def throttled(text: str, retry_after_s: int) -> ApiError:
    """Return 429 with a Status body."""
    details = {"retryAfterSeconds": retry_after_s}
    return ApiError(429, "TooManyRequests", text, details, {"Retry-After": str(retry_after_s)})
