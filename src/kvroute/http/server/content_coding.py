"""Decodes request bodies with a Content-Encoding (RFC 9110, 8.4), within a size limit; pure."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import zstandard

from kvroute.http.headers import Headers

CODINGS_MAX = 3
"""Largest number of codings of one body. Each costs as much as the size limit allows."""
_ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
"""Largest window of zstd, as in RFC 9659."""
_ZSTD_PIECE_BYTES = 128
"""Input that is decoded at once. A block of 4 bytes decodes to at most 128 KiB, so that the output exceeds the limit by
at most 4 MiB."""


class CodingError(Exception):
    """A body that cannot be decoded: `status` and `code` are those of the error response, the text is its message."""

    def __init__(self, message: str, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def content_coding(headers: Headers) -> bytes:
    """Return the content codings of a request, in the order in which they were applied; empty: none."""
    found = b""
    for name, value in headers:
        if name == b"content-encoding":
            found = found + b"," + value if found else value
    return found


def decoded(coding: bytes, body: bytes, bytes_max: int) -> bytes:
    """Return a body without its content codings.

    Args:
        coding: as `content_coding` returns it.
        body: as received.
        bytes_max: largest size after each decoding.

    Raises:
        CodingError: 415, a coding is not supported or there are too many; 400, the body has another coding or is not
            complete; 413, it is larger than `bytes_max`.
    """
    names = [name for part in coding.lower().split(b",") if (name := part.strip()) not in (b"", b"identity")]
    unknown = next((name for name in names if name not in _DECODERS), None)
    if unknown is not None or len(names) > CODINGS_MAX:
        shown = unknown if unknown is not None else coding
        what = f"the content coding {shown[:40].decode('latin-1')!r} is not supported"
        hint = f"send {ACCEPTED.decode()}, or a body without Content-Encoding"
        raise CodingError(f"{what}; {hint}", "unsupported_content_encoding", 415)
    for name in reversed(names):
        try:
            body = _DECODERS[name](body, bytes_max)
        except (zlib.error, zstandard.ZstdError) as error:
            raise _malformed(name, str(error)) from None
        except EOFError as error:
            raise _malformed(name, str(error)) from None
        if len(body) > bytes_max:
            what = f"the request's body is larger than {bytes_max} bytes after it is decoded"
            hint = "send a shorter prompt, or ask the operator to raise `gateway.limits.body`"
            raise CodingError(f"{what}; {hint}", "body_too_large", 413)
    return body


def _malformed(name: bytes, why: str) -> CodingError:
    what = f"the body is not valid {name.decode()} ({why})"
    return CodingError(f"{what}; send what Content-Encoding says", "invalid_content_encoding")


def _inflated(body: bytes, bytes_max: int, window: int) -> bytes:
    decoder = zlib.decompressobj(window)
    found = decoder.decompress(body, bytes_max + 1)
    if len(found) <= bytes_max and not decoder.eof:
        raise EOFError("it is not complete")
    if decoder.unused_data:
        raise EOFError("something follows its end")
    return found


def _gzip(body: bytes, bytes_max: int) -> bytes:
    return _inflated(body, bytes_max, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes, bytes_max: int) -> bytes:
    """Decode the zlib format, or the bare one that some clients send under this name."""
    wrapped = len(body) > 1 and body[0] & 15 == zlib.DEFLATED and (body[0] << 8 | body[1]) % 31 == 0
    return _inflated(body, bytes_max, zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)


def _zstd(body: bytes, bytes_max: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
    found = bytearray()
    for at in range(0, len(body), _ZSTD_PIECE_BYTES):
        if decoder.eof:
            raise EOFError("something follows its end")
        found += decoder.decompress(body[at : at + _ZSTD_PIECE_BYTES])
        if len(found) > bytes_max:
            return bytes(found)
    if not decoder.eof:
        raise EOFError("it is not complete")
    if decoder.unused_data:
        raise EOFError("something follows its end")
    return bytes(found)


_DECODERS: Mapping[bytes, Callable[[bytes, int], bytes]] = {
    b"gzip": _gzip,
    b"x-gzip": _gzip,
    b"deflate": _deflate,
    b"zstd": _zstd,
}
ACCEPTED = b"gzip, deflate, zstd"
"""Value of the Accept-Encoding header of a response with status 415."""
