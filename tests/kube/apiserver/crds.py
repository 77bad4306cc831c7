"""Life of CustomResourceDefinitions: accepted names, establishment, served resources, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.kube.apiserver.resources import BUILT_IN, CRDS, CUSTOM_VERBS, SCALE, Catalogue, Key, Resource, Sub
from tests.kube.apiserver.status import Object
from tests.kube.apiserver.store import Change, Store

ESTABLISH_S = 0.05
"""A definition is served this long after its creation, so that clients must wait for the condition Established."""
DEFINITIONS = (CRDS, "customresourcedefinitions")
NO_CONFLICTS = ("NamesAccepted", "True", "NoConflicts", "no conflicts found")
ESTABLISHED = ("Established", "True", "InitialNamesAccepted", "the initial names have been accepted")
NOT_ACCEPTED = ("Established", "False", "NotAccepted", "not all names are accepted")
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


def condition(parts: tuple[str, str, str, str], now: str) -> Object:
    """Return a condition from type, status, reason and message."""
    kind, status, reason, message = parts
    return {"type": kind, "status": status, "lastTransitionTime": now, "reason": reason, "message": message}


def resources_of(definition: Object) -> list[Resource]:
    """Return the served resources of a definition."""
    spec = definition["spec"]
    names = spec["names"]
    storage = next(version["name"] for version in spec["versions"] if version["storage"])
    found = []
    for version in spec["versions"]:
        if not version["served"]:
            continue
        subs = version.get("subresources") or {}
        listed = ([Sub("status", names["kind"])] if subs.get("status") is not None else []) + (
            [SCALE] if subs.get("scale") is not None else []
        )
        warning = ""
        if version.get("deprecated"):
            group, kind = spec["group"], names["kind"]
            replaced = f"{group}/{version['name']} {kind} is deprecated; use {group}/{storage} {kind}"
            warning = version.get("deprecationWarning") or replaced
        found.append(
            Resource(
                spec["group"], version["name"], names["kind"], names["plural"], spec["scope"] == "Namespaced",
                CUSTOM_VERBS, tuple(listed), tuple(names.get("shortNames") or ()), tuple(names.get("categories") or ()),
                singular=names["singular"], list_kind=names["listKind"], generation=True,
                schema=(version.get("schema") or {}).get("openAPIV3Schema") or {"type": "object"},
                printer_columns=tuple(version.get("additionalPrinterColumns") or ()),
                selectable=tuple(part["jsonPath"] for part in version.get("selectableFields") or ()),
                scale=subs.get("scale"), warning=warning, storage_version=storage,
            )
        )  # fmt: skip
    return found


class Definitions:
    """Keeps the catalogue in step with the stored definitions."""

    def __init__(self, store: Store, catalogue: Catalogue, now: Callable[[], str], cleanup_s: float = 0.0) -> None:
        """Args: `cleanup_s`: time from the deletion of a definition to that of its objects, in seconds."""
        self._store, self._cleanup_s = store, cleanup_s
        self._catalogue = catalogue
        self._now = now
        self._timers: set[asyncio.TimerHandle] = set()
        store.listen(self._changed)

    def start(self) -> None:
        """Serve what a journal has brought back."""
        for key, held in list(self._store.select(DEFINITIONS)):
            if _is_established(held):
                self._serve(held)
            else:
                self._later(key)

    def close(self) -> None:
        """Cancel what has not happened yet."""
        for timer in self._timers:
            timer.cancel()

    def _later(self, key: Key) -> None:
        timer = asyncio.get_running_loop().call_later(ESTABLISH_S, self._establish, key)
        self._timers.add(timer)

    def _changed(self, change: Change) -> None:
        if change.key[:2] == DEFINITIONS:
            self._definition_changed(change)
        elif change.after is None:
            self._instance_gone(change.key)

    def _definition_changed(self, change: Change) -> None:
        if change.after is None:
            assert change.before is not None
            self._withdraw(change.before)
        elif change.before is None:
            self._later(change.key)
        elif change.after["metadata"].get("deletionTimestamp"):
            if not change.before["metadata"].get("deletionTimestamp"):
                timer = asyncio.get_running_loop().call_later(self._cleanup_s, self._clean_up, change.key)
                self._timers.add(timer)
        elif _is_established(change.after):
            self._serve(change.after)

    def _establish(self, key: Key) -> None:
        """Accept the names of a new definition, or tell which are taken."""
        held = self._store.get(key)
        if held is None or held["status"].get("conditions"):
            return
        now = self._now()
        names = held["spec"]["names"]
        taken = self._taken(held)
        status = dict(held["status"])
        if taken:
            status["conditions"] = [condition(taken, now), condition(NOT_ACCEPTED, now)]
        else:
            status["conditions"] = [condition(NO_CONFLICTS, now), condition(ESTABLISHED, now)]
            status["acceptedNames"] = dict(names)
        self._store.write(key, {**_managed(held, now), "status": status})

    def _taken(self, definition: Object) -> tuple[str, str, str, str] | None:
        """Return the condition for a name that another resource of the group has."""
        spec = definition["spec"]
        names = spec["names"]
        others = [
            resource for resource in self._catalogue.custom.values()
            if resource.group == spec["group"] and resource.plural != names["plural"]
        ]  # fmt: skip
        for resource in others:
            if resource.list_kind == names["listKind"]:
                return ("NamesAccepted", "False", "ListKindConflict", f'"{names["listKind"]}" is already in use')
            if resource.kind == names["kind"]:
                return ("NamesAccepted", "False", "KindConflict", f'"{names["kind"]}" is already in use')
        return None

    def _serve(self, definition: Object) -> None:
        self._forget(definition)
        for resource in resources_of(definition):
            self._catalogue.custom[resource.group, resource.version, resource.plural] = resource

    def _forget(self, definition: Object) -> None:
        spec = definition["spec"]
        gone = [key for key in self._catalogue.custom if (key[0], key[2]) == (spec["group"], spec["names"]["plural"])]
        for key in gone:
            del self._catalogue.custom[key]

    def _withdraw(self, definition: Object) -> None:
        self._forget(definition)
        spec = definition["spec"]
        self._store.end_watches((spec["group"], spec["names"]["plural"]))

    def _clean_up(self, key: Key) -> None:
        """Delete the instances of a definition, then the definition; wait for instances with finalizers."""
        held = self._store.get(key)
        if held is None:
            return
        kind = (held["spec"]["group"], held["spec"]["names"]["plural"])
        for instance_key, instance in list(self._store.select(kind)):
            if not instance["metadata"].get("finalizers"):
                self._store.write(instance_key, None)
            elif not instance["metadata"].get("deletionTimestamp"):
                metadata = dict(instance["metadata"])
                metadata |= {"deletionTimestamp": self._now(), "deletionGracePeriodSeconds": 0}
                metadata["generation"] = metadata.get("generation", 0) + 1
                self._store.write(instance_key, {**instance, "metadata": metadata})
        held = self._store.get(key)
        if held is not None and self._store.objects[kind]:
            text = "CustomResource deletion is in progress"
            ending = condition(("Terminating", "True", "InstanceDeletionInProgress", text), self._now())
            kept = [part for part in held["status"]["conditions"] if part["type"] != "Terminating"]
            self._store.write(key, {**held, "status": {**held["status"], "conditions": [*kept, ending]}})
        elif held is not None:
            self._store.write(key, None)

    def _instance_gone(self, key: Key) -> None:
        if any((r.group, r.plural) == key[:2] for r in BUILT_IN):
            return
        name: Key = (*DEFINITIONS, "", f"{key[1]}.{key[0]}")
        held = self._store.get(name)
        if held is not None and held["metadata"].get("deletionTimestamp") and not self._store.objects[key[:2]]:
            self._store.write(name, None)

    def terminating(self, resource: Resource) -> bool:
        """Return whether the definition of a resource is being deleted."""
        held = self._store.get((*DEFINITIONS, "", f"{resource.plural}.{resource.group}"))
        return held is not None and bool(held["metadata"].get("deletionTimestamp"))


def _is_established(definition: Object) -> bool:
    conditions = definition["status"].get("conditions") or []
    return any(part["type"] == "Established" and part["status"] == "True" for part in conditions)


def _managed(definition: Object, now: str) -> Object:
    """Return a definition with the server as the manager of its status."""
    fields: Object = {"f:status": {"f:acceptedNames": {"f:kind": {}, "f:plural": {}}, "f:conditions": {}}}
    entry = {
        "manager": "kube-apiserver", "operation": "Update", "apiVersion": "apiextensions.k8s.io/v1", "time": now,
        "fieldsType": "FieldsV1", "fieldsV1": fields, "subresource": "status",
    }  # fmt: skip
    metadata = definition["metadata"]
    return {**definition, "metadata": {**metadata, "managedFields": [*(metadata.get("managedFields") or []), entry]}}
