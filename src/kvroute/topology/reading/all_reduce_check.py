"""Checks of `all_reduce` of instances against their tensor and pipeline parallelism, before their GPUs are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvroute.topology.schema import ClusterFile, InstanceCounts, InstanceEntry
from kvroute_engine.files.form import FileError, Key, Lines


def all_reduce_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield a fault for each instance, or for the numbers of instances, whose `all_reduce` does not fit tp and pp."""
    written = file.instances
    entries: Sequence[tuple[Key, InstanceEntry | InstanceCounts]] = (
        [(("instances",), written)]
        if isinstance(written, InstanceCounts)
        else [(("instances", index), entry) for index, entry in enumerate(written)]
    )
    for key, entry in entries:
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
