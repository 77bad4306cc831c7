"""`KvRouter`: a gateway deployment, the engines behind it, and its rules for KV transfers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.kube.resources.fields import DomainName, LabelKey, LabelValue, ObjectName, Part, Port
from kvroute.kube.resources.network import RouterNetwork
from kvroute.kube.resources.timing import EngineDefaults, EngineTiming, TimingName, typical_timing
from kvroute.policies.constraint import Level, TopologyConstraint
from kvroute.policies.names import DEFAULT_DECODE_POLICY

SOFT_POLICY = "soft-topology"
"""The decode policy that has a weight of KV transfers."""
MismatchPolicy: TypeAlias = Literal["fail", "fallback", "required", "preferred"]
PolicyName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]*\Z", max_length=40, examples=["foresight"])]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1000)]
Amount: TypeAlias = Annotated[
    str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?\Z", max_length=30, examples=["500m", "2Gi"])
]


class TransferTopology(Part, frozen=True, kw_only=True):
    """Which boundary of the network KV transfers may not cross, or should not."""

    level: DomainName
    """Name of the level: a domain of the ClusterTopology, or any name with `label`."""
    mismatch_policy: MismatchPolicy = "fail"
    """If no decode engine in the domain has room: `fail` (or `required`) rejects the request, `fallback` leaves the
    domain, `preferred` only lowers the cost inside."""
    cluster_topology_name: ObjectName | None = None
    """The ClusterTopology, of kvroute or of Grove, that has the level."""
    label: LabelKey | None = None
    """Label of nodes that names the domain; no ClusterTopology is needed or checked."""
    place: Level | None = None
    """Level of kvroute's network model, with `label`; it can be left out for the usual names."""
    kv_transfer_weight: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """KV blocks of load that one second of transfer is worth: the decode policy is then `soft-topology`."""

    def constraint(self, place: Level) -> TopologyConstraint:
        """Return the rule for kvroute's decode policies."""
        return TopologyConstraint.parse(f"{place}:{self.mismatch_policy}")


class LabelSelector(Part, frozen=True, kw_only=True):
    """Pods that have all these labels."""

    match_labels: Annotated[dict[LabelKey, LabelValue], Meta(min_length=1, max_length=16)]


class Engines(Part, frozen=True, kw_only=True):
    """Engine pods in the namespace of the KvRouter."""

    selector: LabelSelector


class Ports(Part, frozen=True, kw_only=True):
    """Ports of the gateway and of its Service."""

    client: Port = 8080
    """The OpenAI-compatible API."""
    admin: Port = 9090
    """Dashboard and metrics."""


class Resources(Part, frozen=True, kw_only=True):
    """Resources of the gateway's container."""

    requests: Annotated[dict[str, int | Amount], Meta(max_length=8)] = field(
        default_factory=lambda: {"cpu": "1", "memory": "1Gi"}
    )
    limits: Annotated[dict[str, int | Amount], Meta(max_length=8)] = field(default_factory=lambda: {"memory": "4Gi"})


class SecretKey(Part, frozen=True, kw_only=True):
    """One key of a Secret in the namespace of the KvRouter."""

    name: ObjectName
    key: Annotated[str, Meta(pattern=r"^[-._a-zA-Z0-9]+\Z", max_length=253)] = "gateway.keys"


class KvRouterSpec(Part, frozen=True, kw_only=True):
    """What a gateway is to be."""

    model: Annotated[str, Meta(min_length=1, max_length=200, examples=["llama-3-70b"])]
    """Model of engines whose pods name none: a preset of `kvroute llm` or a Hugging Face name."""
    engines: Engines
    image: Text | None = None
    """Image of the gateway; without it, the operator's own."""
    image_pull_secrets: Annotated[list[ObjectName], Meta(max_length=8)] = field(default_factory=list)
    replicas: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Number of gateways; leave it out if a HorizontalPodAutoscaler sets it."""
    policy: PolicyName = DEFAULT_DECODE_POLICY
    """Decode policy."""
    kv_cache_transfer_topology: TransferTopology | None = None
    network: RouterNetwork = RouterNetwork()
    defaults: EngineDefaults = EngineDefaults()
    timing: Annotated[dict[TimingName, EngineTiming], Meta(min_length=1, max_length=16)] = field(
        default_factory=typical_timing
    )
    """Computing times by name; the label `kvroute.io/timing` of a pod, or `defaults.timing`, chooses one."""
    ports: Ports = Ports()
    resources: Resources = field(default_factory=Resources)
    node_selector: Annotated[dict[LabelKey, LabelValue], Meta(max_length=16)] = field(default_factory=dict)
    keys_secret_ref: SecretKey | None = None
    """API keys of clients, in the format of `kvroute key new`; without it every client in the network is served."""
    drain_seconds: Annotated[int, Meta(ge=1, le=3600)] = 120
    """How long a gateway that ends, or an engine that changes its role, may finish its requests."""
    gateway: dict[str, Any] = field(default_factory=dict)
    """More settings of the section `gateway` of a cluster file, as in docs/cluster-file.md."""
    monitoring: bool = True
    """Whether a ServiceMonitor is made, if Prometheus' operator is installed."""
