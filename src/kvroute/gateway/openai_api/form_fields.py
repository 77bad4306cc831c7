"""Fields of a form (`multipart/form-data`, RFC 7578): reads one short text, and changes nothing."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(rb"""(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE)
_PARAMETER = rb"""\s*[\w*]+=(?:"[^"\r\n]*"|[^\s;"]+)\s*;"""
_NAME = re.compile(
    rb"""(?im)^content-disposition:\s*form-data\s*;(?:%b)*?\s*name=(?:"([^"\r\n]*)"|([^\s;"]+))""" % _PARAMETER
)
_PARTS_MAX = 1000
_HEADERS_MAX = 4096
_VALUE_MAX = 500


def form_field(parameters: bytes, body: bytes, name: bytes) -> str:
    """Return the value of the first field with this name in a form; empty if there is none, or it is longer than 500
    bytes, or the form is malformed: the engine then rejects it.

    Args:
        parameters: those of the Content-Type header, which contain the boundary.
        body: the form.
        name: of the field.
    """
    found = _BOUNDARY.search(parameters)
    if found is None:
        return ""
    delimiter = b"--" + (found[1] or found[2])
    at = body.find(delimiter)
    for _ in range(_PARTS_MAX):
        if at < 0:
            break
        start = at + len(delimiter)
        at = body.find(b"\r\n" + delimiter, start)
        end = body.find(b"\r\n\r\n", start, start + _HEADERS_MAX)
        if at < 0 or end < 0:
            break
        at += 2
        given = _NAME.search(body[start:end])
        if given is not None and (given[1] or given[2]) == name:
            value = body[end + 4 : at - 2]
            return value.decode(errors="replace") if len(value) <= _VALUE_MAX else ""
    return ""
