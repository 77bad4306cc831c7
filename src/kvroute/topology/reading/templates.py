"""Nodes, racks, pods and datacenters that discovered engines name and the cluster file does not list.

Their links come from the templates of the section `discovery`; without a template, from the speed that
`network.tier_bandwidth` declares for the tier of a link, so that decisions follow declared speeds in new domains, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import msgspec

from kvroute.topology.schema import ClusterFile, Datacenter, Discovery, DomainTemplate, Node, Pod, Rack, Uplinks, Wan
from kvroute.types import Place
from kvroute_engine.files.units import Bandwidth

_NODES_CARRIED = 32
"""Number of nodes whose traffic the uplinks of a domain carry if its template has none."""
_CABLES_MOST = 64
"""Largest number of uplinks of a domain without a template."""


def with_domains(file: ClusterFile, places: Iterable[Place]) -> ClusterFile:
    """Return an expanded file with the domains of these places added, ascending by name.

    A domain that the file lists keeps its own values and its parents. If two places name different parents of a new
    domain, the first one counts.
    """
    discovery = file.discovery or Discovery()
    parents = _Parents(file)
    for place in places:
        parents.note(place)
    racks = {rack.name for rack in file.racks}
    pods = {pod.name for pod in file.pods}
    sites = {site.name for site in file.datacenters}
    declared = file.network.tier_bandwidth
    named = {*parents.pods.values(), *parents.racks_sites.values(), *parents.nodes_sites.values()} - {""}
    implicit = not sites and named == {"dc0"}
    return msgspec.structs.replace(
        file,
        datacenters=[*file.datacenters, *(Datacenter(name=name) for name in sorted(named - sites) if not implicit)],
        pods=[
            *file.pods,
            *(
                Pod(
                    name=name,
                    datacenter=site or None,
                    uplinks=_uplinks(discovery.pod, declared.datacenter_bytes_per_s, file),
                )
                for name, site in sorted(parents.pods.items())
                if name not in pods
            ),
        ],
        racks=[
            *file.racks,
            *(
                Rack(
                    name=name,
                    pod=pod or None,
                    datacenter=None if pod else parents.racks_sites.get(name) or None,
                    uplinks=_uplinks(
                        discovery.rack, declared.pod_bytes_per_s if pod else declared.datacenter_bytes_per_s, file
                    ),
                )
                for name, pod in sorted(parents.racks.items())
                if name not in racks
            ),
        ],
        nodes=[*file.nodes, *parents.new_nodes(discovery)],
        wan=[*file.wan, *_new_wan(file, named - sites)],
    )


def _new_wan(file: ClusterFile, new: set[str]) -> list[Wan]:
    """Return a link between each two datacenters of which one is new, if their speed is declared."""
    speed = file.network.tier_bandwidth.wan_bytes_per_s
    if speed is None:
        return []
    every = sorted(new | {site.name for site in file.datacenters})
    pairs = (pair for pair in combinations(every, 2) if not new.isdisjoint(pair))
    return [Wan(source=source, target=target, bytes_per_s=speed) for source, target in pairs]


class _Parents:
    """The parents that places name, by domain; an empty name: none is known."""

    def __init__(self, file: ClusterFile) -> None:
        self._nodes = {node.name for node in file.nodes}
        self._listed_racks = {rack.name for rack in file.racks}
        self._listed_pods = {pod.name for pod in file.pods}
        self.pods: dict[str, str] = {}
        """Datacenter of each new pod."""
        self.racks: dict[str, str] = {}
        """Pod of each new rack."""
        self.racks_sites: dict[str, str] = {}
        """Datacenter of each new rack."""
        self.nodes_sites: dict[str, str] = {}
        """Datacenter of each new node without rack and pod."""
        self._of_node: dict[str, Place] = {}

    def note(self, place: Place) -> None:
        """Add the domains of a place."""
        if place.node in self._nodes:
            return
        known = self._of_node.setdefault(place.node, place)
        if place.rack:
            if place.rack in self._listed_racks:
                return
            self.racks[place.rack] = self.racks.get(place.rack) or place.pod
            if not place.pod:
                self.racks_sites[place.rack] = self.racks_sites.get(place.rack) or place.datacenter
        if place.pod and place.pod not in self._listed_pods:
            self.pods[place.pod] = self.pods.get(place.pod) or place.datacenter
        if not (known.rack or known.pod):
            self.nodes_sites[place.node] = known.datacenter

    def new_nodes(self, discovery: Discovery) -> list[Node]:
        """Return the new nodes, ascending by name, each below its nearest parent."""
        template = discovery.node
        return [
            Node(
                name=name,
                rack=place.rack or None,
                pod=None if place.rack else place.pod or None,
                datacenter=None if place.rack or place.pod else place.datacenter or None,
                gpus=template.gpus,
                nvlink_bytes_per_s=template.nvlink_bytes_per_s,
                nics=template.nics,
            )
            for name, place in sorted(self._of_node.items())
        ]


def _uplinks(template: DomainTemplate, declared: Bandwidth | None, file: ClusterFile) -> Uplinks | None:
    """Return the uplinks of a new domain. Args: `declared`: speed of a lone transfer over them; None: no limit."""
    nic = (file.discovery or Discovery()).node.nics.compute
    if template.uplinks is not None or nic is None:
        return template.uplinks
    if declared is not None:
        flows = flows_of_default(file)
        count = max(flows, min(_NODES_CARRIED * flows, _CABLES_MOST))
        return Uplinks(count=count, bytes_per_s=Bandwidth(max(float(declared) / flows, Bandwidth.least)))
    return Uplinks(count=nic.count, bytes_per_s=Bandwidth(min(float(nic.bytes_per_s) * _NODES_CARRIED, Bandwidth.most)))


def flows_of_default(file: ClusterFile) -> int:
    """Return how many flows a transfer between engines of the default size spreads over equal links."""
    network = file.network
    if network.ecmp == "transfer":
        return 1
    flows = network.flows_per_transfer
    return flows if isinstance(flows, int) else file.defaults.tp * file.defaults.pp
