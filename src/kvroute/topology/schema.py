"""The cluster file as msgspec Structs, and back to YAML. It holds the values as written and does not interpret them.

Attribute names end in their unit; the file's own keys (`capacity`, `per_token`, ...) take text with a unit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import yaml
from msgspec import Meta, Struct, field

from kvroute.topology.label_selector import LABEL_KEY
from kvroute.types import (
    DecodeSpec,
    Endpoint,
    KvProtocol,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
    QuadraticPrefill,
    Role,
    SchedulerSpec,
    TimingSpec,
    TransferStart,
)
from kvroute_engine.agent.schemes import Scheme
from kvroute_engine.files.units import Bandwidth, Duration, Latency, Size, quantity_text

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*\Z", max_length=200)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=65_536)]
Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
GpuCount: TypeAlias = Annotated[int, Meta(ge=0, le=1024)]
Ratio: TypeAlias = Annotated[float, Meta(gt=0, le=1000)]
Efficiency: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
NicScope: TypeAlias = Literal["gpu", "instance", "server"]
Ecmp: TypeAlias = Literal["flow", "transfer"]
Placement: TypeAlias = Literal["rack", "spread", "packed"]
SwitchLevel: TypeAlias = Literal["rack", "pod", "core"]
WireType: TypeAlias = Literal["int32", "fp16"]
ReadPath: TypeAlias = Literal["prefill", "alternating", "shorter", "split"]
_HOST_PORT = r"(\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]*]+):[0-9]{1,5}"
ZmqEndpoint: TypeAlias = Annotated[
    str, Meta(pattern=rf"^(tcp://{_HOST_PORT}|ipc://\S+)?\Z", examples=["tcp://10.0.0.1:5557"])
]


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One mapping of the file; an unknown key is an error."""


class Uplinks(Entry, frozen=True, kw_only=True):
    """`count` equal links to the next level, each with `capacity` in both directions."""

    count: Count = 1
    bytes_per_s: Bandwidth = field(name="capacity")


class Nic(Entry, frozen=True, kw_only=True):
    """`count` network cards of one node, each with `capacity` in both directions."""

    count: Count = 1
    bytes_per_s: Bandwidth = field(name="capacity")
    scope: NicScope = "gpu"
    """Use of the cards: with `gpu`, GPU g uses card g * count // gpus; with `instance`, an instance uses the card of
    its first GPU on the node; `server` combines the cards into one."""
    efficiency: Efficiency = 1.0
    """Share of `capacity` that a KV transfer reaches (RDMA, NIXL, TCP)."""

    @property
    def kv_bytes_per_s(self) -> float:
        """Rate of one card for KV, in bytes per second and direction."""
        return float(self.bytes_per_s) * self.efficiency


class Nics(Entry, frozen=True, kw_only=True):
    """The network cards of a node: the compute network carries KV caches, the storage network reads and writes stored
    ones."""

    compute: Nic | None = None
    storage: Nic | None = None


class Datacenter(Entry, frozen=True, kw_only=True):
    """A site. Its core connects all its pods without oversubscription."""

    name: Name


class Pod(Entry, frozen=True, kw_only=True):
    """Racks below one aggregation layer. Without uplinks no traffic leaves it."""

    name: Name
    datacenter: Name | None = None
    uplinks: Uplinks | None = None


class Rack(Entry, frozen=True, kw_only=True):
    """Nodes below one top-of-rack switch. Without uplinks no traffic leaves it."""

    name: Name
    pod: Name | None = None
    datacenter: Name | None = None
    """Only without `pod`: the uplinks then lead directly to the core."""
    uplinks: Uplinks | None = None


class Node(Entry, frozen=True, kw_only=True):
    """One server. Only its nearest parent is given; without rack and pod its cards lead directly to the core."""

    name: Name
    rack: Name | None = None
    pod: Name | None = None
    datacenter: Name | None = None
    gpus: GpuCount = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    """Per GPU and direction."""
    nics: Nics = Nics()


class Wan(Entry, frozen=True, kw_only=True):
    """`count` equal links between two datacenters, each with `capacity` in both directions."""

    source: Name = field(name="from")
    target: Name = field(name="to")
    bytes_per_s: Bandwidth = field(name="capacity")
    count: Count = 1
    latency_s: Latency = field(name="latency", default=Latency(0.0))


class TierLatency(Entry, frozen=True, kw_only=True):
    """One-way latency between two instances, by their nearest common domain (defaults: NetKV VI-A)."""

    node_s: Latency = field(name="node", default=Latency(1e-6))
    rack_s: Latency = field(name="rack", default=Latency(3e-6))
    pod_s: Latency = field(name="pod", default=Latency(8e-6))
    datacenter_s: Latency = field(name="datacenter", default=Latency(15e-6))


class TierBandwidth(Entry, frozen=True, kw_only=True):
    """Bandwidth per tier that the scheduler uses; an absent one is derived from the links."""

    node_bytes_per_s: Bandwidth | None = field(name="node", default=None)
    rack_bytes_per_s: Bandwidth | None = field(name="rack", default=None)
    pod_bytes_per_s: Bandwidth | None = field(name="pod", default=None)
    datacenter_bytes_per_s: Bandwidth | None = field(name="datacenter", default=None)
    wan_bytes_per_s: Bandwidth | None = field(name="wan", default=None)


class Network(Entry, frozen=True, kw_only=True):
    """Settings of all transfers."""

    latency: TierLatency = TierLatency()
    ecmp: Ecmp = "flow"
    """Choice among equal links: every `flow` draws, or a `transfer` draws once for all its flows."""
    flows_per_transfer: Count | Literal["tp"] = "tp"
    """Number of flows of one transfer; `tp`: one per shard of the side with more shards."""
    tier_bandwidth: TierBandwidth = TierBandwidth()


class LinearPrefillEntry(Entry, frozen=True, kw_only=True, tag="linear", tag_field="kind"):
    """`base + per_token * new tokens`."""

    per_token_s: Duration = field(name="per_token")
    base_s: Duration = field(name="base", default=Duration(0.0))


class QuadraticPrefillEntry(Entry, frozen=True, kw_only=True, tag="quadratic", tag_field="kind"):
    """`base + per_token * tokens + per_token2 * tokens^2`."""

    base_s: Duration = field(name="base")
    per_token_s: Duration = field(name="per_token")
    per_token2_s: Duration = field(name="per_token2")


class PiecewisePrefillEntry(Entry, frozen=True, kw_only=True, tag="piecewise", tag_field="kind"):
    """Straight lines through measured points: `times[i]` for `tokens[i]`."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    times_s: list[Duration] = field(name="times")


class DecodeEntry(Entry, frozen=True, kw_only=True):
    """One iteration: `base + per_request * batch + per_context_token * all context tokens of the batch`."""

    base_s: Duration = field(name="base")
    per_request_s: Duration = field(name="per_request", default=Duration(0.0))
    per_context_token_s: Duration = field(name="per_context_token", default=Duration(0.0))


class SchedulerEntry(Entry, frozen=True, kw_only=True):
    """How an engine divides prompts into steps, and what a request costs besides its steps. Only simulations use it."""

    step_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Most tokens of one step (vLLM's `max_num_batched_tokens`): prompts share a step, and a longer prompt takes
    several. None: one prompt after the other."""
    step_s: Duration = field(name="step", default=Duration(0.0))
    """The part of the prefill's `base` that each step takes, however many prompts it has; the rest passes before the
    first step of a prompt and delays no other. Needs `step_tokens`."""
    decode_request_s: Duration = field(name="decode_request", default=Duration(0.0))
    """Time of a request on a decode instance besides its steps and its transfer, until its first token."""
    transfers: TransferStart = "at-once"
    """When a decode instance begins to pull a KV cache: at once, or, as in vLLM, between steps, at the end of the next
    step that it plans."""

    def spec(self) -> SchedulerSpec:
        """Return the same in seconds, as a `SchedulerSpec`."""
        return SchedulerSpec(
            step_tokens=self.step_tokens,
            step_s=float(self.step_s),
            decode_request_s=float(self.decode_request_s),
            transfers=self.transfers,
        )


class TimingEntry(Entry, frozen=True, kw_only=True):
    """Computing times of an instance."""

    prefill: LinearPrefillEntry | QuadraticPrefillEntry | PiecewisePrefillEntry
    decode: DecodeEntry
    scheduler: SchedulerEntry = SchedulerEntry()

    def spec(self) -> TimingSpec:
        """Return the same in seconds, as a `TimingSpec`."""
        decode = DecodeSpec(
            base_s=float(self.decode.base_s),
            per_request_s=float(self.decode.per_request_s),
            per_context_token_s=float(self.decode.per_context_token_s),
        )
        return TimingSpec(prefill=self._prefill_spec(), decode=decode, scheduler=self.scheduler.spec())

    def _prefill_spec(self) -> PrefillSpec:
        match self.prefill:
            case LinearPrefillEntry(per_token_s=per_token, base_s=base):
                return LinearPrefill(per_token_s=float(per_token), base_s=float(base))
            case QuadraticPrefillEntry(base_s=base, per_token_s=linear, per_token2_s=square):
                return QuadraticPrefill(base_s=float(base), per_token_s=float(linear), per_token2_s=float(square))
            case PiecewisePrefillEntry(tokens=tokens, times_s=times):
                return PiecewisePrefill(tokens=tuple(tokens), seconds=tuple(float(second) for second in times))


class Storage(Entry, frozen=True, kw_only=True):
    """The store of KV blocks that all nodes share; each node reads it through its storage NIC into a buffer in host
    memory (DualPath 2.2)."""

    bytes_per_s: Bandwidth | None = field(name="bandwidth", default=None)
    """Read bandwidth of the whole store; None: the storage NICs are the only limit."""
    buffer_bytes: Size = field(name="buffer", default=Size(80e9))
    """Host memory of each node for blocks that are being read."""
    reads: ReadPath = "shorter"
    """Which node reads a request's cached KV: the prefill node, the prefill and the decode node in turn, the one with
    the shorter storage queue, or both, each a part."""


class InstanceDefaults(Entry, frozen=True, kw_only=True):
    """Values for instances that do not set them."""

    model: str | None = None
    tp: Count = 1
    pp: Count = 1
    batch_max: Count = 64
    kv_capacity_bytes: Size | None = field(name="kv_capacity", default=None)
    cpu_bytes_per_s: Bandwidth = field(name="cpu_bandwidth", default=Bandwidth(50e9))
    """Rate at which an instance loads KV from CPU memory, all shards together."""
    disk_bytes_per_s: Bandwidth = field(name="disk_bandwidth", default=Bandwidth(5e9))
    """Rate at which an instance loads KV from storage of its own, all shards together."""
    timing: Name = "default"
    chunk_tokens: Count = 2048
    """Tokens that a decode instance computes in one iteration at most, prompts included (vLLM:
    `max_num_batched_tokens`)."""


class EndpointEntry(Entry, frozen=True, kw_only=True):
    """Addresses of the live engine; only `kvroute serve` needs them."""

    url: Annotated[str, Meta(pattern=r"^https?://[^/?#@\s]+\Z", examples=["http://10.0.0.1:8000"])]
    """URL of the engine, without a path."""
    protocol: KvProtocol = "vllm"
    bootstrap: Annotated[str, Meta(pattern=rf"^({_HOST_PORT})?\Z", examples=["10.0.0.1:8998"])] = ""
    kv_events: ZmqEndpoint = ""
    kv_replay: ZmqEndpoint = ""
    buffer: Annotated[str, Meta(pattern=r"^(https?://[^/?#@\s]+)?\Z", examples=["http://10.0.0.1:7200"])] = ""
    """URL of the buffer server on the engine's node, which reads KV blocks from the store."""

    def endpoint(self) -> Endpoint:
        """Return the same as an `Endpoint`."""
        return Endpoint(
            url=self.url,
            protocol=self.protocol,
            bootstrap=self.bootstrap,
            kv_events=self.kv_events,
            kv_replay=self.kv_replay,
            buffer=self.buffer,
        )


class AllReduceEntry(Entry, frozen=True, kw_only=True):
    """All-reduces in the iterations of an instance. Its `timing` includes their time on an idle network; `kvroute
    simulate` makes them share links with other traffic."""

    scheme: Scheme | list[Scheme]
    """All-reduce scheme of all pipeline stages, or one for each stage."""
    per_iteration: Count
    """All-reduces of one iteration over all pipeline stages: two per layer of most models."""
    token_bytes: Size
    """Bytes that one token adds to each tensor: hidden size x bytes of an element."""
    element_bytes: Annotated[int, Meta(ge=1, le=8)] = 2
    """Size of an element in GPU memory; switches that aggregate have their own on the wire."""

    def schemes(self, stages: int) -> list[Scheme]:
        """Return the scheme of each stage; a list in the file is returned as written."""
        return self.scheme if isinstance(self.scheme, list) else [self.scheme] * stages


class InstanceEntry(Entry, frozen=True, kw_only=True):
    """One serving engine; `gpus` is "node0:0-3" or "node0:0-7,node1:0-7", shard by shard."""

    name: Name
    role: Role
    gpus: str
    model: str | None = None
    tp: Count | None = None
    pp: Count | None = None
    dp: Ranks | None = None
    """Data-parallel ranks that share the endpoint. Each becomes an instance, and all other values are those of one
    rank, except `gpus`: rank by rank."""
    engine: Name | None = None
    """Engine of which the instance is one data-parallel rank; only if ranks are listed one by one."""
    rank: Annotated[int, Meta(ge=0, le=1023)] | None = None
    """Its data-parallel rank, with `engine`."""
    ep_group: Name | None = None
    """Expert-parallel group: with `kvroute simulate --lock-step`, all instances that name it run each iteration
    together; None: those of the engine."""
    batch_max: Count | None = None
    kv_capacity_bytes: Size | None = field(name="kv_capacity", default=None)
    cpu_bytes_per_s: Bandwidth | None = field(name="cpu_bandwidth", default=None)
    disk_bytes_per_s: Bandwidth | None = field(name="disk_bandwidth", default=None)
    timing: Name | None = None
    chunk_tokens: Count | None = None
    group: Name | None = None
    """Group of decode engines; the decode policy `dualpath` balances groups first, then the instances of a group."""
    all_reduce: AllReduceEntry | None = None
    """None: all-reduces use no links in a simulation; `timing` is all that they cost."""
    endpoint: EndpointEntry | None = None


class InstanceCounts(Entry, frozen=True, kw_only=True):
    """Shorthand: numbers of instances, placed by a rule.

    `packed`: in node order, prefill first. `spread`: round-robin over racks, prefill first. `rack`: prefill fills whole
    racks, decode takes the other racks, so that no transfer stays inside a rack.
    """

    prefill: Count
    decode: Count
    placement: Placement = "packed"
    model: str | None = None
    tp: Count | None = None
    pp: Count | None = None
    dp: Ranks | None = None
    """Data-parallel ranks of each engine; see the same key of an instance."""
    batch_max: Count | None = None
    kv_capacity_bytes: Size | None = field(name="kv_capacity", default=None)
    timing: Name | None = None
    all_reduce: AllReduceEntry | None = None


class Oversubscription(Entry, frozen=True, kw_only=True):
    """Ratio of the NIC bandwidth below a domain to its uplink bandwidth: as many uplinks as NICs, each slower by this
    ratio."""

    rack: Ratio = 1.0
    pod: Ratio = 1.0


class FatTree(Entry, frozen=True, kw_only=True, tag="fat-tree", tag_field="kind"):
    """Equal pods of equal racks of equal nodes. Without given uplinks: as many as NICs, divided by oversubscription."""

    pods: Count
    racks_per_pod: Count
    nodes_per_rack: Count
    gpus_per_node: Annotated[int, Meta(ge=1, le=1024)] = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    nics: Nics
    rack_uplinks: Uplinks | None = None
    pod_uplinks: Uplinks | None = None
    oversubscription: Oversubscription | None = None


class SuperPod(Entry, frozen=True, kw_only=True, tag="superpod", tag_field="kind"):
    """Scalable units of nodes with one compute NIC per GPU and one storage NIC per node (DualPath 2.2).

    Rail switches connect all nodes of a unit in one hop, so a unit is a rack; a spine without oversubscription connects
    units.
    """

    units: Count = 1
    nodes_per_unit: Count = 32
    gpus_per_node: Annotated[int, Meta(ge=1, le=1024)] = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    compute_bytes_per_s: Bandwidth = field(name="compute", default=Bandwidth(50e9))
    storage_bytes_per_s: Bandwidth = field(name="storage", default=Bandwidth(50e9))
    efficiency: Efficiency = 1.0
    """Share of `compute` that a KV transfer reaches."""
    oversubscription: Ratio = 1.0


class AggregationEntry(Entry, frozen=True, kw_only=True):
    """Switches that sum the packets of a collective on their way (in-network aggregation)."""

    levels: list[SwitchLevel] = field(default_factory=lambda: ["rack"])
    """Levels whose switches aggregate."""
    slots: Count = 512
    """Packets that a switch aggregates at the same time, for each NIC of a server in a group."""
    packet_bytes: Size = field(name="packet", default=Size(1024.0))
    """Payload of one packet."""
    wire: WireType = "int32"
    """Type of the elements in packets: fixed point in 4 bytes, or half precision."""
    switch_s: Latency = field(name="time", default=Latency(1e-6))
    """Time of an aggregation in the switch."""
    fallback_share: Annotated[float, Meta(ge=0, le=1)] = field(name="fallback", default=0.0)
    """Share of the packets that find no slot and are summed on a GPU of the group (ATP)."""


class Collectives(Entry, frozen=True, kw_only=True):
    """All-reduces of tensor-parallel groups."""

    aggregation: AggregationEntry | None = None
    """None: no switch aggregates."""
    schemes: list[Scheme] | None = None
    """All-reduce schemes that groups may use beside `ring`, which they always may; None: all."""


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
