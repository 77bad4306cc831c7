"""Engines from the pods and nodes of an API server, as they come and go.

EndpointSlices are not read. All that they say of an engine is in its pod, which the server has earlier, and a slice can
name an address whose pod is already another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from kvroute.kube.api.client import Access
from kvroute.kube.api.informer import DEFAULT_TIMING, Informer, Timing
from kvroute.kube.api.objects import KubeNode, KubePod
from kvroute.kube.api.requests import NODES, PODS, Selection
from kvroute.kube.api.store import Key, ObjectStore
from kvroute.kube.discovery.labels import KEPT_ANNOTATIONS
from kvroute.kube.discovery.places import DEFAULT_LEVELS, LevelKeys
from kvroute.kube.discovery.pods import (
    PodFinding,
    PodReading,
    PodReadSpec,
    merged,
    read_pod,
    read_pods,
)
from kvroute.types import InputError
from kvroute.types.discovered import Reporter


@dataclass(frozen=True, slots=True)
class DiscoverySpec:
    """Which pods are engines of this cluster, and how they are followed."""

    namespace: str | None = None
    """None: that of the own pod or of the kubeconfig's context; empty: all."""
    selector: str = ""
    """Label selector; empty: all pods that are recognised as engines."""
    levels: LevelKeys = DEFAULT_LEVELS
    coalesce_s: float = 0.1
    """Changes within this time are reported together."""
    nodes_wait_s: float = 10.0
    """How long the first report waits for nodes that cannot be listed."""
    timing: Timing = DEFAULT_TIMING
    ports: tuple[int, ...] = ()
    """HTTP ports of each selected pod, which an InferencePool gives; empty: the pod tells."""
    handover_s: float = 5.0
    """How long the former pods of an InferencePool serve on after a change of its selector: until the new ones have
    joined and passed their health check."""

    def selection(self, access: Access) -> Selection:
        """Return the pods to list; raise InputError if the namespace is not known."""
        return Selection(access.namespace() if self.namespace is None else self.namespace, self.selector)


class KubernetesDiscovery:
    """A `DiscoverySource` that follows pods and nodes."""

    def __init__(
        self,
        access: Access,
        options: DiscoverySpec,
        on_findings: Callable[[tuple[PodFinding, ...]], None] = lambda _: None,
    ) -> None:
        """
        Args:
            on_findings: called with all findings whenever they have changed.

        Raises:
            InputError: there is no usable kubeconfig.
        """
        self._options, self._on_findings = options, on_findings
        self._pods = ObjectStore(kept_pod)
        self._nodes = ObjectStore(kept_node(options.levels))
        self._readings: dict[Key, PodReading] = {}
        self._joined: PodReading | None = None
        """All readings together; None: nothing has been read."""
        self._dirty: set[Key] = set()
        self._changed = asyncio.Event()
        self._nodes_known = False
        self._pod_informer = Informer(
            access.connect, PODS, options.selection(access), self._pods, self._pods_changed, options.timing
        )
        self._node_informer = Informer(
            access.connect, NODES, Selection(), self._nodes, self._nodes_changed, options.timing
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """Why pods or nodes are not up to date, one sentence each; empty while the server answers."""
        named = (("pods", self._pod_informer), ("nodes", self._node_informer))
        return tuple(f"{plural}: {informer.failure}" for plural, informer in named if informer.failure)

    async def run(self, report: Reporter) -> None:
        """Report all engines when the first list is there, and after each change, until cancelled. While the server
        is away, nothing is reported."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pod_informer.run())
            group.create_task(self._node_informer.run())
            await self._first_lists()
            last: PodReading | None = None
            while True:
                reading = self._read()
                if last is None or reading.engines != last.engines:
                    report(reading.engines)
                if last is None or reading.findings != last.findings:
                    self._on_findings(reading.findings)
                last = reading
                await self._changed.wait()
                await asyncio.sleep(self._options.coalesce_s)

    async def _first_lists(self) -> None:
        """Wait for pods, and for nodes unless the server refuses to list them."""
        loop = asyncio.get_running_loop()
        limit_s = loop.time() + self._options.nodes_wait_s
        while not self._pods.synced or not (self._nodes.synced or self._node_informer.refused or loop.time() > limit_s):
            await asyncio.sleep(0.05)

    def _pods_changed(self, keys: frozenset[Key]) -> None:
        self._dirty |= keys
        self._changed.set()

    def _nodes_changed(self, keys: frozenset[Key]) -> None:
        names = {name for _, name in keys}
        everywhere = not self._nodes_known
        self._dirty |= {key for key, pod in self._pods.objects.items() if everywhere or pod.spec.node_name in names}
        self._changed.set()

    def _read(self) -> PodReading:
        """Read the pods that have changed or whose node has changed, and join all readings if one is another one."""
        self._changed.clear()
        dirty, self._dirty = self._dirty, set()
        if self._nodes.synced and not self._nodes_known:
            self._nodes_known, dirty = True, set(self._pods.objects)
        options = PodReadSpec(
            self._options.levels, bool(self._options.selector), self._nodes_known, self._options.ports
        )
        same = True
        for key in dirty:
            pod, before = self._pods.objects.get(key), self._readings.pop(key, None)
            now = None if pod is None else read_pod(pod, self._nodes.objects.get(("", pod.spec.node_name)), options)
            if now is not None:
                self._readings[key] = now
            same = same and (now or PodReading()) == (before or PodReading())
        if self._joined is None or not same:
            self._joined = merged(self._readings.values())
        return self._joined


def kept_pod(pod: KubePod) -> KubePod:
    """Return a pod without the annotations that discovery does not read."""
    annotations = {key: value for key, value in pod.annotations.items() if key in KEPT_ANNOTATIONS}
    return replace(pod, metadata=replace(pod.metadata, annotations=annotations or None))


def kept_node(levels: LevelKeys) -> Callable[[KubeNode], KubeNode]:
    """Return the function that reduces a node to the labels of the levels."""
    keys = levels.all_keys()

    def kept(node: KubeNode) -> KubeNode:
        labels = {key: value for key, value in node.labels.items() if key in keys}
        return replace(node, metadata=replace(node.metadata, labels=labels, annotations=None))

    return kept


@dataclass(frozen=True, slots=True)
class Listing:
    """What discovery finds at one moment."""

    reading: PodReading
    pods: int
    """Number of pods that were read."""
    nodes_failure: str
    """Why nodes could not be listed; empty if they could."""


async def read_once(access: Access, options: DiscoverySpec) -> Listing:
    """Return what discovery would find now.

    Raises:
        InputError: there is no usable kubeconfig, or the server does not list the pods.
    """
    pods, nodes = ObjectStore(kept_pod), ObjectStore(kept_node(options.levels))
    selection = options.selection(access)
    await Informer(access.connect, PODS, selection, pods, lambda _: None, options.timing).list_once()
    failure = ""
    try:
        await Informer(access.connect, NODES, Selection(), nodes, lambda _: None, options.timing).list_once()
    except InputError as error:
        failure = str(error)
    by_name = {name: node for (_, name), node in nodes.objects.items()}
    read_options = PodReadSpec(options.levels, bool(options.selector), not failure, options.ports)
    found = pods.objects.values()
    return Listing(read_pods(found, by_name, read_options), len(found), failure)
