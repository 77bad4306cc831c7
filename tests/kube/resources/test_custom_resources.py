"""Custom resources: their definitions, types and CEL rules agree, and errors name the field and the fix."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import cel
import jsonschema_rs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.kube.resources.router_examples import Manifest, constrained, router, topology

from kvroute.kube.resources import ClusterTopologySpec, KvRouterSpec, place_of, read_grove_levels, read_spec
from kvroute.kube.resources.crd import RULES, definition_text, definitions
from kvroute.types import InputError

ROOT = Path(__file__).resolve().parents[3]
KINDS: dict[str, type] = {"ClusterTopology": ClusterTopologySpec, "KvRouter": KvRouterSpec}
FULL = router(
    image="registry.example/kvroute:1",
    imagePullSecrets=["pull"],
    replicas=3,
    policy="netkv",
    kvCacheTransferTopology={"level": "rack", "clusterTopologyName": "cluster", "kvTransferWeight": 2.5},
    network={
        "latency": {"rack": "3 us"},
        "tierBandwidth": {"wan": "10 Gbps"},
        "node": {"gpus": 4, "nvlink": "900 GB/s", "nics": {"compute": {"capacity": "200 Gbps", "scope": "server"}}},
        "rack": {"uplinks": {"capacity": "400 Gbps"}},
        "pod": {"uplinks": {"count": 8, "capacity": "400 Gbps"}},
    },
    defaults={"tp": 8, "batchMax": 32, "kvCapacity": "300 GB", "timing": "fast"},
    timing={
        "fast": {
            "prefill": {"kind": "quadratic", "base": "1 ms", "perToken": "9 us", "perToken2": "1 ns"},
            "decode": {"base": "8 ms", "perContextToken": "1 ns"},
        },
        "measured": {
            "prefill": {"kind": "piecewise", "tokens": [1, 100], "times": ["1 ms", "9 ms"]},
            "decode": {"base": "8 ms"},
        },
    },
    ports={"client": 8000},
    resources={"requests": {"cpu": 2, "memory": "1Gi"}},
    nodeSelector={"kubernetes.io/os": "linux"},
    keysSecretRef={"name": "keys"},
    drainSeconds=30,
    gateway={"retries": {"share": 0.1}},
    monitoring=False,
)
QUADRATIC = {"kind": "quadratic", "perToken": "1 us"}
PIECEWISE = {"kind": "piecewise", "tokens": [1, 2], "times": ["1 s"]}
QOS = topology() | {
    "spec": {
        "levels": [
            {
                "domain": "rack",
                "labelKey": "r",
                "place": "rack",
                "networkQoS": {"bandwidth": "1 Gbps", "latency": "1 us"},
            }
        ]
    }
}
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["rack", "Rack!", "fail", "10 Gbps", "3 us", "fast", "", "kvroute", 0, -1, 1, 2.5, 8080, 70000]),
    st.booleans(),
    st.lists(st.sampled_from(["a", "B"]), max_size=2),
    st.dictionaries(st.sampled_from(["a", "rack"]), st.sampled_from(["b", "1 us", 1]), max_size=2),
)


@functools.cache
def _schema(kind: str) -> dict[str, Any]:
    [found] = [item for item in definitions() if item["spec"]["names"]["kind"] == kind]
    schema: dict[str, Any] = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _pruned(value: Any, schema: dict[str, Any]) -> Any:
    """Remove unknown fields, as the API server does."""
    if isinstance(value, dict) and "properties" in schema and isinstance(schema["properties"], dict):
        known = schema["properties"]
        return {name: _pruned(item, known[name]) for name, item in value.items() if name in known}
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return {name: _pruned(item, schema["additionalProperties"]) for name, item in value.items()}
    if isinstance(value, list) and "items" in schema:
        return [_pruned(item, schema["items"]) for item in value]
    return value


def _defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """Fill in defaults, as the API server does."""
    if isinstance(value, dict) and isinstance(schema.get("properties"), dict):
        filled = dict(value)
        for name, part in schema["properties"].items():
            if name not in filled and "default" in part:
                filled[name] = copy.deepcopy(part["default"])
            if name in filled:
                filled[name] = _defaulted(filled[name], part)
        return filled
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return {name: _defaulted(item, schema["additionalProperties"]) for name, item in value.items()}
    if isinstance(value, list) and "items" in schema:
        return [_defaulted(item, schema["items"]) for item in value]
    return value


def _schemas(schema: Any) -> list[Any]:
    """Return a schema and all its parts."""
    parts = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    return [schema, *(inner for part in parts if isinstance(part, dict) for inner in _schemas(part))]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in children:
        found += _places(item, (*path, key))
    return found


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return changed


def broken_rules(manifest: Manifest) -> list[str]:
    """Return the messages of all CEL rules that an object breaks."""
    kind = manifest["kind"]
    found = []
    for path, rules in RULES[kind].items():
        value = _defaulted(manifest, _schema(kind))
        for name in path:
            value = value.get(name) if value is not None else None
        found += [
            rule["message"] for rule in rules if value is not None and not cel.evaluate(rule["rule"], {"self": value})
        ]
    return found


@given(example=st.sampled_from([FULL, QOS]), data=st.data())
def test_the_schema_accepts_what_the_types_accept(example: Manifest, data: st.DataObject) -> None:
    """One value of a complete object is replaced by an arbitrary one. Names of labels are checked by the types only."""
    kind = example["kind"]
    places = [
        path
        for path in _places(example["spec"])
        if not {"matchLabels", "nodeSelector", "gateway", "requests"} & set(path)
    ]
    spec = _replaced(example["spec"], data.draw(st.sampled_from(places)), data.draw(VALUES))
    schema = _schema(kind)["properties"]["spec"]
    try:
        read_spec({"spec": _pruned(spec, schema)}, KINDS[kind])
        fits = True
    except InputError:
        fits = False
    assert jsonschema_rs.is_valid(schema, spec) == fits


@pytest.mark.parametrize("example", [FULL, QOS, router(), topology()])
def test_defaults_of_the_server_change_nothing(example: Manifest) -> None:
    """The operator reads the same from an object with and without the server's defaults."""
    spec = _defaulted(example["spec"], _schema(example["kind"])["properties"]["spec"])
    assert read_spec({"spec": spec}, KINDS[example["kind"]]) == read_spec(example, KINDS[example["kind"]])


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_complete(kind: str) -> None:
    """The API server checks a default, also by CEL rules, before it fills in the defaults of its parts."""
    defaults = [part for part in _schemas(_schema(kind)) if "default" in part]
    for part in defaults:
        assert jsonschema_rs.is_valid(part, part["default"])
        assert _defaulted(part["default"], part) == part["default"]
        rules = part.get("x-kubernetes-validations", [])
        assert all(cel.evaluate(rule["rule"], {"self": part["default"]}) for rule in rules)
    assert kind == "ClusterTopology" or len(defaults) > 40


def test_the_installed_definitions_are_those_of_the_types() -> None:
    """deploy/crds is what `kubectl apply` and the chart install."""
    for definition in definitions():
        path = ROOT / "deploy/crds" / f"{definition['metadata']['name']}.yaml"
        assert path.read_text(encoding="utf-8") == definition_text(definition)
        assert yaml.safe_load(path.read_text(encoding="utf-8")) == definition


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_structural(kind: str) -> None:
    """The API server rejects references, nodes without a type, and properties beside additionalProperties."""
    nodes = [_schema(kind)]
    while nodes:
        node = nodes.pop()
        assert "$ref" not in node
        assert not {"properties", "additionalProperties"} <= node.keys()
        assert node.get("x-kubernetes-int-or-string") or node["type"] in {
            "object",
            "array",
            "string",
            "integer",
            "number",
            "boolean",
        }
        assert node.get("type") != "array" or node["items"]
        for rule in node.get("x-kubernetes-validations", []):
            assert not any("\n" in text for text in rule.values())
            assert rule["message"]
        nodes += node.get("properties", {}).values()
        nodes += [part for part in (node.get("items"), node.get("additionalProperties")) if part]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (topology(zone="a", rack="a"), "same labelKey"),
        (constrained(label="x/y"), "exclude each other"),
        (constrained(clusterTopologyName=None), "set clusterTopologyName"),
        (constrained(place="rack"), "place is only for label"),
        (router(ports={"client": 9090}), "same port"),
        (router("2chat"), "begin it with a letter"),
        (router("c" * 56), "at most 55 letters"),
        (router(defaults={"timing": "slow"}), "add the entry"),
        (router(timing={"default": {"prefill": {}, "decode": {"base": "1 ms"}}}), "needs perToken; add it"),
        (
            router(timing={"default": {"prefill": QUADRATIC, "decode": {"base": "1 ms"}}}),
            "needs perToken2; add it",
        ),
        (
            router(timing={"default": {"prefill": PIECEWISE, "decode": {"base": "1 ms"}}}),
            "give one time for each",
        ),
    ],
)
def test_cel_rules_refuse(manifest: Manifest, message: str) -> None:
    """Each rule has one object that breaks it and no other."""
    assert [message in broken for broken in broken_rules(manifest)] == [True]


def test_two_levels_of_one_name_break_a_rule() -> None:
    levels = [{"domain": "a", "labelKey": "x"}, {"domain": "a", "labelKey": "y"}]
    [broken] = broken_rules(topology() | {"spec": {"levels": levels}})
    assert "same domain" in broken


@pytest.mark.parametrize(
    "manifest",
    [FULL, QOS, router(), topology(), constrained(), constrained(label="a", clusterTopologyName=None)],
)
def test_cel_rules_accept(manifest: Manifest) -> None:
    assert broken_rules(manifest) == []


@pytest.mark.parametrize(
    ("manifest", "field", "fix"),
    [
        (router(polcy="netkv"), "spec.polcy", "did you mean 'policy'?"),
        (constrained(kvTransferWeight=-1), "spec.kvCacheTransferTopology.kvTransferWeight", "from 0 to"),
        (constrained(mismatchPolicy="maybe"), "spec.kvCacheTransferTopology.mismatchPolicy", "one of fail, fallback"),
        (router(network={"latency": {"rack": 3}}), "spec.network.latency.rack", "such as 3 us"),
        (router(ports={"client": 80}), "spec.ports.client", "from 1024 to 65535"),
        (router(model=None), "spec", "add `model: ...`"),
        ({"kind": "KvRouter"}, "", "add `spec: ...`"),
    ],
)
def test_errors_name_the_field_and_the_fix(manifest: Manifest, field: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        read_spec(manifest, KvRouterSpec)
    [problem] = caught.value.problems  # type: ignore[attr-defined]
    assert problem.where == field
    assert fix in str(problem)
    assert "\n" not in str(problem)


def test_lists_have_a_length() -> None:
    with pytest.raises(InputError, match=r"^spec.levels: there are 0 entries; write 1 to 8$"):
        read_spec({"spec": {"levels": []}}, ClusterTopologySpec)


def test_levels_have_a_place_in_the_network_model() -> None:
    """The usual names need no `place`; another name needs one."""
    spec = read_spec(topology(zone="a", block="b", rack="c", host="d", hall="e"), ClusterTopologySpec)
    assert [place_of(level) for level in spec.levels] == ["datacenter", "pod", "rack", "node", None]


def test_grove_topologies_are_read_by_both_names_of_the_key() -> None:
    """Grove's ClusterTopologyBinding has `key`; the older ClusterTopology has `labelKey`."""
    levels = [{"domain": "zone", "key": "k8s/zone"}, {"domain": "rack", "labelKey": "k8s/rack"}]
    spec = read_grove_levels({"spec": {"levels": levels, "other": 1}})
    assert [(level.domain, level.label_key) for level in spec.levels] == [("zone", "k8s/zone"), ("rack", "k8s/rack")]
    with pytest.raises(InputError, match=r"spec.levels\[0\]"):
        read_grove_levels({"spec": {"levels": [{"domain": "zone"}]}})


def test_examples_are_json() -> None:
    """Manifests of the tests are what a client can send."""
    assert json.loads(json.dumps([FULL, QOS])) == [FULL, QOS]
