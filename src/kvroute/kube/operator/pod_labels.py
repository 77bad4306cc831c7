"""Topology labels of engine pods: copied from the pod's node after scheduling, and removed when they no longer apply.

The operator changes only labels that it has written; an annotation lists them. A label that the owner of the pod has
set stays, whatever its value is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvroute.kube.discovery.labels import PREFIX, TOPOLOGY_PREFIX
from kvroute.kube.operator.actions import PatchMetadata
from kvroute.kube.operator.observed import annotations_of, labels_of, ref_of
from kvroute.kube.resources import Object, TopologyLevel

WRITTEN = f"{PREFIX}topology-labels"
"""Annotation with the levels whose labels the operator has written."""


@dataclass(frozen=True, slots=True)
class PodTopology:
    """What a pod should have: label keys of nodes by level, from all KvRouters that select it."""

    pod: Object
    levels: Mapping[str, str]

    @property
    def written(self) -> frozenset[str]:
        """Levels whose labels the operator has written."""
        return frozenset(filter(None, annotations_of(self.pod).get(WRITTEN, "").split(",")))

    @property
    def unwanted(self) -> frozenset[str]:
        """Levels whose labels the operator has to remove, because no KvRouter asks for them."""
        return self.written - self.levels.keys()

    def missing(self, nodes: Mapping[str, Object]) -> tuple[str, ...]:
        """Return the levels for which a scheduled pod's node has no label and the pod has none of its own."""
        node = _node_labels(self.pod, nodes)
        if node is None:
            return ()
        own = labels_of(self.pod)
        return tuple(
            level for level, key in self.levels.items() if not node.get(key) and not own.get(TOPOLOGY_PREFIX + level)
        )


def merged_levels(per_router: Sequence[Sequence[TopologyLevel]]) -> dict[str, str]:
    """Return the label key of each level; the first KvRouter that names a level counts."""
    found: dict[str, str] = {}
    for levels in per_router:
        for level in levels:
            found.setdefault(level.domain, level.label_key)
    return found


def label_changes(wanted: PodTopology, nodes: Mapping[str, Object]) -> Iterator[PatchMetadata]:
    """Yield the patch of a pod, if it needs one. A pod without a node, or whose node is not known, stays as it is:
    its labels cannot have become wrong, because a pod never moves."""
    pod = wanted.pod
    written = wanted.written
    node = _node_labels(pod, nodes)
    if node is None and wanted.levels:
        return
    own = labels_of(pod)
    values = {level: (node or {}).get(key, "") for level, key in wanted.levels.items()}
    mine = {
        level: value
        for level, value in values.items()
        if value and (level in written or own.get(TOPOLOGY_PREFIX + level) is None)
    }
    labels: dict[str, str | None] = {
        TOPOLOGY_PREFIX + level: value for level, value in mine.items() if own.get(TOPOLOGY_PREFIX + level) != value
    }
    labels |= {TOPOLOGY_PREFIX + level: None for level in written - mine.keys() if TOPOLOGY_PREFIX + level in own}
    if labels or written != mine.keys():
        note = ",".join(sorted(mine)) or None
        version = pod["metadata"].get("resourceVersion", "")
        yield PatchMetadata(ref_of(pod), version, labels=dict(sorted(labels.items())), annotations={WRITTEN: note})


def _node_labels(pod: Object, nodes: Mapping[str, Object]) -> Mapping[str, str] | None:
    node = nodes.get((pod.get("spec") or {}).get("nodeName") or "")
    return None if node is None else labels_of(node)
