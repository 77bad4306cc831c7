"""Top-level fields of a JSON body, decoded only on access, with limits on the memory and time that a body can cost.

The decoder holds the interpreter lock while it runs, even in a thread. A body of many tiny values is therefore rejected
before it is decoded, and a long list of token ids is decoded in pieces.
"""

from __future__ import annotations

import codecs
import re
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.serve.api.responses import error_body

Fields: TypeAlias = dict[str, Raw]
"""Top level of a JSON body, with raw values."""
ID_MAX = 2**63 - 1
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]

INVALID = "invalid_request_error"
TOKENS_MAX = 2**31 - 1
PIECE_BYTES = 128 * 1024
"""Number of bytes that are decoded at once: about 1 ms of work, 10 ms at worst."""
VALUES_MAX = 2**19
"""Largest number of values in a body longer than a piece; a run of numbers counts as one value."""
ENGINE_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
        "routed_dp_rank",
        "rid",
    }
)
"""Fields that only gateway and engines exchange; they are removed from clients' requests on every endpoint."""

NESTED = frozenset({"vllm_xargs", "sampling_params", "extra_args", "extra_body"})
"""Fields whose fields engines take for those of the request, or add to them."""

_BODY = msgspec.json.Decoder(Fields)
_OBJECT = msgspec.json.Decoder(Fields | None)
_LISTED = msgspec.json.Decoder(Fields | list[Fields] | None)
_TEXT = msgspec.json.Decoder(str)
_NUMBER = msgspec.json.Decoder(int | float)
_IDS = msgspec.json.Decoder(list[TokenId])
_NUMBERS = msgspec.json.Decoder(list[int | float])
_RUN = re.compile(rb"[\d,\s]+")


class RequestError(Exception):
    """A client's error: `message` says what is wrong, where, and how to fix it; `body()` is the response to send."""

    def __init__(
        self, message: str, *, status: int = 400, type: str = INVALID, param: str | None = None, code: str | None = None
    ) -> None:
        self.message, self.status, self.type, self.param, self.code = message, status, type, param, code
        super().__init__(message)

    def body(self) -> bytes:
        """Return OpenAI's error JSON."""
        return error_body(self.message, self.type, param=self.param, code=self.code)


def read_fields(body: bytes) -> Fields:
    """Return the fields without `ENGINE_FIELDS`.

    Raises:
        RequestError: 400, the body is not a JSON object in UTF-8, is nested too deeply, or has more than VALUES_MAX
            values.
    """
    return read_and_strip_fields(body)[0]


def read_and_strip_fields(body: bytes) -> tuple[Fields, bool]:
    """Return the same as `read_fields`, and whether the body has any of `ENGINE_FIELDS` or a byte order mark."""
    if len(body) > PIECE_BYTES:
        check_size(body)
    marked = body.startswith(codecs.BOM_UTF8)
    if marked:
        body = body[len(codecs.BOM_UTF8) :]
    if not body:
        raise RequestError("the body is empty; send one JSON object", code="invalid_json")
    try:
        if not body.isascii():
            check_utf8(body)
        fields = _BODY.decode(body)
    except msgspec.ValidationError:
        raise RequestError(
            "the body is not a JSON object; send one with the request's fields", code="invalid_value"
        ) from None
    except msgspec.DecodeError as error:
        where = "" if "(byte" in str(error) else f" (byte {len(body)})"
        raise RequestError(
            f"the body is not valid JSON: {error}{where}; send one JSON object", code="invalid_json"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8", code="invalid_json"
        ) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply; send flatter JSON", code="invalid_json") from None
    removed = ENGINE_FIELDS.intersection(fields)
    for name in removed:
        del fields[name]
    for name in NESTED.intersection(fields):
        check_nested(name, fields[name])
    return fields, marked or bool(removed)


def check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError if a body is not UTF-8.

    A long body is decoded in pieces, which saves memory and lets other threads run in between.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(body), PIECE_BYTES):
            decoder.decode(body[at : at + PIECE_BYTES], at + PIECE_BYTES >= len(body))
    except UnicodeDecodeError:
        body.decode()  # raises with the position in the whole body
        raise


def check_size(body: bytes) -> None:
    """Raise RequestError if a body longer than a piece has more than VALUES_MAX values."""
    if len(body) > PIECE_BYTES and values_in(body, VALUES_MAX) > VALUES_MAX:
        raise RequestError(f"the body contains more than {VALUES_MAX} values; send fewer", code="invalid_value")


def values_in(body: bytes, most: int) -> int:
    """Return about how many values a JSON text has: strings, and runs of numbers, commas and blanks outside strings.

    Counting stops at most one piece beyond `most`. Other threads can run between two pieces.
    """
    count, at, quoted = 0, 0, False
    while at < len(body) and count <= most:
        piece = body[at : at + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the piece ends inside an escape
            piece = body[at : at + PIECE_BYTES + 1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        count += len(parts) // 2 + len(_RUN.findall(b'"'.join(parts[quoted::2])))
        quoted ^= len(parts) % 2 == 0
    return count


def wrong(param: str, what: str, hint: str) -> RequestError:
    """Return the error for a field with an unusable value."""
    return RequestError(f"{param}: {what}; {hint}", param=param, code="invalid_value")


def flag(fields: Fields, name: str) -> bool:
    """Return a boolean field; False if absent or null."""
    if (raw := fields.get(name)) is None:
        return False
    json_value = bytes(raw)
    if json_value not in (b"true", b"false", b"null"):
        raise wrong(name, f"{shown(json_value)} is not a boolean", "give true or false")
    return json_value == b"true"


def count(fields: Fields, name: str, least: int) -> int | None:
    """Return an integer field from `least` to TOKENS_MAX; None if absent or null. 2.0 is valid, as in JSON Schema."""
    if (raw := fields.get(name)) is None or (json_value := bytes(raw)) == b"null":
        return None
    try:
        number = _NUMBER.decode(json_value)
    except msgspec.MsgspecError:
        number = -1
    if not least <= number <= TOKENS_MAX or number != int(number):
        raise wrong(
            name, f"{shown(json_value)} is not an integer from {least} to {TOKENS_MAX}", "give one or leave it out"
        )
    return int(number)


def string(fields: Fields, name: str) -> str | None:
    """Return a string field; None if absent or null."""
    if (raw := fields.get(name)) is None or (json_value := bytes(raw)) == b"null":
        return None
    if json_value[:1] != b'"':
        raise wrong(name, f"{shown(json_value)} is not a string", "give a string")
    return utf8(json_value).decode()


def given(fields: Fields, name: str) -> bool:
    """Whether a field is present and not null."""
    return name in fields and bytes(fields[name]) != b"null"


def utf8(json_value: bytes) -> bytes:
    """Return a JSON string as UTF-8; without escapes, these are the bytes between the quotes."""
    return json_value[1:-1] if b"\\" not in json_value else _TEXT.decode(json_value).encode()


def token_ids(json_value: bytes) -> list[int]:
    """Decode a JSON list of token ids. A long list is decoded in pieces, between which other threads can run. 2.0 is an
    integer, as in JSON Schema.

    Raises:
        msgspec.MsgspecError: the value is not a list of token ids.
    """
    if len(json_value) <= PIECE_BYTES or json_value[:1] != b"[":
        return _decode_ids(json_value)
    ids: list[int] = []
    at, last = 1, json_value.rindex(b"]")
    while at <= last:
        end = json_value.find(b",", at + PIECE_BYTES, last)
        end = last if end < 0 else end
        try:
            ids += _decode_ids(b"[%b]" % json_value[at:end])
        except msgspec.ValidationError as error:
            before, place, after = str(error).partition("$[")
            index, bracket, rest = after.partition("]")
            found = f"{before}{place}{int(index) + len(ids)}{bracket}{rest}" if place else before
            raise msgspec.ValidationError(found) from None
        at = end + 1
    return ids


def _decode_ids(json_value: bytes) -> list[int]:
    try:
        return _IDS.decode(json_value)
    except msgspec.ValidationError as error:
        try:
            numbers = _NUMBERS.decode(json_value)
        except msgspec.MsgspecError:
            raise error from None
        if all(0 <= number <= ID_MAX and number == int(number) for number in numbers):
            return [int(number) for number in numbers]
        raise


def shown(json_value: bytes) -> str:
    """Return the beginning of a value, for a message."""
    return json_value[:40].decode(errors="replace") + ("..." if len(json_value) > 40 else "")


def check_nested(name: str, raw: Raw) -> None:
    """Reject arguments with names of `ENGINE_FIELDS`: engines merge them with those that the gateway sends. Args:
    `name` of `NESTED`, and its value. Raises RequestError: 400."""
    try:
        found = (_LISTED if name == "sampling_params" else _OBJECT).decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise wrong(name, "is not an object", "give an object or leave it out") from None
    for entry in found if isinstance(found, list) else [found or {}]:
        if taken := ENGINE_FIELDS & entry.keys():
            raise wrong(name, f"contains {min(taken)}, which only the gateway may set", "leave it out")
        for inner in NESTED.intersection(entry):
            check_nested(inner, entry[inner])
