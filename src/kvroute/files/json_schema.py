"""JSON Schema of a file that users write, for editors that complete keys and mark errors.

msgspec's own generator cannot write defaults that have a unit.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as types

from kvroute_engine.files.units import Quantity, quantity_text

Schema: TypeAlias = dict[str, Any]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_LENGTHS = {"min_length": ("minLength", "minItems"), "max_length": ("maxLength", "maxItems")}


def file_json_schema(kind: type[msgspec.Struct], title: str, sections: Mapping[str, type[msgspec.Struct]]) -> Schema:
    """Return the schema of a file as plain values.

    Args:
        kind: the type of the whole file.
        title: what the file is.
        sections: the types of top-level mappings that `kind` leaves open, by key; other open mappings may hold any
            value.
    """
    definitions: dict[str, Schema] = {}
    root = _schema(types.type_info(kind), definitions)
    name = root["$ref"].rpartition("/")[2]
    for key, section in sections.items():
        definitions[name]["properties"][key] = _schema(types.type_info(section), definitions)
    return {"$schema": _DIALECT, "title": title, **definitions.pop(name), "$defs": definitions}


def _schema(kind: types.Type, definitions: dict[str, Schema]) -> Schema:
    match kind:
        case types.Metadata():
            extra = kind.extra_json_schema or {}
            return dict(extra) if "anyOf" in extra else _schema(kind.type, definitions) | extra
        case types.StructType():
            return _reference(kind, definitions)
        case types.CustomType():
            assert issubclass(kind.cls, Quantity), kind.cls
            return quantity_schema(kind.cls)
        case types.UnionType():
            return {"anyOf": [_schema(choice, definitions) for choice in kind.types]}
        case types.LiteralType():
            return {"enum": list(kind.values)}
        case types.NoneType():
            return {"type": "null"}
        case types.BoolType():
            return {"type": "boolean"}
        case types.IntType():
            return {"type": "integer"} | _limits(kind)
        case types.FloatType():
            return {"type": "number"} | _limits(kind)
        case types.StrType():
            return {"type": "string"} | _limits(kind)
        case types.ListType():
            return {"type": "array", "items": _schema(kind.item_type, definitions)} | _limits(kind)
        case types.DictType():
            keys, values = _schema(kind.key_type, definitions), _schema(kind.value_type, definitions)
            return {"type": "object", "propertyNames": keys, "additionalProperties": values}
        case types.AnyType():
            return {}
    raise AssertionError(kind)


def _reference(kind: types.StructType, definitions: dict[str, Schema]) -> Schema:
    name = kind.cls.__name__
    if name not in definitions:
        definitions[name] = {}  # a struct may contain itself
        definitions[name] = _mapping(kind, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _mapping(kind: types.StructType, definitions: dict[str, Schema]) -> Schema:
    texts = attribute_docstrings(kind.cls)
    properties = {}
    if kind.tag_field is not None:
        properties[kind.tag_field] = {"const": kind.tag}
    for field in kind.fields:
        entry = _schema(field.type, definitions)
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        if default is not NODEFAULT:
            entry |= {"default": msgspec.to_builtins(default, enc_hook=quantity_text)}
        if field.name in texts:
            entry |= {"description": " ".join((texts[field.name], entry.get("description", ""))).strip()}
        properties[field.encode_name] = entry
    required = [field.encode_name for field in kind.fields if field.required]
    if kind.tag_field is not None:
        required.insert(0, kind.tag_field)
    return {
        "type": "object",
        "description": inspect.cleandoc(kind.cls.__doc__ or ""),
        "properties": properties,
        "required": required,
        "additionalProperties": not kind.forbid_unknown_fields,
    }


def quantity_schema(kind: type[Quantity]) -> Schema:
    """Return the schema of a text with a unit."""
    units = "|".join(re.escape(unit) for unit in kind.units if unit)
    return {
        "type": "string",
        "pattern": rf"^\s*[+]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{{1,3}})?\s*({units})\s*$",
        "examples": [kind.example],
        "description": f"A {kind.noun}, {kind.range_text}; units: {kind.accepted}.",
    }


def _limits(kind: types.IntType | types.FloatType | types.StrType | types.ListType) -> Schema:
    found: Schema = {name: getattr(kind, attribute, None) for attribute, name in _BOUNDS.items()}
    position = 1 if isinstance(kind, types.ListType) else 0
    found |= {names[position]: getattr(kind, attribute, None) for attribute, names in _LENGTHS.items()}
    if isinstance(kind, types.StrType) and kind.pattern is not None:
        found["pattern"] = kind.pattern.replace(r"\Z", "$")  # JavaScript, which editors use, has no \Z
    return {name: value for name, value in found.items() if value is not None}


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the string below each attribute of a Struct, inherited ones included; Python itself does not store it."""
    # A class that a decorator has made (`with_units`) has the name of the class in the source, its base.
    classes = {base.__qualname__: base for base in kind.__mro__ if issubclass(base, msgspec.Struct)}
    texts = {}
    for base in reversed(classes.values()):
        if base is msgspec.Struct:
            continue
        body = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
    return texts
