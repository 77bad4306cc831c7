"""InferencePool of the Gateway API inference extension: what it selects, and what it says of its endpoint picker.

Only the fields that discovery uses are decoded. Every one has a default, as those of `objects`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvroute.kube.api.objects import ObjectMeta
from kvroute.types import InputError, OwnPicker

GROUP_VERSION = "inference.networking.k8s.io/v1"
_REFERENCE = "spec.endpointPickerRef"
_HTTP = "http"


def not_installed(where: str = "") -> InputError:
    """Return the error of an API server that does not know the kind."""
    what = f"the API server has no InferencePool of {GROUP_VERSION}"
    hint = "install the definitions of the Gateway API inference extension, or list the engines in a cluster file"
    return InputError(what, where=where, hint=hint)


class PoolPort(msgspec.Struct, frozen=True):
    """A port number."""

    number: int = 0


class PoolSelector(msgspec.Struct, frozen=True, rename="camel"):
    """Labels that all pods of a pool have."""

    match_labels: dict[str, str] | None = None


class PickerReference(msgspec.Struct, frozen=True, rename="camel"):
    """The endpoint picker that gateways ask."""

    group: str = ""
    kind: str = "Service"
    name: str = ""
    port: PoolPort | None = None
    """Port of the Service. Its target port, on which the picker listens, may have another number."""
    failure_mode: str = "FailClose"
    """`FailOpen` or `FailClose`: what gateways do while the picker does not respond."""


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a pool selects."""

    selector: PoolSelector = PoolSelector()
    target_ports: list[PoolPort] | None = None
    app_protocol: str = _HTTP
    endpoint_picker_ref: PickerReference | None = None


class InferencePool(msgspec.Struct, frozen=True, kw_only=True):
    """One pool."""

    metadata: ObjectMeta = ObjectMeta()
    spec: PoolSpec = PoolSpec()


class ServicePort(msgspec.Struct, frozen=True, rename="camel"):
    """A port of a Service."""

    port: int = 0
    target_port: int | str | None = None
    """Number, or name of a port of the pods; None: that of the Service."""


class ServiceSpec(msgspec.Struct, frozen=True):
    """What a Service is."""

    type: str = "ClusterIP"
    ports: list[ServicePort] | None = None


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One Service."""

    metadata: ObjectMeta = ObjectMeta()
    spec: ServiceSpec = ServiceSpec()


@dataclass(frozen=True, slots=True)
class Members:
    """Which pods and ports are the endpoints of a pool."""

    labels: str
    """Label selector."""
    ports: tuple[int, ...]


def members_of(pool: InferencePool) -> Members:
    """Return the endpoints of a pool: each port of each pod is one.

    Raises:
        InputError: the pool selects nothing that kvroute can use.
    """
    labels = pool.spec.selector.match_labels
    if not labels:
        raise InputError("it selects no pods", where="spec.selector", hint="add matchLabels")
    ports = tuple(port.number for port in pool.spec.target_ports or ())
    if not ports or len(set(ports)) < len(ports) or not all(0 < port < 2**16 for port in ports):
        hint = "list the ports of the engines, each once"
        raise InputError("it has no usable ports", where="spec.targetPorts", hint=hint)
    if pool.spec.app_protocol != _HTTP:
        what = f"kvroute does not speak {pool.spec.app_protocol} with engines"
        raise InputError(what, where="spec.appProtocol", hint=f"use {_HTTP}, which is HTTP/1.1")
    return Members(",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports)


def reference_faults(
    reference: PickerReference, own: OwnPicker | None, service: Service | None, *, known: bool
) -> Iterator[InputError]:
    """Yield why gateways that follow a pool's reference would not ask this picker as it expects.

    Args:
        reference: of the pool.
        own: this picker; None: only what is wrong for any picker is of interest.
        service: that the reference names; None: there is none.
        known: whether `service` has been read. If it has not, its target port counts as equal to its port.
    """
    port = reference.port.number if reference.port is not None else 0
    if (reference.group, reference.kind) != ("", "Service"):
        kind = f"{reference.group}/{reference.kind}".lstrip("/")
        yield InputError(f"it names a {kind}, not a Service", where=_REFERENCE, hint="name the picker's Service")
    elif not port:
        yield InputError("it names no port", where=f"{_REFERENCE}.port", hint="add the port of the picker's Service")
    elif known:
        yield from _service_faults(reference.name, port, own, service)
    elif own is not None and own.port != port:
        what = f"port {port} is not that of this picker, {own.port}"
        hint = f"map it to {own.port} in the Service {reference.name}, which this picker may not read"
        yield InputError(what, where=f"{_REFERENCE}.port", hint=hint)
    opens = reference.failure_mode == "FailOpen"
    if own is not None and own.fails_open is not None and own.fails_open != opens:
        what = f"{reference.failure_mode} is not how the written configuration of Envoy fails"
        hint = f"use --fail {'open' if opens else 'closed'}"
        yield InputError(what, where=f"{_REFERENCE}.failureMode", hint=hint)


def _service_faults(name: str, port: int, own: OwnPicker | None, service: Service | None) -> Iterator[InputError]:
    """Yield why a Service does not lead to this picker."""
    if service is None:
        yield InputError(f"there is no Service {name!r}", where=f"{_REFERENCE}.name", hint="create it")
        return
    if service.spec.type == "ExternalName":
        what = f"the Service {name} is an ExternalName, which gateways must not use"
        yield InputError(what, where=f"{_REFERENCE}.name", hint="select the picker's pods instead")
        return
    found = next((entry for entry in service.spec.ports or () if entry.port == port), None)
    if found is None:
        hint = f"its ports: {', '.join(str(entry.port) for entry in service.spec.ports or ()) or 'none'}"
        yield InputError(f"the Service {name} has no port {port}", where=f"{_REFERENCE}.port", hint=hint)
        return
    target = found.target_port if found.target_port is not None else found.port
    if own is not None and isinstance(target, int) and target != own.port:
        what = f"port {port} of the Service {name} leads to port {target}, and this picker listens on {own.port}"
        yield InputError(what, where=f"{_REFERENCE}.port", hint=f"use --port {target}, or change its targetPort")
