"""Rules of Events, which differ between the core API and events.k8s.io. Both see the stored, core form."""

from __future__ import annotations

from tests.kube.apiserver.names import label_key_errors
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import Cause, Object, invalid, required

NOTE_MAX_LENGTH = 1_024
TYPES = ("Normal", "Warning")
FREE = frozenset({"series", "metadata", "apiVersion", "kind"})


def validate_new(resource: Resource, found: Object) -> list[Cause]:
    """Return what is wrong with a new event."""
    involved = found["involvedObject"].get("namespace", "")
    namespace = found["metadata"].get("namespace", "")
    new_api = resource.group == "events.k8s.io"
    if involved != namespace and not (not involved and namespace == "default"):
        return [invalid("involvedObject.namespace", involved, "does not match event.namespace")]
    return _new_api(found) if new_api else []


def _new_api(found: Object) -> list[Cause]:
    causes = []
    if not found.get("eventTime"):
        causes.append(required("eventTime"))
    controller = found.get("reportingComponent", "")
    if controller:
        causes += [invalid("reportingController", controller, text) for text in label_key_errors(controller)]
    if found.get("type", "") not in TYPES:
        causes.append(invalid("type", "", f"has invalid value: {found.get('type', '')}"))
    if len(found.get("message", "")) > NOTE_MAX_LENGTH:
        causes.append(invalid("message", "", f"can have at most {NOTE_MAX_LENGTH} characters"))
    series = found.get("series")
    if series is not None and series.get("count", 0) < 2:
        causes.append(invalid("series.count", "", "should be at least 2"))
    return causes


def validate_changes(resource: Resource, found: Object, before: Object) -> list[Cause]:
    """Return what an update changes that it may not change."""
    if resource.group != "events.k8s.io":
        return validate_new(resource, found)
    causes = [
        invalid(name, found.get(name), "field is immutable")
        for name in {**before, **found}
        if name not in FREE and found.get(name) != before.get(name)
    ]
    return _new_api(found) + causes
