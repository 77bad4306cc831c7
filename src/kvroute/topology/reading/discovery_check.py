"""Checks of the section `discovery` of a cluster file, and of what cannot be combined with it."""

from __future__ import annotations

from collections.abc import Iterator

from kvroute.topology.label_selector import SELECTOR_HINT, selector_fault
from kvroute.topology.reading.check import setting_fault
from kvroute.topology.schema import ClusterFile, Discovery, DnsDiscovery, KubernetesEntry
from kvroute_engine.files.form import FileError, Lines

_SOURCES = ("file", "dns", "kubernetes")
_LEVELS = ("region", "datacenter", "pod", "rack")


def discovery_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield faults of the section `discovery`, and what cannot be combined with it."""
    section = file.discovery
    if section is None or not lines.sure("discovery", whole=True):
        return
    yield from _source_faults(section, lines)
    if section.node.nics.compute is None:
        hint = "add `node: {gpus: 8, nics: {compute: {count: 8, capacity: 400 Gbps}}}`"
        yield lines.error("the nodes of discovered engines have no compute NICs", ("discovery", "node"), hint)
    if file.storage is not None and lines.sure("storage"):
        what = "`storage` and `discovery` cannot be given together"
        yield lines.error(what, ("storage",), "list the instances of a cluster that reads from a store")
    if file.defaults.kv_capacity_bytes is None and lines.sure("defaults", "kv_capacity"):
        hint = "add `kv_capacity: 60 GB` (all GPUs of an engine) under `defaults`"
        yield lines.error("the KV memory of discovered engines is not given", ("defaults",), hint)
    names = ("timing", file.defaults.timing), ("model", file.defaults.model)
    for setting, value in names if isinstance(file.instances, list) and not file.instances else ():
        if value is not None and lines.sure("defaults", setting) and lines.sure("timing"):
            fault = setting_fault(setting, value, file)
            if fault is not None:
                yield lines.error(fault.what, ("defaults", setting), fault.hint)


def _source_faults(section: Discovery, lines: Lines) -> Iterator[FileError]:
    given = [name for name in _SOURCES if getattr(section, name) is not None]
    if len(given) != 1:
        what = (
            f"`discovery` has several sources: {', '.join(given)}" if given else "`discovery` has no source of engines"
        )
        hint = "write one of `file: engines.yaml`, `dns: {prefill: ..., decode: ...}` and `kubernetes: {}`"
        yield lines.error(what, ("discovery",), hint)
    if section.dns is not None:
        yield from _dns_faults(section.dns, lines)
    if section.kubernetes is not None:
        yield from _kubernetes_faults(section.kubernetes, lines)


def _dns_faults(dns: DnsDiscovery, lines: Lines) -> Iterator[FileError]:
    if not any((dns.prefill, dns.decode, dns.both)):
        yield lines.error("`dns` has no name", ("discovery", "dns"), "add `prefill: _http._tcp.prefill.example`")
    if dns.interval_min_s > dns.interval_max_s:
        what = "`interval_min` is longer than `interval_max`"
        yield lines.error(what, ("discovery", "dns", "interval_min"), "make it shorter")


def _kubernetes_faults(kubernetes: KubernetesEntry, lines: Lines) -> Iterator[FileError]:
    key = ("discovery", "kubernetes")
    if fault := selector_fault(kubernetes.selector):
        yield lines.error(fault, (*key, "selector"), SELECTOR_HINT)
    if kubernetes.pool is not None and kubernetes.selector.strip():
        what = "`pool` and `selector` exclude each other"
        yield lines.error(what, (*key, "selector"), "leave it out: the InferencePool has a selector")
    if kubernetes.pool is not None and kubernetes.namespace == "*":
        what = "an InferencePool is in one namespace"
        yield lines.error(what, (*key, "namespace"), "write its name")
    level_of: dict[str, str] = {}
    for level in _LEVELS:
        for number, label in enumerate(getattr(kubernetes.levels, level) or ()):
            owner = level_of.setdefault(label, level)
            if owner != level:
                what = f"the label {label} gives the level {owner}, too"
                yield lines.error(what, (*key, "levels", level, number), "give each label one level")
