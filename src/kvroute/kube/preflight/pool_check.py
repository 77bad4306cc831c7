"""An InferencePool as it is now, for `kvroute kube check`: what it selects, and its endpoint picker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from kvroute.kube.api.client import Access
from kvroute.kube.api.inference_pool import (
    InferencePool,
    PickerReference,
    Service,
    members_of,
    not_installed,
    reference_faults,
)
from kvroute.kube.api.informer import Informer
from kvroute.kube.api.requests import POOLS, Selection
from kvroute.kube.api.store import ObjectStore
from kvroute.kube.discovery.engines import DiscoverySpec, read_once
from kvroute.kube.discovery.pods import Effect, PodFinding, PodReading
from kvroute.kube.discovery.pool_picker import Services
from kvroute.kube.preflight.check import PickerTarget, PoolReport
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool and its pods."""

    report: PoolReport
    reading: PodReading
    """Its engines, and findings about the pool and its pods."""
    nodes_failure: str
    """Why nodes could not be listed; empty if they could."""


async def read_pool_once(access: Access, options: DiscoverySpec, name: str) -> PoolSnapshot:
    """Return what discovery with a pool would find now.

    Args:
        options: of the pods; the pool gives their labels and ports.
        name: of the pool, in the namespace of the options.

    Raises:
        InputError: there is no usable kubeconfig or no such pool, or the server does not list pools or pods.
    """
    namespace = options.selection(access).namespace
    pool = await _pool(access, namespace, name)
    reference = pool.spec.endpoint_picker_ref
    picker, faults = None, list[InputError]()
    if reference is not None:
        service, known = await Services(access, namespace).get(reference.name)
        picker = _target(reference, service)
        faults = list(reference_faults(reference, None, service, known=known))
    found = f"InferencePool {namespace}/{name}"
    report = PoolReport(name=f"{namespace}/{name}", selector="", target_ports=(), picker=picker, pods=0)
    findings = list(_findings(found, "warning", faults))
    try:
        members = members_of(pool)
    except InputError as fault:
        return PoolSnapshot(report, PodReading(findings=(*_findings(found, "left out", [fault]), *findings)), "")
    selected = replace(options, namespace=namespace, selector=members.labels, ports=members.ports)
    listing = await read_once(access, selected)
    report = msgspec.structs.replace(report, selector=members.labels, target_ports=members.ports, pods=listing.pods)
    reading = replace(listing.reading, findings=(*findings, *listing.reading.findings))
    return PoolSnapshot(report, reading, listing.nodes_failure)


async def _pool(access: Access, namespace: str, name: str) -> InferencePool:
    pools: ObjectStore[InferencePool] = ObjectStore()
    informer = Informer(access.connect, POOLS, Selection(namespace, name=name), pools, lambda _: None)
    try:
        await informer.list_once()
    except InputError as error:
        if informer.refused == 404:
            raise not_installed(error.where) from None
        raise
    pool = pools.objects.get((namespace, name))
    if pool is None:
        hint = "create it, or give another one"
        raise InputError(f"there is no InferencePool {namespace}/{name}", where="--pool", hint=hint)
    return pool


def _target(reference: PickerReference, service: Service | None) -> PickerTarget:
    port = reference.port.number if reference.port is not None else 0
    ports = service.spec.ports or () if service is not None else ()
    found = next((entry for entry in ports if entry.port == port), None)
    return PickerTarget(
        kind=f"{reference.group}/{reference.kind}".lstrip("/"),
        name=reference.name,
        port=port,
        target_port=None if found is None else found.port if found.target_port is None else found.target_port,
        failure_mode=reference.failure_mode,
    )


def _findings(name: str, effect: Effect, faults: Iterable[InputError]) -> Iterable[PodFinding]:
    for fault in faults:
        yield PodFinding(pod=name, effect=effect, field=fault.where, what=fault.what, hint=fault.hint)
