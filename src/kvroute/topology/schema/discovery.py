"""The discovery section of a cluster file: where instances are found, and templates for what they do not say."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, field

from kvroute.topology.label_selector import LABEL_KEY
from kvroute.topology.schema.base import Entry, GpuCount
from kvroute.topology.schema.network import Nics, Uplinks
from kvroute.types import (
    KvProtocol,
)
from kvroute_engine.files.units import Bandwidth, Duration


class NodeTemplate(Entry, frozen=True, kw_only=True):
    """Each node that a discovered engine names and the file does not list."""

    gpus: GpuCount = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    """Per GPU and direction."""
    nics: Nics = Nics()


class DomainTemplate(Entry, frozen=True, kw_only=True):
    """Each rack, or each pod, that a discovered engine names and the file does not list."""

    uplinks: Uplinks | None = None
    """None: the uplinks are no limit; they carry the traffic of 32 nodes."""


Domain: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?\Z", max_length=253)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]


class DnsDiscovery(Entry, frozen=True, kw_only=True):
    """Engines by SRV records, one name for each role: `_http._tcp.prefill.example`."""

    prefill: Domain | None = None
    decode: Domain | None = None
    both: Domain | None = None
    protocol: KvProtocol = "vllm"
    """KV transfer protocol of all these engines."""
    bootstrap_port: Port | None = None
    """Port of the bootstrap server on the host of each prefill engine."""
    kv_events_port: Port | None = None
    """Port that publishes KV events on the host of each engine."""
    nameservers: list[Annotated[str, Meta(pattern=r"^[^\s/]+\Z", examples=["10.0.0.10", "127.0.0.1:5353"])]] = []
    """Address, or `address:port`, of each DNS server; empty: those of the system."""
    interval_min_s: Duration = field(name="interval_min", default=Duration(1.0))
    """Shortest time between two queries, whatever the TTL is."""
    interval_max_s: Duration = field(name="interval_max", default=Duration(30.0))
    """Longest time between two queries, whatever the TTL is."""
    keep_s: Duration = field(name="keep", default=Duration(30.0))
    """Time for which the engines of a name stay after the server has begun to answer that the name has none."""


LabelKeys: TypeAlias = Annotated[
    list[Annotated[str, Meta(pattern=rf"^{LABEL_KEY}\Z", examples=["topology.kubernetes.io/rack"])]], Meta(min_length=1)
]


class LevelsEntry(Entry, frozen=True, kw_only=True):
    """Node labels that give each level, best first; None: the labels that docs/kubernetes-labels.md lists."""

    region: LabelKeys | None = None
    """Makes datacenters of the same name in two regions distinct."""
    datacenter: LabelKeys | None = None
    pod: LabelKeys | None = None
    rack: LabelKeys | None = None


NAMESPACE_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""Name of a namespace of Kubernetes, as a regular expression."""
OBJECT_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
"""Name of a custom resource's object."""


class KubernetesEntry(Entry, frozen=True, kw_only=True):
    """Engines by the pods of a Kubernetes cluster, and their places by the labels of nodes."""

    namespace: Annotated[str, Meta(pattern=rf"^({NAMESPACE_NAME}|\*)\Z", examples=["llm", "*"])] | None = None
    """`*`: all namespaces; None: that of the gateway's own pod, or of the kubeconfig's context."""
    selector: str = ""
    """Label selector; empty: all pods that are recognised as engines."""
    pool: Annotated[str, Meta(pattern=rf"^{OBJECT_NAME}\Z", examples=["my-pool"])] | None = None
    """InferencePool of the namespace: its selector and its target ports give the engines. None: no pool does."""
    levels: LevelsEntry = LevelsEntry()
    kubeconfig: str | None = None
    """A relative path starts at the folder of the cluster file; None: the service account of the own pod, else
    `KUBECONFIG`, else `~/.kube/config`."""
    context: str | None = None
    """None: the current context of the kubeconfig."""


class Discovery(Entry, frozen=True, kw_only=True):
    """Engines that join and leave while the gateway runs: one source of them, and templates of their surroundings."""

    file: str | None = None
    """YAML file that lists the engines; a relative path starts at the folder of the cluster file."""
    dns: DnsDiscovery | None = None
    kubernetes: KubernetesEntry | None = None
    node: NodeTemplate = NodeTemplate()
    rack: DomainTemplate = DomainTemplate()
    pod: DomainTemplate = DomainTemplate()
    drain_s: Duration = field(name="drain", default=Duration(30.0))
    """Time for which requests on an engine that is gone may continue; then they are aborted and retried."""
