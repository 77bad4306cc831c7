"""PATCH: merge, JSON and strategic merge patches, and server-side apply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.kube.apiserver import bodies, managers, patches
from tests.kube.apiserver.decode import Decoder, parse_json, plain
from tests.kube.apiserver.fieldsets import check_types
from tests.kube.apiserver.golang import GoError, json_kind
from tests.kube.apiserver.requests import APPLY, Answer, Request
from tests.kube.apiserver.resources import BUILT_IN, Resource
from tests.kube.apiserver.status import (
    MODIFIED,
    ApiError,
    Object,
    Where,
    bad_request,
    conflict,
    invalid,
    not_found,
    unprocessable,
)  # fmt: skip
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.types import resource_type
from tests.kube.apiserver.views import to_storage, to_version
from tests.kube.apiserver.writes import Writes, check_identity, check_namespace, empty_of

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
CUSTOM_TYPES = f"{JSON}, {MERGE}, {APPLY}"
METADATA_ORDER = (
    "name", "generateName", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp",
    "deletionTimestamp", "deletionGracePeriodSeconds", "labels", "annotations", "ownerReferences", "finalizers",
    "managedFields",
)  # fmt: skip
ENTRY_ORDER = ("manager", "operation", "apiVersion", "time", "fieldsType", "fieldsV1", "subresource")


def ordered(found: Object, custom: bool) -> str:
    """Return an object as JSON in the order in which error messages show it."""
    if custom:
        return json.dumps(_sorted(found), separators=(",", ":"), ensure_ascii=False)
    made = {name: _sorted(found[name]) for name in sorted(found)}
    metadata = found.get("metadata")
    if isinstance(metadata, dict):
        made["metadata"] = _by(metadata, METADATA_ORDER)
        if isinstance(metadata.get("managedFields"), list):
            entries = [_by(entry, ENTRY_ORDER) for entry in metadata["managedFields"]]
            made["metadata"]["managedFields"] = [{**e, "fieldsV1": _sorted(e.get("fieldsV1"))} for e in entries]
    return json.dumps(made, separators=(",", ":"), ensure_ascii=False)


def _by(found: Object, order: Sequence[str]) -> Object:
    return {name: found[name] for name in (*order, *sorted(found.keys() - set(order))) if name in found}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


class Patching:
    """Answers PATCH."""

    def __init__(self, store: Store, writes: Writes) -> None:
        self._store = store
        self._writes = writes

    async def patch(self, request: Request) -> Answer:
        """Answer a PATCH of an object or its status."""
        media = request.content_type
        if media not in (MERGE, JSON, STRATEGIC, APPLY):
            raise ApiError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})
        if media == STRATEGIC and request.resource.custom:
            text = f"{bodies.UNKNOWN_FORMAT}{CUSTOM_TYPES}"
            raise ApiError(415, "UnsupportedMediaType", text)
        request.check_options("PatchOptions")
        bodies.too_large(request.body)
        if media == APPLY:
            return await self._apply(request)
        held = self._store.get(request.resource.key(request.namespace, request.name))
        if held is None:
            raise not_found(request.resource.where(request.name))
        patch = _parsed(request, media)

        async def candidate(before: Object) -> Object:
            found = self._patched(request, media, patch, to_version(request.resource, before))
            check_identity(request, found)
            return to_storage(request.resource, found)

        return Answer(200, to_version(request.resource, await self._writes.update(request, candidate)))

    def _patched(self, request: Request, media: str, patch: Any, before: Object) -> Object:
        """Return the patched object, decoded; raise ApiError 422 if the result is no such object."""
        resource = request.resource
        shown = ""
        if media == MERGE:
            made = patches.merge_patch(before, patch)
        elif media == STRATEGIC:
            made = patches.strategic(resource_type(resource), before, patch)
            shown = patches.go_map(patch)
        else:
            try:
                made = patches.json_patch(before, patch)
            except patches.PatchFailed:
                text = "the server rejected our request due to an error in our request"
                raise ApiError(422, "Invalid", text, {}) from None
        made.setdefault("metadata", {})
        if made["metadata"] is None:
            made["metadata"] = {}
        decode = bodies.decode_custom if resource.custom else bodies.decode_value
        try:
            _check_kind(resource, made)
            return decode(request, resource, plain(made), "strict decoding error: ")
        except GoError as error:
            value = shown or ordered(made, resource.custom)
            raise unprocessable(Where("", ""), [invalid("patch", value, str(error))]) from None

    async def _apply(self, request: Request) -> Answer:
        """Answer a server-side apply."""
        resource = request.resource
        config, warnings = bodies.parse_yaml(request.body.decode(errors="replace"))
        request.warnings += warnings
        config = config if isinstance(config, dict) else {}
        config = self._checked_config(request, config)
        key = resource.key(request.namespace, request.name)
        live = self._store.get(key)
        type_ = resource_type(resource)
        subject = f"{config['metadata'].get('namespace', '')}/{request.name}; {_group_version(resource.api_version)}"
        check_types(type_, config, f"{subject}, Kind={resource.kind}")
        check_namespace(request, config)
        roots = managers.ignored(request.subresource, resource.custom, resource.kind)
        roots = roots if resource.sub("status") is not None else ()
        force = request.flag("force")
        writer = self._writes.writer(request)
        if live is None:
            if request.subresource:
                raise not_found(resource.where(request.name))
            return await self._apply_new(request, config, writer, roots)
        version = config["metadata"].pop("resourceVersion", "")
        if version and version != live["metadata"]["resourceVersion"]:
            raise conflict(resource.where(request.name), MODIFIED)

        async def candidate(before: Object) -> Object:
            shown = to_version(resource, before)
            applied = managers.apply(type_, shown, config, writer, force, roots)
            found = self._decoded(request, applied.merged)
            return to_storage(resource, managers.write(found, applied.entries))

        found = await self._writes.update(request, candidate, entries=False)
        return Answer(200, to_version(resource, found))

    async def _apply_new(
        self, request: Request, config: Object, writer: managers.Writer, roots: tuple[tuple[str, ...], ...]
    ) -> Answer:
        resource = request.resource
        if uid := config["metadata"].get("uid"):
            text = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
            raise conflict(resource.where(request.name), text)
        type_ = resource_type(resource)
        applied = managers.apply(type_, empty_of(resource, type_), config, writer, True, roots)
        found = self._decoded(request, applied.merged)
        made = await self._writes.create_object(request, to_storage(resource, found), applied.entries)
        return Answer(201, to_version(resource, made))

    def _checked_config(self, request: Request, config: Object) -> Object:
        """Return a configuration with a name; raise ApiError 400 for one that is about something else."""
        resource = request.resource
        kind, version = config.get("kind", ""), config.get("apiVersion", "")
        if (kind, version) != (resource.kind, resource.api_version):
            group_version = _group_version(version) if version else "/"
            raise bad_request(f"invalid object type: {group_version}, Kind={kind}")
        metadata = dict(config.get("metadata") or {})
        if "managedFields" in metadata:
            raise bad_request("metadata.managedFields must be nil")
        if not metadata.get("name") and not metadata.get("generateName"):
            metadata["name"] = request.name
        made = {**config, "metadata": metadata}
        if metadata.get("namespace", request.namespace) != request.namespace and resource.namespaced:
            check_namespace(request, made)
        check_identity(request, {**made, "metadata": {**metadata}})
        return made

    def _decoded(self, request: Request, found: Object) -> Object:
        decode = bodies.decode_custom if request.resource.custom else bodies.decode_value
        try:
            return decode(request, request.resource, plain(found), "strict decoding error: ")
        except GoError as error:
            raise ApiError(500, "", str(error)) from None


def _check_kind(resource: Resource, found: Object) -> None:
    """Raise GoError for a patched object of another kind: for what that kind refuses, or else for the kind."""
    kind, version = found.get("kind"), found.get("apiVersion")
    if resource.custom or (kind, version) == (resource.kind, resource.api_version):
        return
    other = next((r for r in BUILT_IN if (r.kind, r.api_version) == (kind, version)), None)
    if other is not None:
        Decoder().decode(resource_type(other), found)
    raise GoError(f"converting ({version}.{kind}) to (core.{resource.kind}): unknown conversion")


def _group_version(api_version: str) -> str:
    return api_version if "/" in api_version else f"/{api_version}"


def _parsed(request: Request, media: str) -> Any:
    """Return the value of a patch; raise ApiError 400 or 413."""
    text = request.body.decode(errors="replace")
    prefix = "" if media == STRATEGIC else "error decoding patch: "
    try:
        value = parse_json(text)
    except GoError as error:
        raise bad_request(f"{prefix}{error}") from None
    wanted = list if media == JSON else dict
    if not isinstance(value, wanted):
        go_type = "[]handlers.jsonPatchOp" if media == JSON else "map[string]interface {}"
        problem = f"json: cannot unmarshal {json_kind(value)} into Go value of type {go_type}"
        raise bad_request(f"{prefix}{problem}")
    if media == JSON and len(value) > patches.OPERATIONS_MAX:
        raise patches.too_many_operations(len(value))
    return plain(value)
