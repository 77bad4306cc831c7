"""Bodies of requests that one engine serves alone: what the gateway reads of them, and the body that is sent on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Raw

from kvroute.gateway.openai_api.form_fields import form_field
from kvroute.gateway.openai_api.json_fields import Fields, read_and_strip_fields, string
from kvroute.gateway.openai_api.requests import Completion

_encode = msgspec.json.Encoder().encode


class PassthroughBody(NamedTuple):
    """One request that any engine serves alone."""

    model: str
    """Empty: the client names no model."""
    body: bytes
    """Body that is sent to the engine."""
    fields: Fields | None
    """Fields of the body; None: it is not a JSON object."""
    streams: bool = False
    """Whether the client requests a stream."""
    generates: bool = False
    """Whether the engine generates tokens."""


def read_passthrough(path: bytes, body: bytes) -> PassthroughBody:
    """Parse the body of a request that is passed through; its bytes are kept unless it has one of `ENGINE_FIELDS`.

    Raises:
        RequestError: 400, the body is not a JSON object, its `model` is not a string, or it has too many values.
    """
    fields, stripped = read_and_strip_fields(body)
    streams = bytes(fields.get("stream", b"null")) == b"true"  # the engine rejects what is not a boolean
    return PassthroughBody(string(fields, "model") or "", _encode(fields) if stripped else body, fields, streams)


def passthrough_of(completion: Completion) -> PassthroughBody:
    """Return a request that one instance must serve."""
    fields = completion.fields
    return PassthroughBody(completion.model, _encode(fields), fields, completion.stream)


def read_any_body(content_type: bytes | None, path: bytes, body: bytes) -> PassthroughBody:
    """Parse the body of a request that is passed through: JSON as `read_passthrough` does, the form field `model` of a
    form, and nothing else. An empty body is valid.

    Args:
        content_type: of the request; None: JSON, as for engines.
        path: of the request.
        body: of the request.

    Raises:
        RequestError: 400, as for `read_passthrough`.
    """
    if not body:
        return PassthroughBody("", body, None)
    media_type, _, parameters = (content_type or b"application/json").partition(b";")
    media_type = media_type.strip().lower()
    if media_type == b"application/json" or media_type.endswith(b"+json"):
        return read_passthrough(path, body)
    model = form_field(parameters, body, b"model") if media_type == b"multipart/form-data" else ""
    return PassthroughBody(model, body, None)


def passthrough_with_salt(passthrough: PassthroughBody, salt: Callable[[str], str]) -> PassthroughBody:
    """Return the same request with the `cache_salt` that `salt` derives from the client's. The body, which may be
    long, is not parsed again."""
    assert passthrough.fields is not None, "only a JSON object has a salt"
    own = bytes(passthrough.fields.get("cache_salt", b"null"))
    fields = {**passthrough.fields, "cache_salt": Raw(_encode(salt("" if own == b"null" else own.decode())))}
    return passthrough._replace(body=_encode(fields), fields=fields)
