"""Bodies of requests that one engine serves alone: what the gateway reads of them, and the body that is sent on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from kvroute.serve.api.form_fields import URLENCODED, Form, read_form
from kvroute.serve.api.json_fields import (
    ENGINE_FIELDS,
    NESTED,
    Fields,
    RequestError,
    check_nested,
    read_and_strip_fields,
    string,
)
from kvroute.serve.api.requests import Completion

_JSON = b"application/json"
_MEDIA_TYPE = re.compile(rb"[\w!#$&^.+*-]+/[\w!#$&^.+*-]+", re.ASCII)
_JSON_BEGINS = re.compile(rb"[\xef\xbb\xbf\xff\xfe\0\s]*[{\[]")
"""Matches the beginning of every JSON object or list: in UTF-8, UTF-16 or UTF-32, with a byte order mark or without."""

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
    form: Form | None = None
    """Fields of a form; None: it is none."""


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


def read_any_body(content_types: Sequence[bytes], path: bytes, body: bytes) -> PassthroughBody:
    """Parse the body of a request that is passed through, without `ENGINE_FIELDS`: JSON as `read_passthrough` does,
    whatever its content type, because engines do so too; the fields of a form; and nothing else. An empty body is
    valid.

    Args:
        content_types: values of the request's headers Content-Type; none: JSON, as for engines.
        path: of the request.
        body: of the request.

    Raises:
        RequestError: 400, as for `read_passthrough`; 415, a content type or a form that parsers might read in different
            ways.
    """
    if not body:
        return PassthroughBody("", body, None)
    if len(content_types) > 1:
        raise _unsupported("the request has several Content-Type headers")
    media_type, _, parameters = (content_types[0] if content_types else _JSON).partition(b";")
    media_type = media_type.strip().lower()
    begins_as_json = _JSON_BEGINS.match(body) is not None
    if media_type == URLENCODED or media_type.startswith(b"multipart/"):
        if begins_as_json:
            raise _unsupported("the body is JSON, and the Content-Type header says that it is a form")
        return _read_form(media_type, parameters, body)
    if begins_as_json or media_type == _JSON or media_type.endswith(b"+json"):
        return read_passthrough(path, body)
    if not _MEDIA_TYPE.fullmatch(media_type):
        raise _unsupported("the Content-Type header is not one media type")
    return PassthroughBody("", body, None)


def _unsupported(what: str) -> RequestError:
    return RequestError(f"{what}; send application/json", status=415, code="unsupported_media_type")


def _read_form(media_type: bytes, parameters: bytes, body: bytes) -> PassthroughBody:
    form = read_form(media_type, parameters, body)
    for name, value in form.values(NESTED):
        check_nested(name, Raw(value))
    stripped = form.without(ENGINE_FIELDS)
    if stripped is not body:
        form = read_form(media_type, parameters, stripped)
    return PassthroughBody(form.text("model"), stripped, None, form=form)


def passthrough_with_salt(passthrough: PassthroughBody, salt: Callable[[str], str]) -> PassthroughBody:
    """Return the same request with the `cache_salt` that `salt` derives from the client's. The body, which may be
    long, is not parsed again."""
    fields, form = passthrough.fields, passthrough.form
    if form is not None:
        own = form.text("cache_salt")
        return passthrough._replace(body=form.without({"cache_salt"}, cache_salt=salt(own)), form=None)
    if fields is None:
        return passthrough  # an engine finds no fields in it
    own_raw = bytes(fields.get("cache_salt", b"null"))
    fields = {**fields, "cache_salt": Raw(_encode(salt("" if own_raw == b"null" else own_raw.decode())))}
    return passthrough._replace(body=_encode(fields), fields=fields)
