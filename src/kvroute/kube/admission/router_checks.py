"""Checks of a KvRouter at admission, up to those of the cluster file that its gateway would read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from kvroute.kube.admission.review import AdmissionRequest, subject
from kvroute.kube.resources import KvRouterSpec, read_spec
from kvroute.kube.resources.cluster_file import cluster_file
from kvroute.kube.resources.resolution import FIELD, Catalog, resolve
from kvroute.kube.resources.router import SOFT_POLICY
from kvroute.policies.names import DECODE_POLICIES, DEFAULT_DECODE_POLICY
from kvroute.topology import FileError
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.form import nearest

FileCheck: TypeAlias = Callable[[str], object]
"""Reads the text of a cluster file, and raises InputErrors for what a gateway would refuse."""
_RESERVED_SETTINGS = {
    "listen": "spec.ports.client",
    "admin": "spec.ports.admin",
    "policy": "spec.policy",
    "constraint": FIELD,
    "keys": "spec.keysSecretRef",
}
"""Settings of the gateway that have a field of their own, and that field."""
_ROUTER_NAME = re.compile(r"[a-z]([-a-z0-9]{0,53}[a-z0-9])?")
_FILE_FIELDS = {
    "defaults.model": "spec.model",
    "defaults": "spec.defaults",
    "timing": "spec.timing",
    "network": "spec.network",
    "discovery.node": "spec.network.node",
    "discovery.rack": "spec.network.rack",
    "discovery.pod": "spec.network.pod",
    "gateway": "spec.gateway",
}
"""Fields of a cluster file, and the fields of a KvRouter that they come from; the first that fits counts."""


def router_problems(request: AdmissionRequest, catalog: Catalog, check_file: FileCheck) -> Iterator[InputError]:
    """Yield faults of a KvRouter. A change that leaves the spec as it is passes: finalizers must be removable even if a
    topology has gone.

    Raises:
        InputErrors: faults of form.
        InputError: the constraint has no meaning in this cluster.
    """
    new = subject(request)
    if request.old_object is not None and request.old_object.get("spec") == new.get("spec"):
        return
    spec = read_spec(new, KvRouterSpec)
    name = str((new.get("metadata") or {}).get("name") or "chat")
    found = [*_name_problems(name), *_setting_problems(spec), *_transfer_problems(spec)]
    yield from found
    resolved = None
    if spec.kv_cache_transfer_topology is not None and not any(fault.where.startswith(FIELD) for fault in found):
        resolved = resolve(spec.kv_cache_transfer_topology, catalog)
    if not found:
        yield from _file_problems(cluster_file(name, request.namespace or "default", spec, resolved), check_file)


def _name_problems(name: str) -> Iterator[InputError]:
    if not _ROUTER_NAME.fullmatch(name):
        what = f"{name!r} also names a Service, and cannot be one"
        fix = "begin it with a letter, and use at most 55 lower-case letters, digits and -"
        yield InputError(what, where="metadata.name", hint=fix)


def _setting_problems(spec: KvRouterSpec) -> Iterator[InputError]:
    if spec.policy not in DECODE_POLICIES:
        hint = nearest(spec.policy, list(DECODE_POLICIES))
        yield InputError(f"the decode policy {spec.policy!r} is unknown", where="spec.policy", hint=hint)
    for name, place in _RESERVED_SETTINGS.items():
        if name in spec.gateway:
            yield InputError(
                f"{name!r} has a field of its own", where=f"spec.gateway.{name}", hint=f"set {place} instead"
            )
    if spec.ports.client == spec.ports.admin:
        yield InputError("client and admin are the same port", where="spec.ports", hint="choose two ports")
    if spec.defaults.timing not in spec.timing:
        hint = nearest(spec.defaults.timing, list(spec.timing))
        yield InputError(f"there is no timing {spec.defaults.timing!r}", where="spec.defaults.timing", hint=hint)
    for name, timing in spec.timing.items():
        wrong = timing.prefill.missing()
        if wrong:
            what = f"a {timing.prefill.kind} prefill needs {wrong}"
            yield InputError(what, where=f"spec.timing.{name}.prefill", hint="add it, or set another kind")


def _transfer_problems(spec: KvRouterSpec) -> Iterator[InputError]:
    transfer = spec.kv_cache_transfer_topology
    if transfer is None:
        return
    if transfer.label is not None and transfer.cluster_topology_name is not None:
        yield InputError("label and clusterTopologyName exclude each other", where=FIELD, hint="remove one of them")
        return
    if transfer.kv_transfer_weight is not None and spec.policy not in (DEFAULT_DECODE_POLICY, SOFT_POLICY):
        what = f"kvTransferWeight belongs to the policy {SOFT_POLICY!r}, not to {spec.policy!r}"
        yield InputError(what, where=f"{FIELD}.kvTransferWeight", hint="remove it, or remove spec.policy")
    if transfer.place is not None and transfer.label is None:
        yield InputError("place is only for label", where=f"{FIELD}.place", hint="set place in the ClusterTopology")


def _file_problems(text: str, check_file: FileCheck) -> Iterator[InputError]:
    """Yield what a gateway would refuse of the cluster file, by the fields of the KvRouter."""
    try:
        check_file(text)
    except InputErrors as error:
        for problem in error.problems:
            place = problem.field if isinstance(problem, FileError) else problem.where
            yield InputError(problem.what, where=_router_field(place), hint=problem.hint)


def _router_field(place: str) -> str:
    """Return the field of a KvRouter that a field of its cluster file comes from."""
    for begin, field_of_router in _FILE_FIELDS.items():
        if place == begin or place.startswith((f"{begin}.", f"{begin}[")):
            rest = re.sub("_([a-z0-9])", lambda match: match[1].upper(), place.removeprefix(begin))
            return field_of_router + (place.removeprefix(begin) if begin == "gateway" else rest)
    return "spec"
