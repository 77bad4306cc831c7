"""From pods and nodes to engines: pure functions, with a finding for everything that is left out or doubtful."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import msgspec

from kvroute.kube.api.objects import KubeNode, KubePod
from kvroute.kube.discovery.addresses import addresses_of
from kvroute.kube.discovery.labels import TIMING
from kvroute.kube.discovery.places import DEFAULT_LEVELS, LevelKeys, fitting, place_of
from kvroute.kube.discovery.roles import model_of, role_of, shards_of, source_of
from kvroute.topology.reading.data_parallel import discovered_ranks
from kvroute.types import InputError
from kvroute.types.discovered import Discovered

Effect = Literal["left out", "warning", "waiting"]


class PodFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something about one pod, or about an InferencePool, that its owner should know."""

    pod: str
    """`namespace/name`; of another object, with its kind before it."""
    effect: Effect
    """`left out`: it is no engine until this is fixed. `waiting`: it will be one without help."""
    field: str
    """Label, annotation or field of the pod."""
    what: str
    hint: str = ""

    @property
    def sentence(self) -> str:
        """The finding as one sentence."""
        return f"{self.pod}: {self.field}: {self.what}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True)
class PodReading:
    """What pods give: engines ascending by name, and findings ascending by pod."""

    engines: tuple[Discovered, ...] = ()
    findings: tuple[PodFinding, ...] = ()


@dataclass(frozen=True, slots=True)
class PodReadSpec:
    """How pods are read."""

    levels: LevelKeys = DEFAULT_LEVELS
    selected: bool = False
    """Whether the user has selected the pods, so that one that is no engine is worth a finding."""
    nodes_known: bool = True
    """False if nodes cannot be read; places then come from labels of pods alone."""
    ports: tuple[int, ...] = ()
    """Ports of each pod that an InferencePool gives; empty: there is no pool."""


DEFAULT_OPTIONS = PodReadSpec()


def read_pods(
    pods: Iterable[KubePod], nodes: Mapping[str, KubeNode], options: PodReadSpec = DEFAULT_OPTIONS
) -> PodReading:
    """Return the engines of all pods; the order of the pods has no effect.

    Args:
        nodes: nodes by name.
    """
    return merged(read_pod(pod, nodes.get(pod.spec.node_name), options) for pod in pods)


def merged(readings: Iterable[PodReading]) -> PodReading:
    """Join the readings of single pods.

    Of engines with one address only one is kept, a ready one if there is any: an address is used again when its pod
    has ended.
    """
    engines: list[Discovered] = []
    findings: list[PodFinding] = []
    for reading in readings:
        engines += reading.engines
        findings += reading.findings
    names, urls = {engine.name for engine in engines}, {(engine.endpoint.url, engine.rank) for engine in engines}
    if min(len(names), len(urls)) < len(engines):
        engines = _without_duplicates(engines, findings)
    engines.sort(key=attrgetter("name"))
    findings.sort(key=lambda finding: (finding.pod, finding.field, finding.what, finding.hint))
    return PodReading(tuple(engines), tuple(dict.fromkeys(findings)))


def _without_duplicates(engines: Iterable[Discovered], findings: list[PodFinding]) -> list[Discovered]:
    """Return one engine of each name and each address; a ready one whose address another one has is a finding."""
    owners: dict[str, str] = {}
    names: set[str] = set()
    kept = []
    for engine in sorted(engines, key=lambda engine: (not engine.ready, engine.name, engine.uid, engine.endpoint.url)):
        url = engine.endpoint.url
        owner = owners.get(url, engine.server)
        if engine.name in names:
            continue
        if owner != engine.server:
            if engine.ready:
                what = f"{engine.name} has the address {url} of {owner}, which is ready too"
                pod = engine.name.replace(".", "/", 1).partition("_")[0]
                findings.append(_finding(pod, "left out", "status.podIP", what))
            continue
        if engine.ready:
            owners[url] = engine.server
        names.add(engine.name)
        kept.append(engine)
    return kept


def read_pod(pod: KubePod, node: KubeNode | None, options: PodReadSpec = DEFAULT_OPTIONS) -> PodReading:
    """Return the engines of one pod: none, one, or one for each data-parallel rank, behind one port or on their own.

    Args:
        node: the pod's node; None if it is not known.
    """
    name = f"{pod.metadata.namespace}/{pod.metadata.name}"
    if pod.status.phase in ("Succeeded", "Failed"):
        return PodReading()
    warnings: list[InputError] = []
    try:
        engines = _engines(pod, node, options, warnings)
    except InputError as fault:
        effect: Effect = "waiting" if fault.where == _ADDRESS else "left out"
        return PodReading(findings=(_finding(name, effect, fault.where, fault.what, fault.hint),))
    if not engines:
        return PodReading()
    return PodReading(
        engines, tuple(_finding(name, "warning", warning.where, warning.what, warning.hint) for warning in warnings)
    )


_ADDRESS = "status.podIP"


def _finding(pod: str, effect: Effect, field: str, what: str, hint: str = "") -> PodFinding:
    return PodFinding(pod=pod, effect=effect, field=field, what=what, hint=hint)


def _engines(
    pod: KubePod, node: KubeNode | None, options: PodReadSpec, warnings: list[InputError]
) -> tuple[Discovered, ...]:
    source = replace(source_of(pod), ports=options.ports)
    role = role_of(source, options.selected, warnings)
    if role is None:
        return ()
    if not pod.status.pod_ip:
        raise InputError("the pod has no address yet", where=_ADDRESS)
    if node is None and options.nodes_known:
        hint = "let the gateway list nodes (RBAC), or wait for the node"
        warnings.append(InputError(f"node {pod.spec.node_name!r} is not known", where="spec.nodeName", hint=hint))
    addresses, ranks = addresses_of(source, role, warnings)
    tp, pp = shards_of(source)
    base = f"{pod.metadata.namespace}.{pod.metadata.name}"
    engines = (
        Discovered(
            name=fitting(base if len(addresses) == 1 else f"{base}_{port}"),
            uid=f"{pod.metadata.uid}-{pod.restarts(source.container.name)}",
            role=role,
            endpoint=endpoint,
            place=place_of(pod.spec.node_name, node.labels if node else {}, pod.labels, options.levels),
            model=model_of(source),
            tp=tp,
            pp=pp,
            timing=pod.value(TIMING),
            ready=pod.ready,
        )
        for port, endpoint in addresses.items()
    )
    split = (rank for engine in engines for rank in discovered_ranks(engine, ranks))
    return tuple(msgspec.structs.replace(rank, name=fitting(rank.name)) for rank in split)
