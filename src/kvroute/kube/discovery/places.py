"""From labels of nodes to places: which label gives which level, and names that are unique in the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvroute.kube.discovery.labels import PREFIX, TOPOLOGY_PREFIX
from kvroute.types import InputError
from kvroute.types.discovered import Place

LEVELS = ("datacenter", "pod", "rack")
"""Levels that labels give, broadest first. The narrowest level, the node, is the node's name."""
NAME_MAX = 200
"""Longest name in a cluster file, in characters."""

_TOPOGRAPH = "network.topology.nvidia.com/"
"""Labels of topograph up to 0.5 (NVIDIA/topograph, docs/engines/k8s.md of 0.1.0 and of 0.5.0)."""
_FABRIC = "fabric.topograph.run/tier-"
"""Labels of topograph from 1.0 on: tier 0 is the switch of the node (docs/reference/node-labels.md)."""


@dataclass(frozen=True, slots=True)
class LevelKeys:
    """The node labels of each level, best first: the first label that a node has gives its value.

    `region` is no level: it makes datacenters of the same name in two regions distinct.
    """

    region: tuple[str, ...] = ("topology.kubernetes.io/region",)
    datacenter: tuple[str, ...] = (
        f"{PREFIX}datacenter",
        "topology.kubernetes.io/zone",
        "kubernetes.io/zone",
        f"{_TOPOGRAPH}core",
        f"{_TOPOGRAPH}datacenter",
        f"{_FABRIC}2",
        f"{_TOPOGRAPH}tier-2",
    )
    pod: tuple[str, ...] = (
        f"{PREFIX}pod",
        "topology.kubernetes.io/block",
        "kubernetes.io/block",
        "cloud.provider.com/topology-block",
        f"{_FABRIC}1",
        f"{_TOPOGRAPH}tier-1",
        f"{_TOPOGRAPH}spine",
    )
    rack: tuple[str, ...] = (
        f"{PREFIX}rack",
        "nvidia.com/rack",
        "topology.kubernetes.io/rack",
        "kubernetes.io/rack",
        "cloud.provider.com/topology-rack",
        f"{_FABRIC}0",
        f"{_TOPOGRAPH}tier-0",
        f"{_TOPOGRAPH}leaf",
        f"{_TOPOGRAPH}block",
        "accelerator.topograph.run/domain",
        f"{_TOPOGRAPH}accelerator",
        "nvidia.com/gpu.clique",
    )

    def with_keys(self, text: str) -> LevelKeys:
        """Return a copy in which `level=key[,key...]` has replaced the labels of one level.

        Raises:
            InputError: the text has another form, or the level is not known.
        """
        level, equals, keys = text.partition("=")
        names = tuple(key.strip() for key in keys.split(",") if key.strip())
        if level.strip() not in (*LEVELS, "region") or not equals or not names:
            hint = f"write LEVEL=LABEL[,LABEL...] with one of the levels region, {', '.join(LEVELS)}"
            raise InputError(f"{text!r} does not map a level to node labels", where="--level", hint=hint)
        return replace(self, **{level.strip(): names})

    def all_keys(self) -> frozenset[str]:
        """Return the labels of all levels."""
        return frozenset((*self.region, *self.datacenter, *self.pod, *self.rack))


DEFAULT_LEVELS = LevelKeys()

_DOMAINS = {
    "region": ("region",),
    "datacenter": ("datacenter", "zone"),
    "pod": ("pod", "block"),
    "rack": ("rack",),
}
"""Names of levels in pod labels. Grove has the levels region, zone, datacenter, block, rack, host and numa
(ai-dynamo/grove, operator/api/core/v1alpha1/clustertopologybinding.go)."""
_POD_PREFIXES = (
    TOPOLOGY_PREFIX,
    "nvidia.com/dynamo-topology.",  # ai-dynamo/dynamo, deploy/operator/internal/consts/consts.go
    "grove.io/topology.",  # the proposal ai-dynamo/dynamo#9118
)
_POD_KEYS = {
    level: tuple(f"{prefix}{domain}" for prefix in _POD_PREFIXES for domain in domains)
    for level, domains in _DOMAINS.items()
}


def place_of(node_name: str, node_labels: Mapping[str, str], pod_labels: Mapping[str, str], keys: LevelKeys) -> Place:
    """Return where a pod is. Labels of its node count first, then copies of them on the pod.

    A rack's name is the path of values down to it, such as `zone-1.spine-3.r1`: two blocks may both have a rack `r1`. A
    dot inside a value is doubled, and a level that is missing above a known one is `_`; so the names are equal only if
    all values are. An empty label counts as missing.
    """

    def value(level: str) -> str:
        own: tuple[str, ...] = getattr(keys, level)
        on_node = (node_labels.get(key, "") for key in own)
        on_pod = (pod_labels.get(key, "") for key in (*_POD_KEYS[level], *own))
        return next((found for found in (*on_node, *on_pod) if found), "")

    region, datacenter, pod, rack = (
        value(level).replace(".", "..") for level in ("region", "datacenter", "pod", "rack")
    )
    if datacenter and region and not datacenter.startswith(region):
        datacenter = f"{region}.{datacenter}"
    pod = _below(pod, datacenter)
    rack = _below(rack, pod or (f"{datacenter}._" if datacenter else ""))
    return Place(node=node_name, rack=fitting(rack), pod=fitting(pod), datacenter=fitting(datacenter))


def fitting(name: str) -> str:
    """Return the name, or its beginning and a digest of it if it is longer than a name may be."""
    if len(name) <= NAME_MAX:
        return name
    return f"{name[: NAME_MAX - 33]}-{blake2b(name.encode(), digest_size=16).hexdigest()}"


def _below(name: str, parent: str) -> str:
    return f"{parent}.{name}" if name and parent else name
