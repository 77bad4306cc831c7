"""What a constraint would do to discovered engines, beside the router's own mask, and the report's sentences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kube.discovery.places import DEFAULT_LEVELS
from kvroute.kube.discovery.pods import PodFinding, PodReading
from kvroute.kube.preflight.check import CheckReport, LevelReport, check_report
from kvroute.policies import Level, TopologyConstraint, prefill_mask
from kvroute.topology import parse
from kvroute.types import Endpoint, KvProtocol, Role
from kvroute.types.discovered import Discovered, Place

NIC = "nics: {compute: {count: 8, capacity: 100 Gbps}}"
LEVEL = st.sampled_from(["node", "rack", "pod", "datacenter"])


def engine(name: str, role: Role, place: Place, protocol: KvProtocol = "vllm", model: str = "m") -> Discovered:
    endpoint = Endpoint(url=f"http://10.0.0.1:8{name[1:]}", protocol=protocol)
    return Discovered(name=name, uid=name, role=role, endpoint=endpoint, place=place, model=model)


@st.composite
def engine_sets(draw: st.DrawFn) -> list[Discovered]:
    """Return prefill and decode engines on nodes of which each has some of its labels."""
    sites = draw(st.booleans())
    places = []
    for number in range(draw(st.integers(1, 5))):
        site = draw(st.sampled_from(["d1", "d2"])) if sites else ""
        pod = f"{site}p{draw(st.integers(0, 1))}" if draw(st.booleans()) else ""
        rack = f"{pod or site}r{draw(st.integers(0, 1))}" if draw(st.booleans()) else ""
        places.append(Place(node=f"n{number}", rack=rack, pod=pod, datacenter=site))
    more: list[Role] = draw(st.lists(st.sampled_from(["prefill", "decode"]), max_size=5))
    roles: list[Role] = ["prefill", "decode", *more]
    return [engine(f"e{number}", role, draw(st.sampled_from(places))) for number, role in enumerate(roles)]


def cluster_file(engines: list[Discovered]) -> str:
    """Return a cluster file with these engines."""
    places = list(dict.fromkeys(engine.place for engine in engines))
    sites = sorted({place.datacenter for place in places} - {""})
    lines = ["name: test"]
    lines += ["datacenters: [" + ", ".join(f"{{name: {site}}}" for site in sites) + "]"] if sites else []
    racks = {place.rack: place for place in places if place.rack}
    pods = {place.pod: place for place in places if place.pod}
    up = "uplinks: {count: 1, capacity: 100 Gbps}"

    def parent(place: Place, *kinds: str) -> str:
        return next((f", {kind}: {getattr(place, kind)}" for kind in kinds if getattr(place, kind)), "")

    if pods:
        lines += ["pods:", *(f"- {{name: {name}, {up}{parent(at, 'datacenter')}}}" for name, at in pods.items())]
    if racks:
        above = {name: parent(at, "pod", "datacenter") for name, at in racks.items()}
        lines += ["racks:", *(f"- {{name: {name}, {up}{text}}}" for name, text in above.items())]
    lines += ["nodes:"]
    lines += [f"- {{name: {at.node}, gpus: 8, {NIC}{parent(at, 'rack', 'pod', 'datacenter')}}}" for at in places]
    if len(sites) == 2:
        lines.append("wan: [{from: d1, to: d2, capacity: 10 Gbps}]")
    lines += ["defaults: {model: llama-3-70b, timing: t}"]
    lines += [
        "timing: {t: {prefill: {kind: linear, per_token: 1ms}, decode: {base: 10ms, per_request: 1ms}}}",
        "instances:",
    ]
    used = dict.fromkeys((at.node for at in places), 0)
    for engine in engines:
        gpu = used[engine.place.node]
        used[engine.place.node] += 1
        lines.append(
            f'- {{name: {engine.name}, role: {engine.role}, gpus: "{engine.place.node}:{gpu}", kv_capacity: 10 GB}}'
        )
    return "\n".join(lines)


@given(engine_sets(), LEVEL)
def test_stranded_engines_are_those_that_the_router_masks(engines: list[Discovered], level: Level) -> None:
    """The same engines in a cluster file, and the same constraint."""
    cluster = parse(cluster_file(engines))
    roles = {instance.name: (index, instance.role) for index, instance in enumerate(cluster.instances)}
    prefill = np.array([index for index, role in roles.values() if role == "prefill"], dtype=np.int64)
    decode = np.array([index for index, role in roles.values() if role == "decode"], dtype=np.int64)
    mask = prefill_mask(TopologyConstraint(level), cluster.tier, prefill, decode)
    masked = {cluster.instances[index].name for index, kept in zip(prefill, mask, strict=True) if not kept}
    assert set(one(check_report(PodReading(tuple(engines)), DEFAULT_LEVELS), level).stranded) == masked


def one(report: CheckReport, level: Level) -> LevelReport:
    """The report on one level."""
    return next(reported for reported in report.levels if reported.level == level)


def test_engines_of_other_protocols_and_models_do_not_count() -> None:
    """They cannot take each other's KV caches."""
    place = Place(node="n", rack="r")
    for other in (engine("e1", "decode", place, "mooncake"), engine("e1", "decode", place, model="other")):
        report = check_report(PodReading((engine("e0", "prefill", place), other)), DEFAULT_LEVELS)
        assert one(report, "rack").stranded == ("e0",)
        assert one(report, "rack").unreached == ("e1",)
        assert report.faults == (
            "e0: no decode engine has its model and protocol",
            "e1: no prefill engine has its model and protocol",
        )
        constrained = check_report(PodReading((engine("e0", "prefill", place), other)), DEFAULT_LEVELS, "rack")
        assert constrained.faults == report.faults


def test_what_the_owner_should_change() -> None:
    """Only what the constraint concerns; a pod that starts is no fault."""
    engines = (
        engine("e0", "prefill", Place(node="n0", rack="r0")),
        engine("e1", "decode", Place(node="n1", rack="r1")),
        engine("e2", "decode", Place(node="n2")),
    )
    waiting = PodFinding(pod="llm/x", effect="waiting", field="status.podIP", what="the pod has no address yet")
    left_out = PodFinding(
        pod="llm/y", effect="left out", field="kvroute.io/role", what="unknown role 'x'", hint="fix it"
    )
    reading = PodReading(engines, (waiting, left_out))
    assert check_report(reading, DEFAULT_LEVELS).faults == ("llm/y: kvroute.io/role: unknown role 'x'; fix it",)
    assert check_report(PodReading(engines, (waiting,)), DEFAULT_LEVELS).faults == ()
    assert check_report(PodReading(engines), DEFAULT_LEVELS, "rack").faults == (
        "node n2: it has no rack, so rack:required excludes its engines; "
        "label it with kvroute.io/rack, nvidia.com/rack or another label of the rack",
        "e0: no decode engine is in its rack, so rack:required gives it no requests",
    )
    assert check_report(PodReading(engines), DEFAULT_LEVELS, "datacenter").faults == ()


def test_an_engine_without_a_model() -> None:
    """Serves only with a model in the cluster file."""
    engines = (engine("e0", "prefill", Place(node="n0"), model=""), engine("e1", "decode", Place(node="n0"), model=""))
    faults = check_report(PodReading(engines), DEFAULT_LEVELS).faults
    assert [sentence.partition(":")[0] for sentence in faults] == ["e0", "e1"]
    assert "names its model" in faults[0]
    assert "kvroute.io/model" in faults[0]


def test_a_node_outside_all_datacenters() -> None:
    """Is worth a label only if other nodes have one."""
    here, nowhere = Place(node="n0", datacenter="z1"), Place(node="n1")
    report = check_report(
        PodReading((engine("e0", "prefill", here), engine("e1", "decode", nowhere))), DEFAULT_LEVELS, "datacenter"
    )
    assert [sentence.partition(":")[0] for sentence in report.faults] == ["node n1", "e0"]


def test_nothing_found() -> None:
    """Is a finding."""
    faults = check_report(PodReading(), DEFAULT_LEVELS, nodes_failure="nodes is forbidden").faults
    assert faults == (
        "nodes is forbidden; places come from labels of pods alone",
        "no pod is an engine; see docs/kubernetes-labels.md for the labels",
    )
