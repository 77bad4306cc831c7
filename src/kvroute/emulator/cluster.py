"""A whole cluster of emulated engines in one process and one event loop."""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import zmq.asyncio

from kvroute import llm
from kvroute.emulator.api.routes import answer
from kvroute.emulator.api.server import InstanceServer
from kvroute.emulator.clock import WallClock
from kvroute.emulator.engine.adapters import LoraSlots
from kvroute.emulator.engine.engine import Engine
from kvroute.emulator.engine.faults import Faults
from kvroute.emulator.kv.fabric import EmulatedFabric
from kvroute.emulator.kv.kv_events import KvPublisher, changes
from kvroute.emulator.kv.real_store import RealStore
from kvroute.emulator.kv.storage import Medium, ModelledNic, StorageNode, StoredBlocks
from kvroute.emulator.kv.storage_tier import StorageTier
from kvroute.emulator.kv_server import KvServer, KvServerInstance
from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.prefix import Evicted
from kvroute.topology import Cluster
from kvroute.types import TIER_COUNT, Endpoint, InputError, Instance
from kvroute_engine.addresses import host_port
from kvroute_engine.block_store.location import StoreLocation
from kvroute_engine.files.units import Duration, quantity

SOCKETS_EACH = 16
"""Approximate number of file descriptors per instance, connections included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedClusterSpec:
    """Settings of emulated engines."""

    host: str = "127.0.0.1"
    kv_scale: float = 1e-3
    """Real bytes per modelled byte of KV."""
    block_tokens: int = 16
    kv_events: bool = True
    kv_expiry_s: float = 480.0
    kv_patience_s: float = 10.0
    """Time without progress after which the receiver aborts a KV transfer and the request fails, in seconds."""
    background: tuple[float, ...] = (0.0,) * TIER_COUNT
    """Share of every link of a tier that other traffic uses."""
    endpoints_from_file: bool = False
    """Listen on the addresses in the cluster file instead of ports that the system chooses."""
    seed: int = 0
    adapter_slots: int = 4
    """Number of LoRA adapters for which each instance has room (vLLM's `--max-loras`)."""
    store: StoreLocation | None = None
    """Real store that nodes with storage NICs use; None: a modelled one."""

    def __post_init__(self) -> None:
        if not 0 <= self.kv_scale <= 1:
            raise InputError(f"kv_scale is {self.kv_scale}", hint="give 0 to 1")
        if self.block_tokens < 1:
            raise InputError(f"block_tokens is {self.block_tokens}", hint="give 1 or more")
        if not 0 < self.kv_expiry_s < float("inf"):
            raise InputError(f"kv_expiry_s is {self.kv_expiry_s}", hint="give seconds above 0")
        if not self.kv_patience_s > 0:
            raise InputError(f"kv_patience_s is {self.kv_patience_s}", hint="give seconds above 0")
        if len(self.background) != TIER_COUNT or any(not 0 <= share < 1 for share in self.background):
            raise InputError(f"background is {self.background}", hint=f"give {TIER_COUNT} shares in [0, 1)")


class EndpointList(msgspec.Struct, frozen=True):
    """Document that lists the endpoints of all instances."""

    instances: dict[str, Endpoint]


class EmulatedCluster:
    """Emulated instances of a cluster, all of them or the named ones; an async context manager.

    Raises:
        InputError: an instance is not in the cluster, or an address cannot be bound.
    """

    def __init__(self, cluster: Cluster, settings: EmulatedClusterSpec, names: Sequence[str] = ()) -> None:
        self._cluster, self._settings = cluster, settings
        indices = [cluster.index(name) for name in dict.fromkeys(names)] or range(len(cluster.instances))
        self._instances = _rank_0_first([cluster.instances[index] for index in indices], cluster.name)
        self.servers: dict[str, InstanceServer] = {}
        self._stack = AsyncExitStack()
        self._leaders: dict[str, InstanceServer] = {}
        """Rank 0 of each engine with data-parallel ranks."""
        self._nodes: dict[str, StorageNode] = {}
        """Storage NIC and buffer by name of the node."""

    async def __aenter__(self) -> EmulatedCluster:
        _allow_sockets(SOCKETS_EACH * len(self._instances) + 256)
        async with AsyncExitStack() as stack:
            clock, settings = WallClock(), self._settings
            fabric = EmulatedFabric(
                self._cluster, clock, kv_scale=settings.kv_scale, background=settings.background, seed=settings.seed
            )
            stack.callback(fabric.close)
            self._nodes = self._storage_nodes(clock)
            for node in self._nodes.values():
                stack.push_async_callback(node.close)
            context = zmq.asyncio.Context()
            context.set(zmq.MAX_SOCKETS, max(context.get(zmq.MAX_SOCKETS), 4 * len(self._instances)))
            stack.callback(context.term)
            for instance in self._instances:
                server = self._server(instance, clock, fabric, context)
                self._join(server, instance)
                stack.push_async_callback(server.close)
                server.bind()
                await server.open()
                self.servers[instance.name] = server
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _server(
        self, instance: Instance, clock: WallClock, fabric: EmulatedFabric, context: zmq.asyncio.Context
    ) -> InstanceServer:
        settings, name = self._settings, instance.name
        host, port, kv_port, events, replay = self._addresses(instance)
        publisher = None
        if settings.kv_events:
            publisher = KvPublisher(context, f"kv@{name}", events, replay, rank=instance.rank)
        leader = self._leaders.get(instance.server)
        faults = leader.faults if leader is not None else Faults(f"faults {settings.seed} {name}")

        def on_kv(prompt: EmulatedPrompt | None, before: int, now: int, evicted: list[Evicted]) -> None:
            if publisher is not None:
                publisher.publish(changes(prompt, before, now, evicted, settings.block_tokens))

        model, node = llm.model(instance.model), self._nodes.get(instance.node)
        adapters = _adapters(self._cluster, instance.model)
        block_bytes = model.block_bytes(settings.block_tokens)
        tier = (
            StorageTier(node, instance.model, settings.block_tokens, block_bytes, publisher)
            if node is not None
            else None
        )

        def new_engine() -> Engine:
            kv_server.kv_source.engine_id = f"{name}-{uuid4().hex}"
            return Engine(
                instance=instance,
                spec=self._cluster.timing[instance.timing],
                model=model,
                clock=clock,
                block_tokens=settings.block_tokens,
                on_kv=on_kv,
                kv_expiry_s=settings.kv_expiry_s,
                kv_patience_s=settings.kv_patience_s,
                aliases=_aliases(self._cluster, instance.model),
                adapters=LoraSlots(adapters, settings.adapter_slots),
                storage=tier,
            )

        faulty = partial(_strikes_transfer, faults)
        kv_server = KvServer(KvServerInstance(name, self._cluster, clock, fabric, faulty, node))
        return InstanceServer(host, port, kv_port, answer, new_engine, kv_server, publisher, faults, instance.role)

    def _join(self, server: InstanceServer, instance: Instance) -> None:
        """Make a data-parallel rank part of its server."""
        if not instance.engine:
            return
        leader = self._leaders.setdefault(instance.engine, server)
        if leader is not server:
            leader.followers.append(server)
            server.leader = leader

    def _addresses(self, instance: Instance) -> tuple[str, int, int, str, str]:
        """Return (host, HTTP port, KV port, KV events, KV replay). The system chooses ports given as 0 or `*`."""
        host, free = self._settings.host, f"tcp://{host_port(self._settings.host, '*')}"
        if not self._settings.endpoints_from_file:
            return host, 0, 0, free, free
        if instance.endpoint is None:
            what = f"instance {instance.name} has no endpoint"
            raise InputError(what, where=self._cluster.name, hint="give it one, or use automatic ports")
        url = urlsplit(instance.endpoint.url)
        _, _, bootstrap = instance.endpoint.bootstrap.rpartition(":")
        return (
            url.hostname or host,
            url.port or 80,
            int(bootstrap or 0),
            instance.endpoint.kv_events or free,
            instance.endpoint.kv_replay or free,
        )

    def _storage_nodes(self, clock: WallClock) -> dict[str, StorageNode]:
        """Return the buffer of each node that has a storage NIC, by name; none without a store."""
        cluster, settings = self._cluster, self._settings
        storage = cluster.file.storage
        if storage is None:
            if settings.store is not None:
                hint = "add a section `storage`, and `nics.storage` to the nodes that read"
                raise InputError("the cluster file has no store", where=cluster.name, hint=hint)
            return {}
        limit = float(storage.bytes_per_s) if storage.bytes_per_s is not None else math.inf
        store, nodes = StoredBlocks(), {}
        for instance in self._instances:
            cards = cluster.storage_links(cluster.index(instance.name))
            if cards and instance.node not in nodes:
                out = sum(cluster.links[up].bytes_per_s for up, _ in cards)
                into = min(sum(cluster.links[down].bytes_per_s for _, down in cards), limit)
                medium: Medium = ModelledNic(clock, store, into, out)
                if settings.store is not None:
                    size = partial(_block_bytes, settings.block_tokens)
                    medium = RealStore(settings.store, settings.block_tokens, size, settings.kv_scale)
                nodes[instance.node] = StorageNode(clock, medium, float(storage.buffer_bytes))
        return nodes

    def ready(self) -> EndpointList:
        """Return the endpoint of each instance. `bootstrap` is the port that serves KV."""
        return EndpointList({name: self._endpoint(server) for name, server in self.servers.items()})

    def _endpoint(self, server: InstanceServer) -> Endpoint:
        address = f"http://{host_port(server.host, server.port)}"
        publisher, configured = server.publisher, server.engine.instance.endpoint
        return Endpoint(
            url=address,
            protocol=configured.protocol if configured else "vllm",
            bootstrap=host_port(server.host, server.kv_port),
            kv_events=publisher.endpoint if publisher else "",
            kv_replay=publisher.replay if publisher else "",
            buffer=address if server.engine.storage is not None else "",
        )


def _rank_0_first(instances: Sequence[Instance], where: str) -> list[Instance]:
    """Return instances in their order, but the ranks of an engine by rank, at the place of the first one.

    Raises:
        InputError: a rank is there without all lower ones.
    """
    first: dict[str, int] = {}
    for index, instance in enumerate(instances):
        first.setdefault(instance.server, index)
    ordered = sorted(instances, key=lambda instance: (first[instance.server], instance.rank))
    count: Counter[str] = Counter()
    for instance in ordered:
        if instance.engine and count[instance.engine] != instance.rank:
            what = f"{instance.name} is emulated without all lower ranks of {instance.engine}"
            raise InputError(what, where=where, hint="emulate all ranks of an engine in one process")
        count[instance.engine] += 1
    return ordered


def _block_bytes(block_tokens: int, model: str) -> float:
    return llm.model(model).block_bytes(block_tokens)


def _aliases(cluster: Cluster, model: str) -> tuple[str, ...]:
    """Return the aliases of a model in the file's `gateway.models`. The gateway forwards them unchanged."""
    models = cluster.file.gateway.get("models")
    return tuple(alias for alias, name in models.items() if name == model) if isinstance(models, dict) else ()


def _adapters(cluster: Cluster, model: str) -> dict[str, float]:
    """Return the load time of the model's LoRA adapters in the file's `gateway.adapters`, in seconds by name."""
    entries = cluster.file.gateway.get("adapters")
    found: dict[str, float] = {}
    for name, entry in sorted(entries.items()) if isinstance(entries, dict) else ():
        if isinstance(entry, dict) and entry.get("model", model) == model:
            found[name] = float(quantity(Duration, entry.get("load", "1 s")))
    return found


def _strikes_transfer(faults: Faults) -> bool:
    return faults.should_fail("transfer") is not None


def _allow_sockets(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
