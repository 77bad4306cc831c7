"""Request bodies to objects: JSON or YAML, strict or lenient, built-in or custom, with the API server's refusals."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml
from tests.kube.apiserver import defaults, openapi
from tests.kube.apiserver.decode import Decoder, duplicates, parse_json, plain
from tests.kube.apiserver.golang import GoError, json_kind
from tests.kube.apiserver.requests import Request
from tests.kube.apiserver.resources import BUILT_IN, Resource
from tests.kube.apiserver.status import ApiError, Object, bad_request, quoted
from tests.kube.apiserver.types import METADATA, resource_type

UNKNOWN_FORMAT = "the body of the request was in an unknown format - accepted media types include: "
MEDIA_TYPES = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
BODY_MAX_BYTES = 3_145_728
KIND_STRUCT = 'struct { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string "json:\\"kind,omitempty\\"" }'
SCHEME = '"pkg/api/legacyscheme/scheme.go:30"'


class Loader(yaml.SafeLoader):
    """YAML as Go's library reads it: keys of other types become text, and a repeated key is remembered."""

    repeated: list[str]


def _mapping(loader: Loader, node: yaml.MappingNode) -> Object:
    made: Object = {}
    for key_node, value_node in node.value:
        key: Hashable = loader.construct_object(key_node, deep=True)
        name = str(key).lower() if isinstance(key, bool) else str(key)
        if name in made:
            loader.repeated.append(f'line {key_node.start_mark.line + 1}: key "{name}" already set in map')
        made[name] = loader.construct_object(value_node, deep=True)
    return made


Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:y|Y|n|N)$"), list("yYnN"))
Loader.add_constructor("tag:yaml.org,2002:bool", lambda loader, node: node.value.lower() in ("y", "yes", "on", "true"))
Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """Return a YAML value and the warnings about repeated keys; raise ApiError 400."""
    loader = Loader(text)
    loader.repeated = []
    try:
        return loader.get_single_data(), loader.repeated
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", "") or str(error)
        known = {"expected the node content, but found '}'": "did not find expected node content"}
        reason = known.get(problem, problem)
        raise bad_request(f"error decoding YAML: error converting YAML to JSON: yaml: {reason}") from None
    finally:
        loader.dispose()


def too_large(body: bytes) -> None:
    """Raise ApiError 413 for a body above the limit."""
    if len(body) > BODY_MAX_BYTES:
        text = f"Request entity too large: limit is {BODY_MAX_BYTES}"
        raise ApiError(413, "RequestEntityTooLarge", text)


def parse_object(request: Request, kind: str) -> Any:
    """Return the JSON value of a body that is to be an object of a kind; raise ApiError 400 or 415."""
    too_large(request.body)
    media = request.content_type or "application/json"
    unrecognized = f"the object provided is unrecognized (must be of type {kind}): "
    if media == "application/vnd.kubernetes.protobuf":
        text = "provided data does not appear to be a protobuf message, expected prefix [107 56 115 0] "
        shown = request.body[:30].decode(errors="replace")
        raise bad_request(f"{unrecognized}{text}({shown} ...)")
    if media not in ("application/json", "application/yaml"):
        raise ApiError(415, "UnsupportedMediaType", UNKNOWN_FORMAT + MEDIA_TYPES)
    text = request.body.decode(errors="replace")
    if media == "application/yaml":
        return parse_yaml(text)[0] or {}
    prefix = f"{unrecognized}couldn't get version/kind; json parse error: "
    try:
        value = parse_json(text)
    except GoError as error:
        raise bad_request(f"{prefix}{error} ({text or '<empty>'})") from None
    if value is not None and not isinstance(value, dict):
        problem = f"json: cannot unmarshal {json_kind(value)} into Go value of type {KIND_STRUCT}"
        raise bad_request(f"{prefix}{problem} ({request.body.hex()})")
    return value if value is not None else {}


def decode_body(request: Request, resource: Resource) -> Object:
    """Return the object in a body, with defaults; warnings go to the request. Raise ApiError."""
    value = parse_object(request, resource.kind)
    if resource.custom:
        return _custom_body(request, resource, value)
    kind, version = value.get("kind") or resource.kind, value.get("apiVersion") or resource.api_version
    if (kind, version) != (resource.kind, resource.api_version):
        raise _wrong_kind(kind, version, resource)
    try:
        return decode_value(request, resource, value, strict_prefix="strict decoding error: ")
    except GoError as error:
        raise bad_request(_handled(resource.kind, resource.version, resource.kind, str(error))) from None


def _handled(kind: str, version: str, wanted: str, problem: str) -> str:
    return f'{kind} in version "{version}" cannot be handled as a {wanted}: {problem}'


def _wrong_kind(kind: str, version: str, resource: Resource) -> ApiError:
    """Return 400 for a body of another kind or version."""
    group_version = version.rpartition("/")[2]
    known = any((r.kind, r.api_version) == (kind, version) for r in BUILT_IN)
    if known:
        problem = f"converting ({group_version}.{kind}) to (core.{resource.kind}): unknown conversion"
    else:
        problem = f'no kind "{kind}" is registered for version "{version}" in scheme {SCHEME}'
    return bad_request(_handled(kind, version, resource.kind, problem))


def decode_value(request: Request, resource: Resource, value: Object, strict_prefix: str) -> Object:
    """Return a built-in object from a JSON value, with defaults; raise GoError."""
    decoder = Decoder()
    made: Object = decoder.decode(resource_type(resource), value)
    report(request, duplicates(value), decoder.unknown, strict_prefix)
    made = {**made, "kind": resource.kind, "apiVersion": resource.api_version}
    made.setdefault("metadata", {}).pop("selfLink", None)
    made = plain(made)
    defaults.fill(made)
    return made


def report(request: Request, repeated: list[str], unknown: list[str], strict_prefix: str) -> None:
    """Refuse or warn about fields, as the request's fieldValidation says; raise GoError."""
    texts = [f"duplicate field {quoted(path)}" for path in repeated]
    texts += [f"unknown field {quoted(path)}" for path in unknown]
    if request.field_validation == "Strict" and texts:
        raise GoError(strict_prefix + ", ".join(texts))
    if request.field_validation == "Warn":
        request.warnings += texts


def _custom_body(request: Request, resource: Resource, value: Object) -> Object:
    kind, version = value.get("kind"), value.get("apiVersion")
    if not kind or not version:
        text = request.body.decode(errors="replace")
        what = "Kind" if not kind else "apiVersion"
        problem = f"Object '{what}' is missing in '{text}'"
        raise bad_request(
            f"the object provided is unrecognized (must be of type {resource.kind}): {problem} ({text[:30]} ...)"
        )
    if version != resource.api_version:
        request.warnings += [f"unknown field {quoted(name)}" for name in value if name not in openapi.ENVELOPE]
        text = f"the API version in the data ({version}) does not match the expected API version"
        raise bad_request(f"{text} ({resource.api_version})")
    try:
        return decode_custom(request, resource, value, strict_prefix="strict decoding error: ")
    except GoError as error:
        raise bad_request(_handled(resource.kind, resource.version, resource.kind, str(error))) from None


def decode_custom(request: Request, resource: Resource, value: Object, strict_prefix: str) -> Object:
    """Return a custom object from a JSON value: pruned, with defaults; raise GoError for invalid metadata."""
    assert resource.schema is not None
    repeated = duplicates(value)
    made: Object = plain(value)
    decoder = Decoder()
    made["metadata"] = decoder.decode(METADATA, made.get("metadata") or {})
    unknown = [f"metadata.{path}" for path in decoder.unknown]
    unknown += openapi.prune(resource.schema, made)
    unknown += _embedded(resource.schema, made)
    report(request, repeated, unknown, strict_prefix)
    openapi.fill(resource.schema, made)
    return made


def _embedded(schema: Object, value: Any, path: str = "") -> list[str]:
    """Drop unknown metadata of embedded objects; return the paths."""
    found: list[str] = []
    for name, part in (schema.get("properties") or {}).items():
        held = value.get(name) if isinstance(value, dict) else None
        where = f"{path}.{name}".lstrip(".")
        if part.get("x-kubernetes-embedded-resource") and isinstance(held, dict) and "metadata" in held:
            decoder = Decoder()
            held["metadata"] = decoder.decode(METADATA, held["metadata"])
            found += [f"{where}.metadata.{unknown}" for unknown in decoder.unknown]
        found += _embedded(part, held, where)
    return found


def delete_options(request: Request) -> Object:
    """Return the options of a deletion, from the body and the query; raise ApiError."""
    found: Object = {}
    if request.body:
        media = request.content_type or "application/json"
        if media not in ("application/json", "application/yaml"):
            raise ApiError(415, "UnsupportedMediaType", UNKNOWN_FORMAT + MEDIA_TYPES)
        try:
            found = parse_json(request.body.decode(errors="replace")) or {}
        except GoError as error:
            raise bad_request(f"couldn't get version/kind; json parse error: {error}") from None
        kind = found.get("kind", "DeleteOptions")
        if kind != "DeleteOptions":
            scheme = '"pkg/apis/meta/internalversion/scheme/register.go:27"'
            text = f'no kind "{kind}" is registered for version "{found.get("apiVersion", "")}" in scheme {scheme}'
            raise bad_request(text)
    for name in ("propagationPolicy", "orphanDependents"):
        if request.option(name):
            found[name] = request.option(name)
    if request.query.get("gracePeriodSeconds"):
        found["gracePeriodSeconds"] = request.number("gracePeriodSeconds")
    if request.query.get("dryRun"):
        found["dryRun"] = request.query["dryRun"]
    return found
