"""A small model of the API server for laws about the operator: apply, patches, deletion, owners, server defaults."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from tests.kube.operator.cluster_examples import gateway_pod
from tests.kube.resources.router_examples import Manifest

from kvroute.kube.operator.actions import Action, Apply, Delete, Emit, PatchMetadata, SetStatus
from kvroute.kube.operator.gateway_objects import KINDS
from kvroute.kube.operator.observed import Observed, OperatorSpec, Ref, ref_of

SETTINGS = OperatorSpec(image="registry.example/kvroute:1")
_OWNED = {kind for _, kind in KINDS} | {"ClusterRoleBinding"}


class ClusterModel:
    """Objects by name. Every change gives a new resourceVersion; a patch with an old one is refused."""

    def __init__(self, objects: Iterable[Manifest] = (), *, service_monitors: bool = False) -> None:
        self.objects: dict[Ref, Manifest] = {}
        self.events: dict[str, Emit] = {}
        self.refused = 0
        self.service_monitors = service_monitors
        self._applied: dict[Ref, Manifest] = {}
        self._version = 0
        for obj in objects:
            self.create(obj)

    def create(self, obj: Manifest) -> None:
        """Create an object, or replace it."""
        stored = json.loads(json.dumps(obj))
        stored["metadata"].setdefault("uid", f"uid-{ref_of(stored)}")
        self._store(stored)

    def delete(self, ref: Ref) -> None:
        """Delete an object as a user does: it stays while it has finalizers, and what it owns goes with it."""
        obj = self.objects.get(ref)
        if obj is None:
            return
        if obj["metadata"].get("finalizers"):
            obj["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._store(obj)
            return
        uid = self.objects.pop(ref)["metadata"]["uid"]
        self._applied.pop(ref, None)
        for other, owned in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in owned["metadata"].get("ownerReferences", [])):
                self.delete(other)

    def snapshot(self, idle: frozenset[str] = frozenset()) -> Observed:
        """Return everything as the operator sees it."""
        return Observed(
            settings=SETTINGS,
            routers=self.of("KvRouter"),
            topologies=self.of("ClusterTopology"),
            nodes=self.of("Node"),
            pods=self.of("Pod"),
            owned=tuple(copy.deepcopy(obj) for ref, obj in self.objects.items() if ref.kind in _OWNED),
            service_monitors=self.service_monitors,
            idle=idle,
        )

    def of(self, kind: str) -> tuple[Manifest, ...]:
        """Return copies of all objects of a kind."""
        return tuple(copy.deepcopy(obj) for ref, obj in self.objects.items() if ref.kind == kind)

    def get(self, kind: str, name: str) -> Manifest:
        """Return the object of this kind and name."""
        [found] = [obj for ref, obj in self.objects.items() if (ref.kind, ref.name) == (kind, name)]
        return found

    def settle(self) -> None:
        """Do what the controllers of Kubernetes do: gateways become ready."""
        for obj in self.of("Deployment"):
            if obj["metadata"].get("ownerReferences"):
                metadata = obj["metadata"]
                made = gateway_pod(metadata["name"], namespace=metadata["namespace"])
                owner = {"kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
                made["metadata"]["ownerReferences"] = [owner]
                if ref_of(made) not in self.objects:
                    self.create(made)

    def execute(self, actions: Iterable[Action]) -> None:
        """Execute actions in order; refused ones are counted."""
        for action in actions:
            match action:
                case Apply(obj):
                    self._apply(json.loads(json.dumps(obj)))
                case Delete(ref, uid):
                    if ref in self.objects and self.objects[ref]["metadata"]["uid"] == uid:
                        self.delete(ref)
                case PatchMetadata():
                    self._patch(action)
                case SetStatus(ref, status):
                    if ref in self.objects:
                        changed = copy.deepcopy(self.objects[ref])
                        changed["status"] = json.loads(json.dumps(status))
                        self._store(changed)
                case Emit():
                    self.events[action.name] = action

    def _apply(self, obj: Manifest) -> None:
        ref = ref_of(obj)
        current = copy.deepcopy(self.objects.get(ref, {"metadata": {"uid": f"uid-{ref}"}}))
        _remove(current, self._applied.get(ref, {}), obj)
        _merge(current, obj)
        self._applied[ref] = obj
        self._store(_defaulted(current))

    def _patch(self, patch: PatchMetadata) -> None:
        obj = copy.deepcopy(self.objects.get(patch.ref))
        if obj is None or obj["metadata"]["resourceVersion"] != patch.resource_version:
            self.refused += 1
            return
        for field in ("labels", "annotations"):
            values = obj["metadata"].setdefault(field, {})
            for key, value in (getattr(patch, field) or {}).items():
                values.pop(key, None)
                if value is not None:
                    values[key] = value
        if patch.finalizers is not None:
            added = set(patch.finalizers) - set(obj["metadata"].get("finalizers", []))
            assert not (added and obj["metadata"].get("deletionTimestamp")), "the API server forbids it"
            obj["metadata"]["finalizers"] = list(patch.finalizers)
        self._store(obj)
        if obj["metadata"].get("deletionTimestamp") and not obj["metadata"]["finalizers"]:
            self.delete(patch.ref)

    def _store(self, obj: Manifest) -> None:
        """Keep an object; its version stays if nothing has changed."""
        before = self.objects.get(ref_of(obj))
        if before is not None and _content(before) == _content(obj):
            return
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self.objects[ref_of(obj)] = obj


def _content(obj: Manifest) -> Manifest:
    return obj | {"metadata": {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}}


def _merge(target: Manifest, source: Manifest) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _remove(target: Manifest, before: Manifest, after: Manifest) -> None:
    """Remove fields that were applied before and are not applied any more."""
    for key, value in before.items():
        if key not in after:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(after[key], dict) and isinstance(target.get(key), dict):
            _remove(target[key], value, after[key])


def _defaulted(obj: Manifest) -> Manifest:
    """Add what the API server adds, and write quantities as it does."""
    if obj["kind"] == "Service":
        obj["spec"].setdefault("clusterIP", "10.0.0.1")
    if obj["kind"] == "Deployment":
        obj["spec"].setdefault("replicas", 1)
        obj["spec"].setdefault("progressDeadlineSeconds", 600)
        pod: Any = obj["spec"]["template"]["spec"]
        pod.setdefault("restartPolicy", "Always")
        for container in pod["containers"]:
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            requests = container["resources"]["requests"]
            container["resources"]["requests"] = {
                key: {"1000m": "1", 1: "1", 2: "2"}.get(value, value) for key, value in requests.items()
            }
    return obj
