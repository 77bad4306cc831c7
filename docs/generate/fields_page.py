"""Every field of a cluster file as Markdown, from its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from kvroute.files.json_schema import Schema
from kvroute.planner.placement.schema import PlacementEntry
from kvroute.planner.qos.schema import QosEntry
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology.json_schema import cluster_json_schema

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "qos": QosEntry,
    "placement": PlacementEntry,
    "gateway": GatewaySettings,
}


def schema_text() -> str:
    """The JSON Schema of a cluster file."""
    return json.dumps(cluster_json_schema(_SECTIONS), indent=2) + "\n"


def fields_markdown() -> str:
    """A section for each mapping, under the path of the first place where it may stand."""
    root = cluster_json_schema(_SECTIONS)
    paths = {"": "top level"}
    sections = _sections("", root, root["$defs"], paths)
    lines = ["[The schema as a file](cluster.schema.json)"]
    for name, mapping in sections:
        lines += ["", f"## {paths[name]} {{#{_anchor(name)}}}", "", _cell(mapping["description"], "\n"), ""]
        lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
        for key, field in mapping["properties"].items():
            meanings = [root["$defs"][inner]["description"].split("\n")[0] for inner, _ in _mappings(field)]
            meaning = field.get("description") or " Or: ".join(meanings)
            lines.append(_row(key, field, meaning, key in mapping["required"], paths))
    return "\n".join(lines)


def _sections(
    name: str, mapping: Schema, definitions: dict[str, Schema], paths: dict[str, str]
) -> list[tuple[str, Schema]]:
    """A mapping and those inside it, depth first, each once; `paths` takes the first place of each."""
    found = [(name, mapping)]
    for key, field in mapping["properties"].items():
        for inner, step in _mappings(field):
            if inner not in paths:
                kind = definitions[inner]["properties"].get("kind", {}).get("const")
                path = f"{paths[name]}.{key}{step}" if name else f"{key}{step}"
                paths[inner] = f"{path} ({kind})" if kind else path
                found += _sections(inner, definitions[inner], definitions, paths)
    return found


def _mappings(field: Schema, step: str = "") -> Iterator[tuple[str, str]]:
    """The mappings inside a field, with what their path has after the key: `[]` in a list, `.NAME` under free names."""
    if "$ref" in field:
        yield _name(field), step
    for choice in field.get("anyOf", ()):
        yield from _mappings(choice, step)
    if "items" in field:
        yield from _mappings(field["items"], step + "[]")
    if isinstance(field.get("additionalProperties"), dict):
        yield from _mappings(field["additionalProperties"], step + ".NAME")


def _row(key: str, field: Schema, meaning: str, required: bool, paths: dict[str, str]) -> str:
    default = field.get("default")
    shown = "none" if default in ("", None, [], {}) else f"`{json.dumps(default, ensure_ascii=False)}`"
    shown = "required" if required else shown
    return f"| `{key}` | {_kind(field, paths)} | {shown} | {_cell(meaning, ' ')} |"


def _kind(field: Schema, paths: dict[str, str]) -> str:
    if "$ref" in field:
        name = _name(field)
        return f"[{paths[name]}](#{_anchor(name)})"
    if "anyOf" in field:
        choices = [choice for choice in field["anyOf"] if choice != {"type": "null"}]
        return " or ".join(dict.fromkeys(_kind(choice, paths) for choice in choices))
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_kind(field['items'], paths)}"
    if field.get("additionalProperties"):
        return f"names with {_kind(field['additionalProperties'], paths)}"
    bounds = [f"{sign} {field[name]:,}" for name, sign in _SIGNS.items() if name in field]
    example = f", such as `{field['examples'][0]}`" if "examples" in field else ""
    return _cell(f"{_WORDS[field['type']]}{' ' if bounds else ''}{', '.join(bounds)}{example}", " ")


_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_WORDS = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "`true` or `false`",
    "object": "mapping",
}


def _name(field: Schema) -> str:
    name: str = field["$ref"].rpartition("/")[2]
    return name


def _anchor(name: str) -> str:
    return f"mapping-{name.lower()}" if name else "top-level"


def _cell(text: str, joint: str) -> str:
    """Text for a cell: no line breaks, and no bar that ends it."""
    return joint.join(text.split("\n")).replace("|", "\\|")
