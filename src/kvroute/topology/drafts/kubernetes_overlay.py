"""The command line's part of the section `discovery`: it is merged into the plain values of a cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvroute.topology.drafts.builders import H100_LLAMA_70B_TP4
from kvroute.topology.schema import (
    ClusterFile,
    Discovery,
    InstanceDefaults,
    KubernetesEntry,
    Network,
    Nic,
    Nics,
    NodeTemplate,
    TierBandwidth,
)
from kvroute.types import InputError
from kvroute_engine.files.units import Bandwidth, Size, quantity, quantity_text

_GPUS = 8
_NIC, _WAN, _KV = Bandwidth(12.5e9), Bandwidth(1.25e9), Size(40e9)
_SOURCES = ("file", "dns")


def kubernetes_file() -> ClusterFile:
    """Return the cluster file for engines that Kubernetes names and nothing else is known of.

    Nodes have 8 GPUs, each with a NIC of 100 Gbps, 10 Gbps connect datacenters (zones), an engine has 40 GB of KV
    memory, and the times are those of Llama-3-70B on four H100.
    """
    return ClusterFile(
        name="kubernetes",
        network=Network(tier_bandwidth=TierBandwidth(wan_bytes_per_s=_WAN)),
        timing={"default": H100_LLAMA_70B_TP4},
        defaults=InstanceDefaults(kv_capacity_bytes=_KV),
        discovery=Discovery(kubernetes=KubernetesEntry(), node=_node(_NIC)),
    )


def _node(nic: Bandwidth) -> NodeTemplate:
    return NodeTemplate(gpus=_GPUS, nics=Nics(compute=Nic(count=_GPUS, bytes_per_s=nic)))


@dataclass(frozen=True, slots=True)
class KubernetesOverlay:
    """Makes Kubernetes the source of a file's engines, and fills in what discovery needs and the file lacks."""

    given: KubernetesEntry
    """Fields that differ from the default replace those of the file."""

    def __call__(self, plain: dict[str, object]) -> dict[str, object]:
        """Return the plain values of a file with the source. A value of a wrong form stays as it is, so that its check
        reports it.

        The file gets timing, KV memory and node template of `kubernetes_file` if it has none. The NICs of the template
        have the bandwidth that the file declares for transfers inside a rack, if it does.
        """
        section = plain.get("discovery")
        own = _mapping(section).get("kubernetes")
        if not (_is_mapping(section) and _is_mapping(own) and _is_mapping(plain.get("defaults"))):
            return plain
        rest = {key: value for key, value in _mapping(section).items() if key not in _SOURCES}
        source = {**_mapping(own), **msgspec.to_builtins(self.given)}
        assumed = msgspec.to_builtins(kubernetes_file(), enc_hook=quantity_text)
        node = {"node": msgspec.to_builtins(_node(_nic(plain)), enc_hook=quantity_text)}
        return {
            "timing": assumed["timing"],
            **plain,
            "defaults": assumed["defaults"] | _mapping(plain.get("defaults")),
            "discovery": {**node, **rest, "kubernetes": source},
        }


def _nic(plain: Mapping[str, object]) -> Bandwidth:
    """Return the bandwidth of each NIC of nodes for which a file has no template."""
    declared = _mapping(_mapping(plain.get("network")).get("tier_bandwidth")).get("rack")
    if declared is None:
        return _NIC
    defaults = _mapping(plain.get("defaults"))
    tp, pp = (defaults.get(name, 1) for name in ("tp", "pp"))
    gpus = tp * pp if isinstance(tp, int) and isinstance(pp, int) else 1
    try:
        speed = quantity(Bandwidth, declared)
    except InputError:
        return _NIC
    return Bandwidth(max(float(speed) / max(gpus, 1), Bandwidth.least))


def _is_mapping(value: object) -> bool:
    return value is None or isinstance(value, dict)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
