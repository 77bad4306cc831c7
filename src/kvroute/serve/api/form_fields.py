"""Fields of a form (`multipart/form-data`, RFC 7578, or `application/x-www-form-urlencoded`): reads and removes some.

Parsers of forms differ. A form that two parsers might read in different ways is rejected, so that no engine finds a
field that is not found here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn
from urllib.parse import unquote, unquote_plus, unquote_to_bytes

from kvroute.serve.api.json_fields import RequestError

URLENCODED = b"application/x-www-form-urlencoded"
_PARAMETERS = re.compile(
    rb"""(?:;[ \t]*(?:boundary=(?:"([\w'()+,./:=? -]{1,70})"|([\w'()+./:=?-]{1,70}))|charset="?utf-8"?)[ \t]*)*;?""",
    re.I,
)
_LINE = re.compile(rb"([\w!#$%&'*+.^`|~-]+):[ \t]*([^\r\n\0]*)")
_QUOTED = rb'"(?:[^"\\]|\\(?!"))*"'
_DISPOSITION = re.compile(rb"""(?i)form-data((?:[ \t]*;[ \t]*[\w*-]+=(?:%b|[^\s;"\\]+))*)[ \t]*""" % _QUOTED)
_PARAMETER = re.compile(rb"""([\w*-]+)=(%b|[^\s;"\\]+)""" % _QUOTED)
_PARTS_MAX = 1000
_HEADERS_MAX = 4096
_VALUE_MAX = 500


class _Field(NamedTuple):
    """One field, with its positions in the form, in bytes."""

    name: str
    """Decoded, without what follows a `[` or `.`: some parsers read that as the name of a nested field."""
    start: int
    end: int
    """Range of everything that belongs to the field."""
    value: int
    """Start of its value."""
    value_end: int


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form, in order."""

    body: bytes
    delimiter: bytes
    """Line before each field; empty: the fields are separated by `&`."""
    fields: tuple[_Field, ...]

    def values(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield name and value of each field with one of these names."""
        for field in self.fields:
            if field.name in names:
                value = self.body[field.value : field.value_end]
                yield field.name, value if self.delimiter else unquote_to_bytes(value.replace(b"+", b" "))

    def text(self, name: str) -> str:
        """Return the value of the first field with this name; empty if there is none, or it has over 500 bytes."""
        value = next((value for _, value in self.values((name,))), b"")
        return value.decode(errors="replace") if len(value) <= _VALUE_MAX else ""

    def without(self, names: Collection[str], **added: str) -> bytes:
        """Return the form without the fields of these names. Args: `added`: further fields, in ASCII."""
        if not added and not any(field.name in names for field in self.fields):
            return self.body
        kept = [self.body[field.start : field.end] for field in self.fields if field.name not in names]
        if not self.delimiter:
            return b"&".join([*kept, *(f"{name}={value}".encode() for name, value in added.items())])
        head = b'%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        kept += [head % (self.delimiter, name.encode(), value.encode()) for name, value in added.items()]
        return b"".join([*kept, self.delimiter, b"--\r\n"])


def read_form(media_type: bytes, parameters: bytes, body: bytes) -> Form:
    """Return the fields of a form.

    Args:
        media_type: of the Content-Type header, in lower case: `URLENCODED` or one that begins with `multipart/`.
        parameters: those of the header, after the first semicolon.
        body: the form.

    Raises:
        RequestError: 415, it is not a form, or parsers might read it in different ways.
    """
    found = _PARAMETERS.fullmatch(b";" + parameters if parameters.strip() else b"")
    if found is None or parameters.lower().count(b"boundary=") > 1:
        _refuse("the Content-Type header has other parameters than one `boundary` and `charset=utf-8`")
    if media_type == URLENCODED:
        return Form(body, b"", tuple(_pairs(body)))
    boundary = found[1] or found[2]
    if not boundary or media_type != b"multipart/form-data":
        _refuse("the Content-Type header is not `multipart/form-data; boundary=...`")
    return Form(body, b"--" + boundary, tuple(_parts(body, b"--" + boundary)))


def _pairs(body: bytes) -> Iterator[_Field]:
    """Yield the fields of an urlencoded form; some parsers separate them by semicolons, too."""
    if body.count(b"&") + body.count(b";") > _PARTS_MAX:
        _refuse(f"the form has more than {_PARTS_MAX} fields")
    for found in re.finditer(rb"[^&;]+", body):
        name, _, value = found[0].partition(b"=")
        text = unquote_plus(name.decode("latin-1"))
        yield _Field(_outer(text), found.start(), found.end(), found.end() - len(value), found.end())


def _parts(body: bytes, delimiter: bytes) -> Iterator[_Field]:
    """Yield the fields of a multipart form, whose lines end in CRLF, without a preamble and with its end."""
    start, after = 0, len(delimiter)
    if not body.startswith(delimiter):
        _refuse("the body does not begin with the boundary")
    for _ in range(_PARTS_MAX):
        if body.startswith(b"--", after):
            if len(body) > after + 4 or body[after + 2 :].strip():
                _refuse("the body goes on after its last boundary")
            return
        head = body.find(b"\r\n\r\n", after, after + _HEADERS_MAX)
        end = body.find(delimiter, after) - 2  # it must not occur elsewhere: some parsers look for it in each line
        if not body.startswith(b"\r\n", after) or not 0 <= head <= end - 4 or body[end : end + 2] != b"\r\n":
            _refuse("a part has no blank line after its headers, or no boundary after its value")
        yield _Field(_name(body[after + 2 : head]), start, end + 2, head + 4, end)
        start, after = end + 2, end + 2 + len(delimiter)
    _refuse(f"the form has more than {_PARTS_MAX} fields")


def _name(headers: bytes) -> str:
    """Return the name of a part."""
    found = [_LINE.fullmatch(line) for line in headers.split(b"\r\n")]
    lines = [(line[1].lower(), line[2]) for line in found if line is not None]
    dispositions = [value for name, value in lines if name == b"content-disposition"]
    whole = _DISPOSITION.fullmatch(dispositions[0]) if dispositions else None
    if len(lines) < len(found) or len(dispositions) != 1 or whole is None:
        _refuse('a part has not one plain header line `Content-Disposition: form-data; name="..."`')
    names = [value for name, value in _PARAMETER.findall(whole[1]) if name.lower().startswith(b"name")]
    if len(names) != 1 or b"\\" in names[0] or b"name*" in whole[1].lower().replace(b"filename*", b""):
        _refuse("a part has not one plain parameter `name`")
    return _outer(unquote(names[0].strip(b'"').decode("latin-1")))


def _outer(name: str) -> str:
    return re.split(r"[\[.]", name, maxsplit=1)[0].strip()


def _refuse(why: str) -> NoReturn:
    what = f"{why}; send JSON, or a form as `multipart/form-data` of an HTTP library"
    raise RequestError(what, status=415, code="unsupported_media_type")
