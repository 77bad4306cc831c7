"""Deletions: preconditions, grace periods of pods, finalizers, propagation, and whole collections."""

from __future__ import annotations

from datetime import timedelta

from tests.kube.apiserver import admission, bodies
from tests.kube.apiserver.golang import format_time
from tests.kube.apiserver.reads import listing, selection
from tests.kube.apiserver.requests import Answer, Request, success
from tests.kube.apiserver.resources import Key, Resource
from tests.kube.apiserver.status import (
    Cause,
    Object,
    conflict,
    invalid,
    not_found,
    options_invalid,
    unsupported,
)  # fmt: skip
from tests.kube.apiserver.views import to_version
from tests.kube.apiserver.webhooks import Review, options
from tests.kube.apiserver.writes import Backend

POLICIES = ("Foreground", "Background", "Orphan", "nil")
FINALIZERS = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}
RETURNS_OBJECT = frozenset({"Pod", "Service", "Namespace", "ServiceAccount"})
"""Kinds whose deletion answers with the object."""
DEFAULT_GRACE_S = 30


def check_options(found: Object) -> None:
    """Raise ApiError 422 for options that are not valid."""
    causes: list[Cause] = []
    policy = found.get("propagationPolicy")
    if policy is not None and found.get("orphanDependents") is not None:
        text = "orphanDependents and deletionPropagation cannot be both set"
        causes.append(invalid("propagationPolicy", policy, text))
    elif policy is not None and policy not in POLICIES:
        causes.append(unsupported("propagationPolicy", policy, POLICIES))
    dry_run = found.get("dryRun")
    if dry_run and dry_run != ["All"]:
        causes.append(unsupported("dryRun", dry_run, ("All",)))
    if causes:
        raise options_invalid("DeleteOptions", causes)


class Deletion:
    """Answers DELETE."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._store = backend.store

    async def delete(self, request: Request) -> Answer:
        """Answer the deletion of one object."""
        found = bodies.delete_options(request)
        check_options(found)
        admission.check_delete(request)
        resource = request.resource
        before = self._store.get(resource.key(request.namespace, request.name))
        if before is None:
            raise not_found(resource.where(request.name))
        after, gone = await self.remove(request, before, found)
        if gone and resource.kind not in RETURNS_OBJECT:
            details = {**resource.where(request.name).details(), "uid": before["metadata"]["uid"]}
            return Answer(200, success(details))
        return Answer(200, to_version(resource, after))

    async def remove(
        self, request: Request, before: Object, wanted: Object, reviewed: bool = True
    ) -> tuple[Object, bool]:
        """Delete an object as far as its finalizers and grace period allow; return it and whether it is gone.

        Without `reviewed` no webhook is asked: an eviction is reviewed as such.
        """
        resource = request.resource
        name = before["metadata"]["name"]
        self._check_preconditions(resource, before, wanted.get("preconditions") or {})
        dry_run = request.dry_run or wanted.get("dryRun") == ["All"]
        if reviewed:
            await self._review(request, before, wanted)
        key = resource.key(before["metadata"].get("namespace", ""), name)
        made = self._marked(resource, before, wanted)
        held_back = _held_back(made)
        if dry_run:
            return (made or before), not held_back
        if made is None or (not held_back and resource.kind != "Pod"):
            if made is None and before["metadata"].get("deletionTimestamp") and _held_back(before):
                return before, False
            return self._store.write(key, None), True
        if made != before:
            made = self._store.write(key, made)
        if not held_back:
            self._store.write(key, None)
        return made, not held_back

    async def _review(self, request: Request, before: Object, wanted: Object) -> None:
        """Ask the webhooks; a deletion as part of a collection is asked about without a name."""
        review_options = {**options(request, "DeleteOptions"), **_shown_options(wanted)}
        name = before["metadata"]["name"] if request.name else ""
        review = Review(request, "DELETE", None, to_version(request.resource, before), review_options, name)
        await self._backend.webhooks.mutate(review)
        await self._backend.webhooks.validate(review)

    def _check_preconditions(self, resource: Resource, before: Object, wanted: Object) -> None:
        metadata = before["metadata"]
        where = type(resource.where())("", resource.kind, metadata["name"])
        uid, version = wanted.get("uid"), wanted.get("resourceVersion")
        if uid and uid != metadata["uid"]:
            raise conflict(
                where,
                f"the UID in the precondition ({uid}) does not match the UID in record ({metadata['uid']}). The object "
                "might have been deleted and then recreated",
            )
        if version and version != metadata["resourceVersion"]:
            raise conflict(
                where,
                f"the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record "
                f"({metadata['resourceVersion']}). The object might have been modified",
            )

    def _marked(self, resource: Resource, before: Object, wanted: Object) -> Object | None:
        """Return the object as one that is being deleted, or None if it needs no mark."""
        metadata = dict(before["metadata"])
        finalizers = [name for name in metadata.get("finalizers") or [] if name not in FINALIZERS.values()]
        if wanted.get("propagationPolicy") is None:
            finalizers = list(metadata.get("finalizers") or [])
        added = FINALIZERS.get(wanted.get("propagationPolicy") or "")
        if added or (wanted.get("orphanDependents") and not added):
            finalizers.append(added or "orphan")
        if resource.kind == "Pod":
            grace_s = _grace_s(before, wanted)
        elif resource.kind == "Namespace" or (resource.kind == "CustomResourceDefinition" and not resource.custom):
            return self._marked_slowly(before)
        elif not finalizers:
            return None
        else:
            grace_s = 0
        if metadata.get("deletionTimestamp"):
            if grace_s >= metadata.get("deletionGracePeriodSeconds", 0):
                return before
        elif metadata.get("generation"):
            metadata["generation"] += 1
        moment = self._backend.clock() + timedelta(seconds=grace_s)
        metadata |= {"deletionTimestamp": format_time(moment), "deletionGracePeriodSeconds": grace_s}
        if finalizers:
            metadata["finalizers"] = finalizers
        return {**before, "metadata": metadata}

    def _marked_slowly(self, before: Object) -> Object:
        """Return a namespace or definition as terminating: a controller removes its content first."""
        if before["metadata"].get("deletionTimestamp"):
            return before
        now = self._backend.now()
        metadata = {**before["metadata"], "deletionTimestamp": now}
        if before["kind"] == "Namespace":
            return {**before, "metadata": metadata, "status": {**before["status"], "phase": "Terminating"}}
        metadata["finalizers"] = ["customresourcecleanup.apiextensions.k8s.io"]
        condition = {
            "type": "Terminating", "status": "True", "lastTransitionTime": now, "reason": "InstanceDeletionPending",
            "message": "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
        }  # fmt: skip
        conditions = [*(before["status"].get("conditions") or []), condition]
        return {**before, "metadata": metadata, "status": {**before["status"], "conditions": conditions}}

    async def collection(self, request: Request) -> Answer:
        """Answer the deletion of a collection: the list of what was found."""
        wanted = bodies.delete_options(request)
        check_options(wanted)
        selected = selection(request)
        found: list[tuple[Key, Object]] = [
            (key, item)
            for key, item in self._store.select(request.resource.stored_in, request.where_namespace())
            if selected.matches(item)
        ]
        version = str(self._store.version)
        for key, item in found:
            if self._store.get(key) is item:
                await self.remove(request, item, wanted)
        shown = [to_version(request.resource, item) for _, item in found]
        return Answer(200, listing(request.resource, shown, {"resourceVersion": version}))


def _shown_options(wanted: Object) -> Object:
    return {name: value for name, value in wanted.items() if name not in ("kind", "apiVersion")}


def _grace_s(pod: Object, wanted: Object) -> int:
    """Return the grace period of a pod's deletion. A pod without a node, or that has ended, needs none."""
    asked = wanted.get("gracePeriodSeconds")
    grace_s: int = asked if asked is not None else pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    finished = pod["status"].get("phase") in ("Succeeded", "Failed")
    if not pod["spec"].get("nodeName") or finished:
        return 0
    return 1 if grace_s < 0 else grace_s


def _held_back(found: Object | None) -> bool:
    """Return whether finalizers or a grace period keep an object that is marked."""
    if found is None:
        return False
    metadata = found["metadata"]
    if metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds"):
        return True
    return found["kind"] == "Namespace" and bool(found["spec"].get("finalizers"))
