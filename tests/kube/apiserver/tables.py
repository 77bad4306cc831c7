"""Tables and partial metadata: what clients get that ask for columns, or for metadata only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from tests.kube.apiserver.golang import parse_time
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import Object

META = {"apiVersion": "meta.k8s.io/v1"}
NAME_TEXT = (
    "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a "
    "client to request the generation of an appropriate name automatically. Name is primarily intended for creation "
    "idempotence and configuration definition. Cannot be updated. More info: "
    "https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names"
)
AGE_TEXT = (
    "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed "
    "to be set in happens-before order across separate operations. Clients may not set this value. It is represented "
    "in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: "
    "https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata"
)
DATA_TEXT = (
    "Data contains the configuration data. Each key must consist of alphanumeric characters, '-', '_' or '.'. Values "
    "with non-UTF-8 byte sequences must use the BinaryData field. The keys stored in Data must not overlap with the "
    "keys in the BinaryData field, this is enforced during validation process."
)
NODE_TEXT = (
    "NodeName indicates in which node this pod is scheduled. If empty, this pod is a candidate for scheduling by the "
    "scheduler defined in schedulerName. Once this field is set, the kubelet for this node becomes responsible for the "
    "lifecycle of this pod. This field should not be used to express a desire for the pod to be scheduled on a "
    "specific node. https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#nodename"
)
NOMINATED_TEXT = (
    "nominatedNodeName is set only when this pod preempts other pods on the node, but it cannot be scheduled right "
    "away as preemption victims receive their graceful termination periods. This field does not guarantee that the pod "
    "will be scheduled on this node. Scheduler may decide to place the pod elsewhere if other nodes become available "
    "sooner. Scheduler may also decide to give the resources on this node to a higher priority pod that is created "
    "after preemption. As a result, this field may be different than PodSpec.nodeName when the pod is scheduled."
)
GATES_TEXT = (
    "If specified, all readiness gates will be evaluated for pod readiness. A pod is ready when all its containers are "
    'ready AND all conditions specified in the readiness gates have status equal to "True" More info: '
    "https://git.k8s.io/enhancements/keps/sig-network/580-pod-readiness-gates"
)
RESTARTS_TEXT = (
    "The number of times the containers in this pod have been restarted and when the last container in this pod has "
    "restarted."
)


def column(name: str, description: str, priority: int = 0, kind: str = "string", form: str = "") -> Object:
    """Return the definition of a column."""
    return {"name": name, "type": kind, "format": form, "description": description, "priority": priority}


NAME = column("Name", NAME_TEXT, form="name")
AGE = column("Age", AGE_TEXT)
POD_COLUMNS = (
    NAME,
    column("Ready", "The aggregate readiness state of this pod for accepting traffic."),
    column("Status", "The aggregate status of the containers in this pod."),
    column("Restarts", RESTARTS_TEXT),
    AGE,
    column(
        "IP", "podIP address allocated to the pod. Routable at least within the cluster. Empty if not yet allocated.", 1
    ),
    column("Node", NODE_TEXT, 1),
    column("Nominated Node", NOMINATED_TEXT, 1),
    column("Readiness Gates", GATES_TEXT, 1),
)


def age(found: Object, now: datetime) -> str:
    """Return the age of an object as kubectl shows it."""
    created = parse_time(found["metadata"]["creationTimestamp"], micro=False)
    seconds = max(0, int((now - created).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours = minutes // 60
    return f"{hours}h" if hours < 48 else f"{hours // 24}d"


def _pod_cells(found: Object, now: datetime) -> list[Any]:
    spec, status = found["spec"], found["status"]
    states = status.get("containerStatuses") or []
    ready = sum(bool(state.get("ready")) for state in states)
    phase = "Terminating" if found["metadata"].get("deletionTimestamp") else status.get("phase", "Unknown")
    restarts = sum(state.get("restartCount", 0) for state in states)
    none = "<none>"
    return [
        found["metadata"]["name"], f"{ready}/{len(spec.get('containers') or [])}", phase, str(restarts),
        age(found, now), status.get("podIP") or none, spec.get("nodeName") or none,
        status.get("nominatedNodeName") or none, none,
    ]  # fmt: skip


def _config_map_cells(found: Object, now: datetime) -> list[Any]:
    count = len(found.get("data") or {}) + len(found.get("binaryData") or {})
    return [found["metadata"]["name"], count, age(found, now)]


BUILT_IN: dict[str, tuple[Sequence[Object], Callable[[Object, datetime], list[Any]]]] = {
    "Pod": (POD_COLUMNS, _pod_cells),
    "ConfigMap": ((NAME, column("Data", DATA_TEXT), AGE), _config_map_cells),
}


def _plain_cells(found: Object, now: datetime) -> list[Any]:
    return [found["metadata"]["name"], age(found, now)]


def _custom_columns(resource: Resource) -> list[Object]:
    text = "Custom resource definition column (in JSONPath format): "
    columns = [NAME]
    for printed in resource.printer_columns:
        description = printed.get("description") or text + printed["jsonPath"]
        columns.append(
            column(printed["name"], description, printed.get("priority", 0), printed["type"], printed.get("format", ""))
        )
    return columns if resource.printer_columns else [NAME, column("Age", AGE_TEXT, kind="date")]


def _custom_cells(resource: Resource, found: Object, now: datetime) -> list[Any]:
    if not resource.printer_columns:
        return [found["metadata"]["name"], age(found, now)]
    cells: list[Any] = [found["metadata"]["name"]]
    for printed in resource.printer_columns:
        value = json_path(found, printed["jsonPath"])
        cells.append(age(found, now) if printed["type"] == "date" and value is not None else value)
    return cells


def json_path(found: Object, path: str) -> Any:
    """Return the value at a path of a printer column: fields, indices, and `[?(@.type=='Ready')]`."""
    value: Any = found
    steps = re.findall(r"\.([\w-]+)|\[(\d+)\]|\[\?\(@\.(\w+)\s*==\s*['\"]([^'\"]*)['\"]\)\]", path)
    for name, number, key, wanted in steps:
        if name:
            value = value.get(name) if isinstance(value, dict) else None
        elif number:
            value = value[int(number)] if isinstance(value, list) and int(number) < len(value) else None
        else:
            items = value if isinstance(value, list) else []
            value = next((item for item in items if item.get(key) == wanted), None)
    return value


def partial(found: Object) -> Object:
    """Return the metadata of an object alone."""
    return {"kind": "PartialObjectMetadata", **META, "metadata": found["metadata"]}


def table(
    resource: Resource, items: Sequence[Object], metadata: Object, include: str = "", columns: bool = True
) -> Object:
    """Return the Table of objects; `include` is the parameter includeObject."""
    now = datetime.now(UTC)
    definitions: Sequence[Object] = _custom_columns(resource)
    built_in = BUILT_IN.get(resource.kind)
    if not resource.custom:
        definitions = built_in[0] if built_in else (NAME, AGE)
    rows = []
    for found in items:
        if resource.custom:
            cells = _custom_cells(resource, found, now)
        else:
            cells = (built_in[1] if built_in else _plain_cells)(found, now)
        shown = {"None": None, "Object": found}.get(include, partial(found))
        rows.append({"cells": cells, "object": shown})
    return {
        "kind": "Table", **META, "metadata": metadata, "columnDefinitions": list(definitions) if columns else None,
        "rows": rows,
    }  # fmt: skip
