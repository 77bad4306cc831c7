"""Checks of a cluster file's values against each other: timings, models, memory, all-reduces, discovery, addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvroute import llm
from kvroute.topology.label_selector import SELECTOR_HINT, selector_fault
from kvroute.topology.place import port_fault
from kvroute.topology.reading.expansion import ExpandedFile
from kvroute.topology.schema import (
    ClusterFile,
    Discovery,
    DnsDiscovery,
    InstanceCounts,
    InstanceEntry,
    KubernetesEntry,
    PiecewisePrefillEntry,
    TimingEntry,
)
from kvroute.types import InputError
from kvroute_engine.files.form import FileError, Key, Lines, nearest
from kvroute_engine.files.units import duration_text

_ADDRESSES = ("url", "bootstrap", "kv_events", "kv_replay", "buffer")
"""Fields of an endpoint that hold an address."""
_SOURCES = ("file", "dns", "kubernetes")
_LEVELS = ("region", "datacenter", "pod", "rack")


def check(written: ClusterFile, lines: Lines, flat: ExpandedFile) -> list[FileError]:
    """Return the faults of all values that do not depend on the locations of instances. Args: `written`, `lines`: the
    file before its expansion; `flat`: after it."""
    return [
        *_timing_faults(written, lines),
        *_setting_faults(written, lines),
        *_all_reduce_faults(written, lines),
        *_discovery_faults(written, lines),
        *_port_faults(flat.file, flat.lines),
    ]


def _timing_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    for name, timing in file.timing.items():
        yield from _scheduler_faults(name, timing, lines)
        prefill = timing.prefill
        if not isinstance(prefill, PiecewisePrefillEntry):
            continue
        key = ("timing", name, "prefill")
        if not lines.sure(*key, "tokens", whole=True) or not lines.sure(*key, "times"):
            continue
        if len(prefill.tokens) != len(prefill.times_s) or len(prefill.tokens) < 2:
            what = f"{len(prefill.tokens)} token counts but {len(prefill.times_s)} times are given"
            yield lines.error(what, key, "give two or more points, one time for each token count")
        elif any(b <= a for a, b in zip(prefill.tokens, prefill.tokens[1:], strict=False)):
            yield lines.error("the token counts do not ascend", (*key, "tokens"), "sort the points, without duplicates")


def _scheduler_faults(name: str, timing: TimingEntry, lines: Lines) -> Iterator[FileError]:
    scheduler, prefill = timing.scheduler, timing.prefill
    key = ("timing", name, "scheduler", "step")
    if not scheduler.step_s or not lines.sure(*key):
        return
    if scheduler.step_tokens is None and lines.sure("timing", name, "scheduler", "step_tokens"):
        what = "a step has a time, but prompts do not share steps"
        yield lines.error(what, key, "give `step_tokens`, the most tokens of one step")
    if isinstance(prefill, PiecewisePrefillEntry) or not lines.sure("timing", name, "prefill", "base"):
        return
    if scheduler.step_s > prefill.base_s:
        what = f"a step takes {duration_text(scheduler.step_s)}, longer than the base of a prefill"
        yield lines.error(what, key, f"give {duration_text(prefill.base_s)} or less: the base includes a step")


def _written_entries(file: ClusterFile) -> Sequence[tuple[Key, InstanceEntry | InstanceCounts]]:
    """Return the instances as the file has them, or their numbers, each with its key."""
    if isinstance(file.instances, InstanceCounts):
        return [(("instances",), file.instances)]
    return [(("instances", index), entry) for index, entry in enumerate(file.instances)]


def _setting_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield faults of models, timings and memory; a wrong or missing value in `defaults` is reported once."""
    reported: set[Key] = set()
    for key, entry in _written_entries(file):
        for setting in ("model", "kv_capacity", "timing"):
            attribute = "kv_capacity_bytes" if setting == "kv_capacity" else setting
            own, inherited = getattr(entry, attribute), getattr(file.defaults, attribute)
            place: Key = (*key, setting) if own is not None else ("defaults", setting)
            known = lines.sure(*key, setting) and (own is not None or lines.sure("defaults", setting))
            if place not in reported and known:
                value = inherited if own is None else own
                if setting == "timing" and not lines.sure("timing"):
                    continue
                fault = setting_fault(setting, value, file)
                if fault is not None:
                    reported.add(place)
                    missing = own is None and inherited is None
                    yield lines.error(fault.what, key if missing else place, fault.hint)


def setting_fault(setting: str, value: str | float | None, file: ClusterFile) -> InputError | None:
    """Return the fault of a model, a timing or a KV memory (`kv_capacity`) of an instance; None if it is valid."""
    if value is None:
        example = "`model: llama-3-70b`" if setting == "model" else "`kv_capacity: 180 GB` (all GPUs of an instance)"
        return InputError(f"no {setting} is given", hint=f"add {example}, here or under `defaults`")
    if setting == "timing" and value not in file.timing:
        hint = nearest(str(value), list(file.timing)) or f"add a `timing:` section with `{value}:`"
        return InputError(f"there is no timing {value!r}", hint=hint)
    if setting == "model":
        try:
            llm.model(str(value))
        except InputError as error:
            return error
    return None


def _all_reduce_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield a fault for each instance, or for the numbers of instances, whose `all_reduce` does not fit tp and pp."""
    for key, entry in _written_entries(file):
        if entry.all_reduce is None or not lines.sure(*key, "all_reduce", whole=True):
            continue
        tp, pp = entry.tp or file.defaults.tp, entry.pp or file.defaults.pp
        if tp == 1 and _known("tp", key, lines):
            yield lines.error(
                "tp is 1, so there is no all-reduce", (*key, "all_reduce"), "remove `all_reduce`, or set `tp`"
            )
        count = len(entry.all_reduce.schemes(pp))
        if count != pp and _known("pp", key, lines):
            what = f"{count} scheme{' is' if count == 1 else 's are'} given, but pp is {pp}"
            hint = "give one scheme for all pipeline stages, or one for each stage"
            yield lines.error(what, (*key, "all_reduce", "scheme"), hint)


def _known(setting: str, key: Key, lines: Lines) -> bool:
    return lines.sure(*key, setting) and lines.sure("defaults", setting)


def _discovery_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
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


def _port_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield addresses of endpoints without a valid port."""
    for index, entry in enumerate(file.instances if isinstance(file.instances, list) else []):
        for part in _ADDRESSES if entry.endpoint is not None else ():
            key, address = ("instances", index, "endpoint", part), getattr(entry.endpoint, part)
            if lines.sure(*key) and not address.startswith("ipc://") and (fault := port_fault(address)):
                yield lines.error(fault, key, "give the port that the engine listens on")
