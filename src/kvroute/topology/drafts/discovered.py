"""First draft of a cluster file from engines that a discovery source has found; the network is a guess to correct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kvroute.topology.drafts.draft import KV_BYTES_PER_GPU, scaled_times
from kvroute.topology.reading.assembly import build
from kvroute.topology.reading.discovery import admitted, grown
from kvroute.topology.schema import (
    ClusterFile,
    Discovery,
    InstanceDefaults,
    InstanceEntry,
    Network,
    Nic,
    Nics,
    NodeTemplate,
    TierBandwidth,
    Uplinks,
)
from kvroute.types import Discovered, InputError
from kvroute_engine.files.units import Bandwidth, Size

_WAN = Bandwidth(1.25e9)
_UPLINKS_MOST = 1024
_TODO = """\
# First draft: engines, nodes and their places are those of the cluster. All other values are guesses. Correct them in
# this order:
#  1. `nics` of the nodes, and `uplinks` of racks and pods, which carry here all that the NICs below them send;
#  2. `wan` between datacenters;
#  3. `timing`: fit your own engines with `kvroute timing fit`; these are for Llama-3-70B on H100, scaled to tp {tp};
#  4. `kv_capacity`: KV memory of one instance, here 40 GB per GPU; vLLM logs the number of tokens that fit at startup.
# Run `kvroute topology check FILE` to find all errors, then `kvroute serve FILE`. Remove `instances` to let
# `kvroute serve FILE --kubernetes` discover engines on these nodes.
"""


def draft_discovered(
    name: str,
    engines: Sequence[Discovered],
    *,
    model: str,
    tp: int = 1,
    gpus_per_node: int = 8,
    nic_bytes_per_s: float = 12.5e9,
) -> tuple[str, Mapping[str, str]]:
    """Return a cluster file's text, and why engines are left out, by name.

    Args:
        engines: ascending by name.
        model, tp: of engines that do not tell theirs.
        gpus_per_node: at least; a node has as many as its engines need.

    Raises:
        InputError: there is no engine, or none can be used.
    """
    if not engines:
        raise InputError("no pod is an engine", hint="`kvroute kube check` says why")
    needed: Counter[str] = Counter()
    for engine in engines:
        needed[engine.place.node] += (engine.tp or tp) * (engine.pp or 1)
    nic = Nic(count=gpus_per_node, bytes_per_s=Bandwidth(nic_bytes_per_s))
    base = ClusterFile(
        name=name,
        network=Network(tier_bandwidth=TierBandwidth(wan_bytes_per_s=_WAN)),
        timing={"default": scaled_times(tp)},
        defaults=InstanceDefaults(model=model, tp=tp, kv_capacity_bytes=Size(KV_BYTES_PER_GPU * tp)),
        discovery=Discovery(
            file="engines.yaml",
            node=NodeTemplate(gpus=min(max(gpus_per_node, *needed.values()), 1024), nics=Nics(compute=nic)),
        ),
    )
    cluster = build(base)
    partnerless = _without_partner(engines, model)
    joined, refused = admitted(cluster, {}, [engine for engine in engines if engine.name not in partnerless])
    refused |= partnerless
    if not joined:
        first, why = next(iter(sorted(refused.items())))
        raise InputError(f"no engine can be used; {first}: {why}")
    file = grown(cluster, joined).file
    return _TODO.format(tp=tp) + _finished(file, gpus_per_node, needed, tp).to_yaml(), refused


def _without_partner(engines: Sequence[Discovered], model: str) -> dict[str, str]:
    """Return why prefill engines without decode engines, and the reverse, cannot serve, by name."""
    partner = {"prefill": "decode", "decode": "prefill"}
    groups = {(engine.role, engine.model or model, engine.endpoint.protocol) for engine in engines}
    return {
        engine.name: f"no {partner[engine.role]} engine has its model and protocol"
        for engine in engines
        if engine.role in partner
        and (partner[engine.role], engine.model or model, engine.endpoint.protocol) not in groups
    }


def _finished(file: ClusterFile, gpus_per_node: int, needed: Mapping[str, int], tp: int) -> ClusterFile:
    """Return the file without what only discovery needs, with sizes of its own for nodes, uplinks and instances.

    What names no datacenter belongs to the first one, as in a gateway that discovers it.
    """
    site = file.datacenters[0].name if len(file.datacenters) > 1 else None
    nodes = [
        replace(
            node,
            gpus=max(gpus_per_node, needed[node.name]),
            datacenter=node.datacenter or (None if node.rack or node.pod else site),
        )
        for node in file.nodes
    ]
    racks = {rack.name: rack for rack in file.racks}
    nics: Counter[str] = Counter()
    for node in nodes:
        pod = racks[node.rack].pod if node.rack else node.pod
        for domain in filter(None, (node.rack and f"rack {node.rack}", pod and f"pod {pod}")):
            nics[domain] += gpus_per_node
    speed = nodes[0].nics.compute.bytes_per_s if nodes[0].nics.compute else _WAN

    def uplinks(domain: str) -> Uplinks:
        count = max(nics[domain], 1)
        links = min(count, _UPLINKS_MOST)
        return Uplinks(count=links, bytes_per_s=Bandwidth(min(float(speed) * count / links, Bandwidth.most)))

    assert isinstance(file.instances, list), "a Cluster keeps its file without shorthands"
    return replace(
        file,
        network=Network(),
        discovery=None,
        nodes=nodes,
        racks=[
            replace(
                rack,
                uplinks=uplinks(f"rack {rack.name}"),
                datacenter=rack.datacenter or (None if rack.pod else site),
            )
            for rack in file.racks
        ],
        pods=[replace(pod, uplinks=uplinks(f"pod {pod.name}"), datacenter=pod.datacenter or site) for pod in file.pods],
        instances=[_sized(entry, tp) for entry in file.instances],
    )


def _sized(entry: InstanceEntry, tp: int) -> InstanceEntry:
    size = (entry.tp or tp) * (entry.pp or 1)
    return entry if size == tp else replace(entry, kv_capacity_bytes=Size(KV_BYTES_PER_GPU * size))
