"""Errors in Anthropic's format, for the paths of its API. All other code makes errors in OpenAI's format."""

from __future__ import annotations

import msgspec

from kvroute.serve.api.responses import error_body

_PREFIX = b"/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Type of an error by its status; others are `invalid_request_error` below 500, `api_error` from there."""


class _Error(msgspec.Struct):
    message: str


class _Body(msgspec.Struct):
    error: _Error
    type: str = ""


_decode, _encode = msgspec.json.Decoder(_Body).decode, msgspec.json.Encoder().encode


def is_anthropic(path: bytes) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path.startswith(_PREFIX) and path[len(_PREFIX) : len(_PREFIX) + 1] in (b"", b"/")


def in_format_of(path: bytes, status: int, body: bytes) -> bytes:
    """Return the body of a response in the format of its path: an error in OpenAI's format becomes one in Anthropic's
    under `/v1/messages`; every other body stays as it is."""
    if status < 400 or not is_anthropic(path):
        return body
    try:
        found = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    if found.type:
        return body
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return anthropic_error(kind, found.error.message)


def anthropic_error(kind: str, message: str) -> bytes:
    """Return Anthropic's error JSON: {"type", "error": {"type", "message"}}. Args: `kind`: type of the error."""
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


class ApiErrors:
    """The error responses of an HTTP server in the format of OpenAI's API, or of Anthropic's under `/v1/messages`."""

    def body(self, path: bytes, status: int, message: str, kind: str, code: str | None) -> bytes:
        """Return the body of an error. Args: `kind`: its type; empty: derived from the status."""
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        return in_format_of(path, status, error_body(message, kind, code=code))

    def of_path(self, path: bytes, status: int, body: bytes) -> bytes:
        """See `in_format_of`."""
        return in_format_of(path, status, body)

    def id_lines(self, path: bytes, request_id: bytes) -> bytes:
        """Return the header lines with the id of a request: under `/v1/messages` also with the name by which
        Anthropic's SDKs read it."""
        if is_anthropic(path):
            return b"x-request-id: %b\r\nrequest-id: %b\r\n" % (request_id, request_id)
        return b"x-request-id: %b\r\n" % request_id
