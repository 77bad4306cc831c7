"""Reads a cluster file in steps, read, expand, place, check and link, and raises the faults of all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvroute import llm, plausibility
from kvroute.plausibility import TYPICAL_TOKENS
from kvroute.topology.cluster import Cluster
from kvroute.topology.place import gpu_list
from kvroute.topology.reading.check import check
from kvroute.topology.reading.expansion import expand_shorthands
from kvroute.topology.reading.linking import link
from kvroute.topology.reading.placing import place
from kvroute.topology.schema import (
    ClusterFile,
    InstanceCounts,
    InstanceEntry,
    LinearPrefillEntry,
    PiecewisePrefillEntry,
    QuadraticPrefillEntry,
)
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.document import Overlay, read_document
from kvroute_engine.files.form import FileError, Key, Lines

NO_INSTANCES = "the file has no instances of its own: `kvroute serve` discovers them"
_NEEDED = ("datacenters", "nodes", "wan", "timing", "defaults", "instances")
"""Sections that must be free of placeholders before the gateway's section is checked against them."""


def load(path: Path | str) -> Cluster:
    """Return the cluster of a file that has instances of its own.

    Raises:
        InputErrors: every fault of the file, each with its line and field.
        InputError: the file cannot be read, or it leaves its instances to `discovery`.
    """
    cluster = parse(read_text(path), where=str(path))
    check_simulable(cluster, path)
    return cluster


def check_simulable(cluster: Cluster, path: Path | str) -> None:
    """Raise InputError if the cluster of this file leaves its instances to `discovery`."""
    if cluster.file.discovery is not None and not cluster.instances:
        hint = "list instances to simulate or emulate them"
        raise InputError(NO_INSTANCES, where=str(path), hint=hint)


def read_text(path: Path | str) -> str:
    """Return the file's text; raise InputError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError("the file is not UTF-8 text", where=str(path), hint="give a YAML file") from error
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise InputError(f"the file cannot be read: {reason}", where=str(path), hint="check its path") from error


def parse(text: str, where: str = "<text>") -> Cluster:
    """Return the cluster of a file's text; `where` is its name in errors.

    Raises:
        InputErrors: every fault, each with its line and field.
    """
    return _whole(*examine(text, where))


def examine(
    text: str, where: str = "<text>", overlay: Overlay = lambda plain: plain
) -> tuple[Cluster | None, list[FileError]]:
    """Return the cluster of a file's text and every fault in the file's order; None if it cannot be assembled.

    If there are faults, some values of the cluster may be placeholders. `overlay` adds values of the command line.

    Raises:
        InputErrors: the text is no YAML mapping, or a file of another kind.
    """
    return _cluster_of(*read_document(text, where, ClusterFile, overlay))


def load_network(path: Path | str) -> Cluster:
    """Return the cluster of a file that may lack instances.

    Raises:
        InputErrors: every other fault of the file, each with its line and field.
        InputError: the file cannot be read.
    """
    return _whole(*_cluster_of(*read_document(read_text(path), str(path), ClusterFile), needs_roles=False))


def build(file: ClusterFile) -> Cluster:
    """Return the cluster of a ClusterFile made in Python.

    Raises:
        InputErrors: every fault, each with its field.
    """
    return _whole(*_cluster_of(file, Lines(file.name), []))


def _cluster_of(
    written: ClusterFile, lines: Lines, faults_of_form: Sequence[FileError], *, needs_roles: bool = True
) -> tuple[Cluster | None, list[FileError]]:
    """Return the cluster of a file as it was read, None if it cannot be linked, and the faults of all steps."""
    flat, of_shorthands = expand_shorthands(written, lines)
    places, of_places = place(flat, needs_roles=needs_roles)
    faults = [*of_shorthands, *of_places, *check(written, lines, flat)]
    cluster = None
    if places is not None and not faults and all(lines.sure(section, whole=True) for section in _NEEDED):
        warnings = _unit_warnings(flat.file, written, flat.lines)
        remarks = (*map(str, lines.outdated), *map(str, warnings))
        cluster = replace(link(flat.file, places), remarks=remarks, lines=flat.lines)
    once = {str(fault): fault for fault in [*faults_of_form, *faults]}  # ranks of an engine share its entry
    return cluster, sorted(once.values(), key=lambda fault: fault.line)


def _whole(cluster: Cluster | None, faults: Sequence[FileError]) -> Cluster:
    if faults or cluster is None:
        raise InputErrors(faults)
    return cluster


def _unit_warnings(file: ClusterFile, written: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield implausible values of an expanded, checked file. Args: `written`: the file before its expansion."""
    yield from _memory_warnings(file, written, lines)
    for name, timing in file.timing.items():
        if warning := plausibility.of_prefill(_points(timing.prefill)):
            yield lines.error(warning.what, ("timing", name, "prefill"), warning.cause)
        if warning := plausibility.of_decode([timing.decode.seconds(batch=1, context_tokens=TYPICAL_TOKENS)]):
            yield lines.error(warning.what, ("timing", name, "decode"), warning.cause)


def _memory_warnings(file: ClusterFile, written: ClusterFile, lines: Lines) -> Iterator[FileError]:
    reported: set[Key] = set()
    assert isinstance(file.instances, list), "expand first"
    for index, entry in enumerate(file.instances):
        own: InstanceEntry | InstanceCounts = entry
        key: Key = ("instances", index)
        if isinstance(written.instances, InstanceCounts):
            own, key = written.instances, ("instances",)
        place = (*key, "kv_capacity") if own.kv_capacity_bytes is not None else ("defaults", "kv_capacity")
        kv_bytes = entry.kv_capacity_bytes or file.defaults.kv_capacity_bytes or 0.0
        model = llm.model(entry.model or file.defaults.model or "")
        if place in reported:
            continue
        if warning := plausibility.of_kv_memory(kv_bytes, len(gpu_list(entry.gpus)), model.kv_bytes_per_token):
            reported.add(place)
            yield lines.error(warning.what, place, warning.cause)


def _points(
    prefill: LinearPrefillEntry | QuadraticPrefillEntry | PiecewisePrefillEntry,
) -> Sequence[tuple[float, float]]:
    """Return points (tokens, seconds) of the curve."""
    match prefill:
        case LinearPrefillEntry(per_token_s=per_token_s, base_s=base_s):
            return [(TYPICAL_TOKENS, base_s + per_token_s * TYPICAL_TOKENS)]
        case QuadraticPrefillEntry(base_s=base_s, per_token_s=per_token_s, per_token2_s=square_s):
            return [(TYPICAL_TOKENS, base_s + per_token_s * TYPICAL_TOKENS + square_s * TYPICAL_TOKENS**2)]
        case PiecewisePrefillEntry(tokens=tokens, times_s=times_s):
            return [(count, second) for count, second in zip(tokens, times_s, strict=True) if count]
