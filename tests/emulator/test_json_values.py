"""Values under JSON schemas: each is valid, as another implementation of JSON schema says."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.emulator.errors import ApiError
from kvroute.emulator.generation.json_values import json_text
from kvroute.emulator.generation.patterns import matching_text
from kvroute.emulator.generation.words import Draws

SEEDS = st.integers(0, 2**64 - 1)
NAMES = st.sampled_from(["a", "b", "name", "size"])
STRINGS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.tuples(st.integers(0, 9), st.integers(9, 40)).map(lambda ends: {"minLength": ends[0], "maxLength": ends[1]}),
    st.sampled_from(["date-time", "date", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "unknown"]).map(
        lambda name: {"format": name}
    ),
    st.sampled_from([r"^[A-Z]{2}-\d+$", r"a(b|c)*d?", r"^(?:x[^x]){2,}$", r"[\w.]+@\w+"]).map(
        lambda pattern: {"pattern": pattern}
    ),
).map(lambda bounds: {"type": "string", **bounds})
WHOLE = st.integers(-1000, 1000)
NUMBERS: st.SearchStrategy[dict[str, Any]] = st.tuples(
    st.sampled_from(["integer", "number"]),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    WHOLE,
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.integers(30, 90),
    st.sampled_from([{}, {"multipleOf": 5}, {"multipleOf": 2.5}]),
).map(lambda parts: {"type": parts[0], parts[1]: parts[2], parts[3]: parts[2] + parts[4], **parts[5]})
PLAIN = st.one_of(
    STRINGS,
    NUMBERS,
    st.just(True),
    st.just({}),
    st.just({"type": ["null", "boolean"]}),
    st.lists(st.one_of(st.none(), st.integers(0, 3), st.text(max_size=3)), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.integers(0, 9).map(lambda value: {"const": value}),
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, inner, max_size=3)
    objects = st.tuples(properties, st.lists(NAMES, max_size=2, unique=True), st.booleans()).map(
        lambda parts: {
            "type": "object",
            "properties": parts[0],
            "required": [name for name in parts[1] if name in parts[0] or parts[2]],
            "additionalProperties": parts[2],
        }
    )
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(2, 4)).map(
        lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[2]}
    )
    pairs = st.lists(inner, min_size=1, max_size=2).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    any_of = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(objects, arrays, pairs, any_of)


SCHEMAS = st.recursive(PLAIN, composed, max_leaves=6)
TREE: dict[str, Any] = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "left": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                "others": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["name", "left", "others"],
            "additionalProperties": False,
        }
    },
}
EXAMPLES: dict[str, Any] = {
    "recursive": TREE,
    "joined": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"properties": {"a": {"type": "number", "maximum": 4}, "b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    "stricter bounds": {
        "allOf": [
            {"type": "integer", "minimum": 3, "maximum": 90},
            {"type": "number", "minimum": 80, "maximum": 200},
        ]
    },
    "reference with siblings": {
        "$ref": "#/$defs/x",
        "maxLength": 2,
        "$defs": {"x": {"type": "string", "minLength": 2}},
    },
    "mapping": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
    "mapping of names": {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "minProperties": 2},
    "patterns of names": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}},
        "required": ["x1", "y"],
        "maxProperties": 2,
    },
    "different items": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True},
    "between two numbers": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "cents": {"type": "number", "multipleOf": 0.01, "minimum": 0.1, "maximum": 0.3},
    "kinds": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")
        ]
    },
}


@given(SCHEMAS, SEEDS)
def test_a_value_is_valid_under_its_schema(schema: Any, seed: int) -> None:
    jsonschema_rs.validate(schema, json.loads(json_text(schema, Draws(seed))))


@pytest.mark.parametrize("schema", EXAMPLES.values(), ids=EXAMPLES)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_examples_get_valid_values(schema: Any, seed: int) -> None:
    jsonschema_rs.validate(schema, json.loads(json_text(schema, Draws(seed))))


def test_values_differ_and_follow_from_the_seed() -> None:
    texts = [json_text({"type": "string"}, Draws(seed)) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        pytest.param({"not": {}}, "`not`", id="unsupported"),
        pytest.param({"type": "float"}, "'float'", id="unknown-type"),
        pytest.param({"$ref": "#/$defs/none"}, "#/$defs/none", id="missing-reference"),
        pytest.param({"$ref": "other.json"}, "outside", id="foreign-reference"),
        pytest.param({"$ref": "#"}, "no value", id="endless"),
        pytest.param({"type": "integer", "minimum": 2, "maximum": 1}, "within its bounds", id="no-number"),
        pytest.param({"allOf": [{"type": "string"}, {"type": "null"}]}, "no type in common", id="no-type"),
        pytest.param({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "deeply", id="without-end"),
        pytest.param({"properties": 3}, "not valid", id="broken"),
        pytest.param({"type": "string", "pattern": "("}, "regular expression", id="broken-pattern"),
        pytest.param({"type": "string", "pattern": "^a$", "minLength": 2}, "no text", id="no-string"),
        pytest.param(3, "not a JSON schema", id="number"),
    ],
)
def test_other_schemas_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(ApiError, match=re.escape(words)):
        json_text(schema, Draws(1))


@given(
    st.sampled_from([r"\d{3}-(?<x>\w)\1", r"(?i)yes|no", r"[^\W\d]+\.", r"(a|b){2}?c*", r"é+", r"(?!aa)[ab]{2}"]), SEEDS
)
def test_a_text_matches_its_pattern(pattern: str, seed: int) -> None:
    assert re.fullmatch(pattern.replace("(?<x>", "(?P<x>"), matching_text(pattern, Draws(seed)))
