"""Settings and cluster files without their secrets, for people, pages and logs.

A setting is a secret if its type says so: `Meta(extra={"secret": True})`, as in `amounts.Secret` and `keys.KeyHash`.
If the type is unknown, the name of the value decides. Hashes of keys, and passwords and queries in URLs, are removed
everywhere.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

from kvroute.serve.config.settings import SECTION, GatewaySettings
from kvroute.topology.schema import yaml_text
from kvroute_engine.files.document import read_plain
from kvroute_engine.files.units import quantity_text
from kvroute_engine.origins import STRUCK, without_url_secrets

_SECRET_NAME = re.compile(r"token|secret|password|hash|authorization|(^|_)keys?(_|$)", re.IGNORECASE)
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def redacted(value: object) -> Any:
    """Return plain values without secrets, from a Struct or plain values; sizes and durations are text with a unit."""
    known = inspect.type_info(type(value)) if isinstance(value, msgspec.Struct) else None
    return _redacted(msgspec.to_builtins(value, enc_hook=quantity_text), known, secret=False)


def redacted_file(text: str, source: str) -> str:
    """Return a cluster file's text without secrets and comments; it parses to the same cluster. `source` names it in
    errors.

    Raises:
        InputErrors: the text is not a cluster file.
    """
    plain = read_plain(text, source)
    if SECTION in plain:
        plain[SECTION] = _redacted(plain[SECTION], inspect.type_info(GatewaySettings), secret=False)
    return yaml_text(plain)


def is_secret(known: inspect.Type) -> bool:
    """Whether a setting of this type is a secret, in any of its forms."""
    if isinstance(known, inspect.Metadata):
        return bool((known.extra or {}).get("secret")) or is_secret(known.type)
    if isinstance(known, inspect.UnionType):
        return any(is_secret(alternative) for alternative in known.types)
    return False


def names_secret(name: str) -> bool:
    """Whether a setting is a secret by its name."""
    return bool(_SECRET_NAME.search(name))


def _redacted(value: Any, known: inspect.Type | None, secret: bool) -> Any:
    """Args: `known` is the type of the value, None if unknown; `secret`: whether its name marks it as a secret."""
    if known is not None and value is not None and is_secret(known):
        return STRUCK
    match value:
        case dict():
            fields, others = _fields(known), _items(known)
            return {
                name: _redacted(held, fields.get(name, others), names_secret(str(name))) for name, held in value.items()
            }
        case list() | tuple():
            return [_redacted(held, _items(known), secret) for held in value]
        case str() if value and ((secret and known is None) or value.startswith("sha256:")):
            return STRUCK
        case str() if _URL.match(value):
            return without_url_secrets(value)
        case _:
            return value


def _forms(known: inspect.Type | None) -> list[inspect.Type]:
    """Return the alternatives of a type."""
    if isinstance(known, inspect.Metadata):
        return _forms(known.type)
    if isinstance(known, inspect.UnionType):
        return [form for alternative in known.types for form in _forms(alternative)]
    return [] if known is None else [known]


def _fields(known: inspect.Type | None) -> dict[str, inspect.Type]:
    """Return the types of a Struct's fields, by their names in a file."""
    structs = [form for form in _forms(known) if isinstance(form, inspect.StructType)]
    return {field.encode_name: field.type for struct in structs for field in struct.fields}


def _items(known: inspect.Type | None) -> inspect.Type | None:
    """Return the type of a collection's items."""
    for form in _forms(known):
        if isinstance(form, inspect.DictType):
            return form.value_type
        if isinstance(form, inspect.ListType | inspect.VarTupleType):
            return form.item_type
    return None
