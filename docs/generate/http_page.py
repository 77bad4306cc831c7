"""The gateway's HTTP API as Markdown, from the OpenAPI document that it serves."""

from __future__ import annotations

import json
from typing import Any

from kvroute import __version__
from kvroute.serve.api.openapi import Schema, document

_SHOWN_BODIES = ("CompletionRequest", "ChatRequest", "Model", "Error")


def openapi_text() -> str:
    """The document itself, as JSON."""
    return json.dumps(document(__version__), indent=2) + "\n"


def http_markdown() -> str:
    """A table of paths, the statuses of errors, and the fields of each body that the gateway checks."""
    api = document(__version__)
    schemas = api["components"]["schemas"]
    lines = [
        "[The document of this version](openapi.json)",
        "",
        "## Paths",
        "",
        "| Method and path | Answer | Body | Errors |",
        "|---|---|---|---|",
    ]
    for path, operations in api["paths"].items():
        lines += [_path_row(path, verb, operations[verb]) for verb in ("get", "post") if verb in operations]
    lines += ["", "## Errors", "", "| Status | Meaning |", "|---|---|"]
    lines += [
        f"| {name.removeprefix('Error')} | {response['description']}{_headers(response)} |"
        for name, response in api["components"]["responses"].items()
    ]
    for name in _SHOWN_BODIES:
        lines += ["", f"## {name}", "", *_fields(schemas[name])]
    return "\n".join(lines)


def _path_row(path: str, verb: str, operation: Schema) -> str:
    answers = operation["responses"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    errors = ", ".join(status for status in answers if status != "200")
    return f"| `{verb.upper()} {path}` | {answers['200']['description']} | {_kind(body) if body else ''} | {errors} |"


def _headers(response: Schema) -> str:
    names = ", ".join(f"`{name}`" for name in response.get("headers", {}))
    return f" Header {names}." if names else ""


def _fields(schema: Schema) -> list[str]:
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_kind(field)} | {'yes' if name in required else ''} | {_bounds(field)} |"
        for name, field in schema["properties"].items()
    ]
    head = ["| Field | Type | Required | Bounds |", "|---|---|---|---|"]
    return [*([schema["description"], ""] if "description" in schema else []), *head, *rows]


def _kind(field: Schema) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if name in _SHOWN_BODIES else "object, passed on as it is"
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(choice) for choice in field["anyOf"]))
    kinds: Any = field.get("type", "any")
    if kinds == "array":
        return f"array of {_kind(field['items'])}" if "items" in field else "array"
    if kinds == "object" and "properties" in field:
        return f"object ({', '.join(f'`{name}`' for name in field['properties'])})"
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def _bounds(field: Schema) -> str:
    names = {"minimum": "at least", "maximum": "at most", "minLength": "length at least", "minItems": "items at least"}
    return ", ".join(f"{words} {field[name]:,}" for name, words in names.items() if name in field)
