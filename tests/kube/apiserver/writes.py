"""Writes: create and update, with admission, ownership of fields, locking by resourceVersion, and finalizers."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from tests.kube.apiserver import admission, bodies, managers, strategy
from tests.kube.apiserver.access import Access
from tests.kube.apiserver.decode import Decoder
from tests.kube.apiserver.golang import GoError, format_time, parse_uint
from tests.kube.apiserver.pods import random_suffix
from tests.kube.apiserver.requests import Answer, Request
from tests.kube.apiserver.resources import RBAC, Resource
from tests.kube.apiserver.status import (
    MODIFIED,
    ApiError,
    Object,
    already_exists,
    bad_request,
    conflict,
    internal,
    not_found,
    unprocessable,
)  # fmt: skip
from tests.kube.apiserver.status import invalid as invalid_value
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.types import Type, resource_type
from tests.kube.apiserver.views import to_storage, to_version
from tests.kube.apiserver.webhooks import Review, Webhooks, options

NAME_PREFIX_MAX_LENGTH = 58
STORED_MAX_BYTES = 1_572_864
NAMESPACE_DIFFERS = "the namespace of the provided object does not match the namespace sent on the request"
Clock = Callable[[], datetime]
Candidate = Callable[[Object], Awaitable[Object]]
"""Turns the stored object into the wanted one; raises ApiError."""


@dataclass(slots=True)
class Backend:
    """What writes need: the objects, the webhooks, permissions, and the time."""

    store: Store
    webhooks: Webhooks
    access: Access
    clock: Clock

    def now(self) -> str:
        """Return the present as the API shows it."""
        return format_time(self.clock())


def check_identity(request: Request, found: Object) -> None:
    """Raise ApiError 400 if a body is about another object than the path."""
    metadata = found["metadata"]
    name = metadata.get("name")
    if not name:
        raise bad_request(
            f"the name of the object ({request.name} based on URL) was undeterminable: name must be provided"
        )
    if name != request.name:
        raise bad_request(f"the name of the object ({name}) does not match the name on the URL ({request.name})")
    check_namespace(request, found)


def check_namespace(request: Request, found: Object) -> None:
    """Put the request's namespace into an object in place; raise ApiError 400 for another one."""
    metadata = found["metadata"]
    if not request.resource.namespaced:
        metadata.pop("namespace", None)
    elif metadata.setdefault("namespace", request.namespace) != request.namespace:
        raise bad_request(NAMESPACE_DIFFERS)


def empty_of(resource: Resource, type_: Type) -> Object:
    """Return the object that a new one is compared with to find the fields of its author."""
    empty: Object = {} if resource.custom else Decoder().decode(type_, {})
    return {"metadata": {}, **empty}


class Writes:
    """Creates and updates objects."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._store = backend.store

    async def create(self, request: Request) -> Answer:
        """Answer a POST to a collection."""
        request.check_options("CreateOptions")
        found = bodies.decode_body(request, request.resource)
        check_namespace(request, found)
        return Answer(201, to_version(request.resource, await self.create_object(request, found)))

    async def create_object(
        self, request: Request, found: Object, entries: list[managers.Entry] | None = None
    ) -> Object:
        """Store a new object; return it in its storage form. `entries` are the managers of an applied one."""
        resource, store = request.resource, self._store
        metadata = dict(found["metadata"])
        prefix = metadata.get("generateName", "")
        if not metadata.get("name") and prefix:
            metadata["name"] = prefix[:NAME_PREFIX_MAX_LENGTH] + random_suffix()
        for name in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "managedFields"):
            metadata.pop(name, None)
        version = metadata.pop("resourceVersion", "")
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self._backend.now()}
        made = {**found, "metadata": metadata}
        name = metadata.get("name", "")
        if resource.kind == "Namespace" and name:
            made["metadata"]["labels"] = {**metadata.get("labels", {}), "kubernetes.io/metadata.name": name}
        type_ = resource_type(resource)
        if entries is None:
            roots = managers.ignored("", resource.custom, resource.kind) if resource.sub("status") else ()
            made = managers.update(type_, empty_of(resource, type_), made, self.writer(request), roots)
        else:
            made = managers.write(made, entries)
        admission.check_namespace(store, request, name)
        self._check_role(request, made)
        made = strategy.prepare_create(store, resource, made)
        made = admission.admit_create(store, request, made)
        review = Review(request, "CREATE", to_version(resource, made), None, options(request, "CreateOptions"), name)
        made = await self._mutated(review)
        strategy.validate_new(request, to_storage(resource, made))
        name = made["metadata"]["name"]
        if resource.kind == "Pod":
            request.warnings += admission.pod_warnings(made)
        if resource.warning:
            request.warnings.append(resource.warning)
        await self._backend.webhooks.validate(
            Review(request, "CREATE", made, None, options(request, "CreateOptions"), name)
        )
        if version not in ("", "0") and entries is None:
            raise internal("resourceVersion should not be set on objects to be created")
        return self._store_new(request, to_storage(resource, made))

    def _store_new(self, request: Request, made: Object) -> Object:
        resource = request.resource
        name = made["metadata"]["name"]
        key = resource.key(request.namespace, name)
        held = self._store.get(key)
        if held is not None:
            raise already_exists(resource.where(name), bool(held["metadata"].get("deletionTimestamp")))
        if resource.custom and resource.storage_version:
            made = {**made, "apiVersion": f"{resource.group}/{resource.storage_version}"}
        if len(str(made)) > STORED_MAX_BYTES:
            raise internal("etcdserver: request is too large")
        return made if request.dry_run else self._store.write(key, made)

    async def _mutated(self, review: Review) -> Object:
        """Return the object after the mutating webhooks, decoded again if they changed it."""
        after = await self._backend.webhooks.mutate(review)
        assert after is not None
        if after == review.after:
            return after
        request, resource = review.request, review.request.resource
        quiet = Request(
            request.method, {"fieldValidation": ["Ignore"]}, request.headers, b"", request.user, request.verb, resource
        )
        decode = bodies.decode_custom if resource.custom else bodies.decode_value
        try:
            return decode(quiet, resource, after, "")
        except GoError as error:
            raise ApiError(500, "InternalError", f"Internal error occurred: {error}") from None

    def _check_role(self, request: Request, found: Object) -> None:
        resource = request.resource
        if resource.group == RBAC and resource.kind in ("Role", "ClusterRole"):
            where = resource.where(found["metadata"].get("name", ""))
            self._backend.access.check_escalation(request.user, found, request.namespace, where)

    def writer(self, request: Request) -> managers.Writer:
        """Return who a request's changes belong to."""
        time = "" if request.subresource == "scale" else self._backend.now()
        return managers.Writer(request.manager, request.resource.api_version, request.subresource, time)

    async def replace(self, request: Request) -> Answer:
        """Answer a PUT."""
        request.check_options("UpdateOptions")
        wanted = bodies.decode_body(request, request.resource)
        check_identity(request, wanted)
        held = self._store.get(request.resource.key(request.namespace, request.name))
        if held is None:
            if not request.resource.created_by_put or request.subresource:
                raise not_found(request.resource.where(request.name))
            wanted["metadata"].pop("resourceVersion", None)
            return Answer(201, to_version(request.resource, await self.create_object(request, wanted)))

        async def candidate(_: Object) -> Object:
            return to_storage(request.resource, wanted)

        return Answer(200, to_version(request.resource, await self.update(request, candidate)))

    async def update(self, request: Request, candidate: Candidate, entries: bool = True) -> Object:
        """Store a changed object; return it in its storage form. Without `entries`, managers are in the candidate."""
        resource, store = request.resource, self._store
        key = resource.key(request.namespace, request.name)
        before = store.get(key)
        if before is None:
            raise not_found(resource.where(request.name))
        found = await candidate(before)
        version = found["metadata"].get("resourceVersion", "")
        self._check_uid(request, found, before)
        type_ = resource_type(resource)
        if resource.kind == "Event":
            type_ = resource_type(Resource("", "v1", "Event", "events"))
        if entries:
            has_status = resource.sub("status") is not None
            roots = managers.ignored(request.subresource, resource.custom, resource.kind) if has_status else ()
            found = managers.update(type_, before, found, self.writer(request), roots)
        found = await self._reviewed(request, found, before)
        self._check_version(request, version, before)
        self._check_role(request, found)
        made = strategy.prepare_update(resource, found, before, request.subresource)
        strategy.validate_update(request, made, before)
        after = to_version(resource, made)
        await self._backend.webhooks.validate(
            Review(
                request, "UPDATE", after, to_version(resource, before), options(request, "UpdateOptions"), request.name
            )
        )
        if store.get(key) is not before:
            return await self.update(request, candidate, entries)
        return self._store_changed(request, made, before)

    async def _reviewed(self, request: Request, found: Object, before: Object) -> Object:
        resource = request.resource
        merged = strategy.prepare_update(resource, found, before, request.subresource)
        merged["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        review = Review(
            request, "UPDATE", to_version(resource, merged), to_version(resource, before),
            options(request, "UpdateOptions"), request.name,
        )  # fmt: skip
        after = await self._backend.webhooks.mutate(review)
        return found if after == review.after or after is None else to_storage(resource, after)

    def _check_uid(self, request: Request, found: Object, before: Object) -> None:
        uid, held = found["metadata"].get("uid"), before["metadata"]["uid"]
        if not uid or uid == held or request.method == "PATCH":
            return
        _, plural, namespace, name = request.resource.key(request.namespace, request.name)
        path = "/".join(filter(None, ("/registry", plural, namespace, name)))
        raise conflict(
            request.resource.where(request.name),
            f"StorageError: invalid object, Code: 4, Key: {path}, ResourceVersion: 0, AdditionalErrorMsg: Precondition "
            f"failed: UID in precondition: {uid}, UID in object meta: {held}",
        )

    def _check_version(self, request: Request, version: str, before: Object) -> None:
        """Raise ApiError if a write is not based on the stored object."""
        resource = request.resource
        try:
            based_on = parse_uint(version) if version else 0
        except GoError as error:
            raise internal(str(error)) from None
        if based_on == 0:
            if resource.custom and request.method == "PUT":
                cause = invalid_value("metadata.resourceVersion", 0, "must be specified for an update")
                raise unprocessable(resource.where(request.name), [cause])
        elif version != before["metadata"]["resourceVersion"]:
            raise conflict(resource.where(request.name), MODIFIED)

    def _store_changed(self, request: Request, made: Object, before: Object) -> Object:
        """Store a change, unless there is none; delete an object whose last finalizer goes."""
        metadata = dict(made["metadata"])
        metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
        made = {**made, "metadata": {name: value for name, value in metadata.items() if value != []}}
        if request.resource.custom:
            made["apiVersion"] = before["apiVersion"]
        if _without_times(made) == _without_times(before):
            return before
        if request.dry_run:
            return made
        key = request.resource.key(request.namespace, request.name)
        if deletable(made):
            self._store.write(key, None)
            return made
        return self._store.write(key, made)


def deletable(found: Object) -> bool:
    """Return whether nothing holds back an object that is being deleted."""
    metadata = found["metadata"]
    if not metadata.get("deletionTimestamp") or metadata.get("finalizers"):
        return False
    if found["kind"] == "Namespace" and found["apiVersion"] == "v1":
        return not found["spec"].get("finalizers")
    return not metadata.get("deletionGracePeriodSeconds")


def _without_times(found: Object) -> Object:
    """Return an object without the times of its managers, which alone are no change."""
    entries = [
        {name: value for name, value in entry.items() if name != "time"}
        for entry in found["metadata"].get("managedFields") or []
    ]
    return {**found, "metadata": {**found["metadata"], "managedFields": entries}}
