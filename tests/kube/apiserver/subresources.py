"""Subresources: binding, eviction, scale, namespace finalize, service account tokens, ephemeral containers."""

from __future__ import annotations

import copy
from datetime import timedelta

from tests.kube.apiserver import bodies, managers
from tests.kube.apiserver.decode import parse_json
from tests.kube.apiserver.deletion import Deletion
from tests.kube.apiserver.golang import GoError, format_time
from tests.kube.apiserver.openapi import value_at
from tests.kube.apiserver.patches import merge_patch
from tests.kube.apiserver.requests import Answer, Request, success
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.selectors import from_object
from tests.kube.apiserver.status import (
    MODIFIED,
    ApiError,
    Object,
    Where,
    bad_request,
    conflict,
    internal,
    invalid,
    not_found,
    unprocessable,
    unsupported,
)  # fmt: skip
from tests.kube.apiserver.types import resource_type
from tests.kube.apiserver.views import to_version
from tests.kube.apiserver.webhooks import Review, options
from tests.kube.apiserver.writes import Backend, Writes

PODS = Resource("", "v1", "Pod", "pods")
TOKEN_MIN_S = 600
BUDGET_TEXT = "Cannot evict pod as it would violate the pod's disruption budget."
BUSY_RETRY_S = 10


def _body(request: Request) -> Object:
    """Return the JSON object of a body; raise ApiError 400."""
    try:
        found = parse_json(request.body.decode(errors="replace") or "{}")
    except GoError as error:
        raise bad_request(f"couldn't get version/kind; json parse error: {error}") from None
    return found if isinstance(found, dict) else {}


class Subresources:
    """Answers the writes to subresources that are objects of another kind."""

    def __init__(self, backend: Backend, writes: Writes, deletion: Deletion) -> None:
        self._backend = backend
        self._store = backend.store
        self._writes = writes
        self._deletion = deletion

    def _pod(self, request: Request) -> Object:
        held = self._store.get(PODS.key(request.namespace, request.name))
        if held is None:
            raise not_found(PODS.where(request.name))
        return held

    async def bind(self, request: Request) -> Answer:
        """Answer a POST to pods/binding."""
        body = _body(request)
        metadata, target = body.get("metadata") or {}, body.get("target") or {}
        name = metadata.get("name", "")
        if request.name and name != request.name:
            raise bad_request("name in URL does not match name in Binding object")
        request.name = name
        if target.get("kind", "Node") not in ("Node", ""):
            raise internal(unsupported("target.kind", target["kind"], ("Node", "<empty>")).text())
        if not target.get("name"):
            raise internal("target.name: Required value")
        pod = self._pod(request)
        uid = metadata.get("uid")
        if uid and uid != pod["metadata"]["uid"]:
            raise conflict(
                PODS.where(name),
                f"StorageError: invalid object, Code: 4, Key: /registry/pods/{request.namespace}/{name}, "
                "ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: "
                f"{uid}, UID in object meta: {pod['metadata']['uid']}",
            )
        await self._review(request, body)
        self._assign(request, pod, metadata, target["name"])
        return Answer(201, success(code=201))

    async def _review(self, request: Request, body: Object) -> None:
        shown = {**body, "metadata": {**(body.get("metadata") or {}), "namespace": request.namespace}}
        review = Review(request, "CREATE", shown, None, options(request, "CreateOptions"), request.name)
        await self._backend.webhooks.mutate(review)
        await self._backend.webhooks.validate(review)

    def _assign(self, request: Request, pod: Object, metadata: Object, node: str) -> None:
        """Store a pod with its node; raise ApiError 409 for one that has a node, is gated or is being deleted."""
        name = request.name
        where = Where("", "pods/binding", name)
        if pod["metadata"].get("deletionTimestamp"):
            raise conflict(where, f"pod {name} is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            raise conflict(where, f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"')
        if pod["spec"].get("schedulingGates"):
            raise conflict(where, f"pod {name} has non-empty .spec.schedulingGates")
        made = copy.deepcopy(pod)
        made["spec"]["nodeName"] = node
        for part in ("annotations", "labels"):
            if metadata.get(part):
                made["metadata"][part] = {**made["metadata"].get(part, {}), **metadata[part]}
        condition = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        condition["lastTransitionTime"] = self._backend.now()
        kept = [found for found in made["status"].get("conditions") or [] if found["type"] != "PodScheduled"]
        made["status"]["conditions"] = [*kept, condition]
        if not request.dry_run:
            self._store.write(PODS.key(request.namespace, name), made)

    async def evict(self, request: Request) -> Answer:
        """Answer a POST to pods/eviction."""
        body = _body(request)
        if (body.get("metadata") or {}).get("name", request.name) != request.name:
            raise bad_request("name in URL does not match name in Eviction object")
        pod = self._pod(request)
        wanted = body.get("deleteOptions") or {}
        budget = None
        active = pod["status"].get("phase") not in ("Succeeded", "Failed", "Pending")
        if active and not pod["metadata"].get("deletionTimestamp"):
            budget = self._budget(pod)
        if budget is not None:
            self._check_budget(budget)
        if wanted.get("dryRun") == ["All"] or request.dry_run:
            return Answer(201, success(code=201))
        if budget is not None:
            self._spend(budget, pod)
            pod = self._condemn(pod)
        request.resource = PODS
        await self._deletion.remove(request, pod, wanted, reviewed=False)
        return Answer(201, success(code=201))

    def _budget(self, pod: Object) -> tuple[tuple[str, str, str, str], Object] | None:
        labels = pod["metadata"].get("labels")
        for key, held in self._store.select(("policy", "poddisruptionbudgets"), pod["metadata"]["namespace"]):
            selector = held["spec"].get("selector")
            if selector is not None and from_object(selector).matches(labels):
                return key, held
        return None

    def _check_budget(self, budget: tuple[tuple[str, str, str, str], Object]) -> None:
        name, status = budget[0][3], budget[1]["status"]
        if status.get("observedGeneration", 0) < budget[1]["metadata"]["generation"]:
            text = f"The disruption budget {name} is still being processed by the server."
            raise _evictions_denied(text, BUSY_RETRY_S)
        if status["disruptionsAllowed"] <= 0:
            raise _evictions_denied(f"The disruption budget {name} does not allow evicting pods currently", 0)

    def _spend(self, budget: tuple[tuple[str, str, str, str], Object], pod: Object) -> None:
        """Book an eviction on the budget."""
        key, held = budget
        now = self._backend.now()
        status = copy.deepcopy(held["status"])
        status["disruptionsAllowed"] -= 1
        status.setdefault("disruptedPods", {})[pod["metadata"]["name"]] = now
        if status["disruptionsAllowed"] == 0:
            generation = status["observedGeneration"]
            status["conditions"] = [{
                "type": "DisruptionAllowed", "status": "False", "observedGeneration": generation,
                "lastTransitionTime": now, "reason": "InsufficientPods", "message": "",
            }]  # fmt: skip
        self._store.write(key, {**held, "status": status})

    def _condemn(self, pod: Object) -> Object:
        """Store the condition that tells why a pod is deleted."""
        condition = {
            "type": "DisruptionTarget", "status": "True", "lastProbeTime": None,
            "lastTransitionTime": self._backend.now(), "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }  # fmt: skip
        status = {**pod["status"], "conditions": [*(pod["status"].get("conditions") or []), condition]}
        key = PODS.key(pod["metadata"]["namespace"], pod["metadata"]["name"])
        return self._store.write(key, {**pod, "status": status})

    async def finalize(self, request: Request) -> Answer:
        """Answer a PUT to namespaces/finalize."""
        held = self._store.get(request.resource.key("", request.name))
        if held is None:
            raise not_found(request.resource.where(request.name))
        wanted = bodies.decode_body(request, request.resource)
        spec = {name: value for name, value in wanted["spec"].items() if value}
        made = {**held, "spec": spec}
        key = request.resource.key("", request.name)
        if held["metadata"].get("deletionTimestamp") and not spec.get("finalizers"):
            self._store.write(key, None)
            return Answer(200, made)
        return Answer(200, self._store.write(key, made))

    async def token(self, request: Request) -> Answer:
        """Answer a POST to serviceaccounts/token."""
        held = self._store.get(("", "serviceaccounts", request.namespace, request.name))
        if held is None:
            raise not_found(request.resource.where(request.name))
        expires_s = (_body(request).get("spec") or {}).get("expirationSeconds", 3_600)
        if expires_s < TOKEN_MIN_S:
            cause = invalid("spec.expirationSeconds", expires_s, "may not specify a duration less than 10 minutes")
            raise unprocessable(Where("authentication.k8s.io", "TokenRequest"), [cause])
        uid = held["metadata"]["uid"]
        expires = format_time(self._backend.clock() + timedelta(seconds=expires_s))
        spec = {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": expires_s, "boundObjectRef": None}
        metadata: Object = {"name": request.name, "namespace": request.namespace, "uid": uid}
        metadata["creationTimestamp"] = self._backend.now()
        entry = {"manager": request.manager, "operation": "Update", "apiVersion": "authentication.k8s.io/v1"}
        fields: Object = {"f:spec": {"f:expirationSeconds": {}}}
        metadata["managedFields"] = [
            {**entry, "time": self._backend.now(), "fieldsType": "FieldsV1", "fieldsV1": fields}
        ]
        token = self._backend.access.issue(request.namespace, request.name, uid)
        made: Object = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "metadata": metadata}
        status = {"token": token, "expirationTimestamp": expires}
        return Answer(201, {**made, "spec": spec, "status": status})

    def scale(self, request: Request, held: Object) -> Object:
        """Return the Scale object of a Deployment or custom resource."""
        metadata = {name: held["metadata"].get(name) for name in ("name", "namespace", "uid", "resourceVersion")}
        metadata["creationTimestamp"] = held["metadata"]["creationTimestamp"]
        paths = _scale_paths(request.resource)
        status: Object = {"replicas": value_at(held, paths["status"]) or 0}
        if request.resource.custom:
            selector = value_at(held, paths["selector"]) if paths["selector"] else ""
        else:
            labels = held["spec"]["selector"].get("matchLabels") or {}
            selector = ",".join(f"{key}={value}" for key, value in labels.items())
        if selector:
            status["selector"] = selector
        spec = {"replicas": value_at(held, paths["spec"]) or 0}
        return {
            "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status,
        }  # fmt: skip

    async def write_scale(self, request: Request) -> Answer:
        """Answer a PUT or PATCH of scale."""
        resource = request.resource
        held = self._store.get(resource.key(request.namespace, request.name))
        if held is None:
            raise not_found(resource.where(request.name))
        body = _body(request)
        wanted = merge_patch(self.scale(request, held), body) if request.method == "PATCH" else body
        replicas = (wanted.get("spec") or {}).get("replicas", 0)
        version = (body.get("metadata") or {}).get("resourceVersion")
        if version and version != held["metadata"]["resourceVersion"]:
            raise conflict(resource.where(request.name), MODIFIED)
        if replicas < 0:
            cause = invalid("spec.replicas", replicas, "must be greater than or equal to 0")
            raise unprocessable(Where("autoscaling", "Scale", request.name), [cause])
        path = _scale_paths(resource)["spec"].split(".")
        made = copy.deepcopy(held)
        parent = made
        for step in path[:-1]:
            parent = parent.setdefault(step, {})
        if parent.get(path[-1]) != replicas:
            parent[path[-1]] = replicas
            made = managers.update(resource_type(resource), held, made, self._writes.writer(request), ())
            made["metadata"]["generation"] += 1
            made = self._store.write(resource.key(request.namespace, request.name), made)
        return Answer(200, self.scale(request, made))

    async def ephemeral(self, request: Request, wanted: Object) -> Answer:
        """Store the ephemeral containers of a patched pod."""
        pod = self._pod(request)
        made = copy.deepcopy(pod)
        made["spec"]["ephemeralContainers"] = wanted["spec"].get("ephemeralContainers") or []
        made = managers.update(resource_type(PODS), pod, made, self._writes.writer(request), ())
        made["metadata"]["generation"] += 1
        return Answer(200, to_version(PODS, self._store.write(PODS.key(request.namespace, request.name), made)))


def _scale_paths(resource: Resource) -> dict[str, str]:
    scale = resource.scale or {}
    return {
        "spec": scale.get("specReplicasPath", ".spec.replicas").lstrip("."),
        "status": scale.get("statusReplicasPath", ".status.replicas").lstrip("."),
        "selector": scale.get("labelSelectorPath", "").lstrip("."),
    }


def _evictions_denied(text: str, retry_after_s: int) -> ApiError:
    details: Object = {"causes": [{"reason": "DisruptionBudget", "message": text}]}
    headers = {}
    if retry_after_s:
        details["retryAfterSeconds"] = retry_after_s
        headers["Retry-After"] = str(retry_after_s)
    return ApiError(429, "TooManyRequests", BUDGET_TEXT, details, headers)
