"""Forms of stored objects: versions of custom resources, both Event APIs, and what `Accept` asks for."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import ApiError, Object

AVAILABLE = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
TO_EVENTS_V1 = {
    "involvedObject": "regarding", "message": "note", "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp", "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount", "reportingComponent": "reportingController",
}  # fmt: skip
TO_CORE = {new: old for old, new in TO_EVENTS_V1.items()}


def to_version(resource: Resource, found: Object) -> Object:
    """Return a stored object as a version of its resource shows it."""
    if resource.group == "events.k8s.io":
        made = {TO_EVENTS_V1.get(name, name): value for name, value in found.items()}
        for name in ("reportingController", "reportingInstance"):
            if not made.get(name):
                made.pop(name, None)
        return {**made, "apiVersion": resource.api_version}
    if found.get("apiVersion") == resource.api_version:
        return found
    return {**found, "apiVersion": resource.api_version}


def to_storage(resource: Resource, found: Object) -> Object:
    """Return an object as it is stored."""
    if resource.group == "events.k8s.io":
        made = {TO_CORE.get(name, name): value for name, value in found.items()}
        empty: Object = {
            "involvedObject": {}, "source": {}, "firstTimestamp": None, "lastTimestamp": None, "eventTime": None,
            "reportingComponent": "", "reportingInstance": "",
        }  # fmt: skip
        return {**empty, **made, "apiVersion": "v1"}
    return found


def without_type(found: Object) -> Object:
    """Return an item of a list of a built-in kind, which has no apiVersion and kind."""
    return {name: value for name, value in found.items() if name not in ("apiVersion", "kind")}


class Form:
    """The representation of an answer: `json` or `yaml`, and `Table`, `PartialObjectMetadata` or the object."""

    def __init__(self, media: str = "json", wanted: str = "") -> None:
        self.media = media
        self.wanted = wanted


def negotiate(headers: Mapping[str, str]) -> Form:
    """Return the first representation in `Accept` that the server has; raise ApiError 406."""
    accept = headers.get("accept") or "*/*"
    unknown_form = False
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        options = dict(piece.split("=", 1) for piece in parameters if "=" in piece)
        if media in ("application/json", "*/*", "application/*"):
            wanted = options.get("as", "")
            if not wanted or _known_form(wanted, options):
                return Form("json", wanted.removesuffix("List") if "Metadata" in wanted else wanted)
            unknown_form = True
        elif media in ("application/yaml", "text/yaml"):
            return Form("yaml")
    if unknown_form:
        raise ApiError(406, "NotAcceptable", f"only the following media types are accepted: {AVAILABLE}")
    raise ApiError(406, "NotAcceptable", f"406: Not Acceptable\n\nAvailable representations: {AVAILABLE}", {})


def _known_form(wanted: str, options: Mapping[str, str]) -> bool:
    if wanted == "APIGroupDiscoveryList":
        return (options.get("g"), options.get("v")) == ("apidiscovery.k8s.io", "v2")
    known = ("Table", "PartialObjectMetadata", "PartialObjectMetadataList")
    return wanted in known and (options.get("g"), options.get("v")) == ("meta.k8s.io", "v1")
