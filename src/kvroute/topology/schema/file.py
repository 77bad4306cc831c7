"""The cluster file as msgspec Structs, and back to YAML. It holds the values as written and does not interpret them.

Attribute names end in their unit; the file's own keys (`capacity`, `per_token`, ...) take text with a unit.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from kvroute.topology.schema.base import Entry, Name
from kvroute.topology.schema.discovery import Discovery
from kvroute.topology.schema.instances import InstanceCounts, InstanceDefaults, InstanceEntry, Storage, TimingEntry
from kvroute.topology.schema.network import Collectives, Datacenter, FatTree, Network, Node, Pod, Rack, SuperPod, Wan
from kvroute_engine.files.units import quantity_text


class ClusterFile(Entry, frozen=True, kw_only=True):
    """A whole cluster file."""

    name: Name
    fabric: FatTree | SuperPod | None = None
    datacenters: list[Datacenter] = []
    pods: list[Pod] = []
    racks: list[Rack] = []
    nodes: list[Node] = []
    wan: list[Wan] = []
    network: Network = Network()
    storage: Storage | None = None
    timing: dict[str, TimingEntry] = {}
    defaults: InstanceDefaults = InstanceDefaults()
    instances: list[InstanceEntry] | InstanceCounts = []
    collectives: Collectives = Collectives()
    discovery: Discovery | None = None
    """None: the cluster has the listed instances only."""
    qos: dict[str, Any] = {}
    """Traffic classes of the compute network, which `kvroute plan qos` reads and checks (`read_section`)."""
    placement: dict[str, Any] = {}
    """GPUs and traffic, for `kvroute plan placement` (`read_section`)."""
    gateway: dict[str, Any] = {}
    """Settings of `kvroute serve`, which reads and checks them (`read_section`)."""

    def to_yaml(self) -> str:
        """Return the file's text; reading it gives an equal ClusterFile."""
        return yaml_text(msgspec.to_builtins(self, enc_hook=quantity_text))


def yaml_text(plain: Any) -> str:
    """Return plain values as YAML, in their order."""
    text: str = yaml.dump(plain, Dumper=yaml.CSafeDumper, sort_keys=False, default_flow_style=None, width=160)
    return text
