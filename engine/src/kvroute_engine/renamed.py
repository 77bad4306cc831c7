"""Names of the previous version that are still read, each with its present name. An entry goes after one version.

The readers of cluster files and event logs, the command line and the metrics use this table and know no old name
themselves. A path leads to a key; `*` stands for each entry of a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str, ...]

CLUSTER_FILE: Mapping[Path, str] = {
    ("gateway", "parameters", "alone"): "aggregated",
    ("gateway", "policy", "alone"): "aggregated",
}
LOG_HEADER: Mapping[Path, str] = {("spec", "parameters", "alone"): "aggregated"}
LOG_RECORD: Mapping[Path, str] = {
    ("event", "joint"): "both_on_arrival",
    ("decisions", "*", "alone"): "aggregated",
    ("decisions", "*", "terms", "parts", "alone_s"): "aggregated_s",
    ("decisions", "*", "terms", "parts", "played"): "simulated",
}
EXPERIMENTS: Mapping[str, str] = {"alone": "aggregated"}
REPLICATION_STATES: Mapping[str, str] = {"alone": "disconnected"}
"""Values of the label `state` of `kvroute_replication_state`."""


def mentions(line: bytes, table: Mapping[Path, str]) -> bool:
    """Whether a line of JSON has the text of an old key, so that `rename_keys` may have something to do."""
    return any(b'"%b"' % path[-1].encode() in line for path in table)


def rename_keys(document: Any, table: Mapping[Path, str]) -> None:
    """Rename the keys of plain values in place. Keys keep their order; a key whose present name is also given stays."""
    for path, name in table.items():
        for parent in _parents(document, path[:-1]):
            if path[-1] in parent and name not in parent:
                entries = [(name if key == path[-1] else key, value) for key, value in parent.items()]
                parent.clear()
                parent.update(entries)


def _parents(value: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the mappings at a path."""
    if not path:
        if isinstance(value, dict):
            yield value
    elif path[0] == "*":
        for entry in value if isinstance(value, list) else ():
            yield from _parents(entry, path[1:])
    elif isinstance(value, dict):
        yield from _parents(value.get(path[0]), path[1:])
