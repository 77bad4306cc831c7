"""Token and certificates of the connections between scheduler and agents."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvroute_engine.errors import InputError

_TOKEN_LEAST = 16
_SCHEME = "Bearer "
_HEADER = "authorization"


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates in PEM: own ones, and those of the authorities that sign the peers'."""

    certificate: bytes | None = None
    key: bytes | None = None
    authorities: bytes | None = None

    @classmethod
    def read(cls, certificate: Path | None, key: Path | None, authorities: Path | None, where: str) -> Tls | None:
        """Read files; None without any.

        Raises:
            InputError: a file that cannot be read, or a certificate without its key.
        """
        if (certificate is None) != (key is None):
            raise InputError("a certificate and its key belong together", where=where, hint="give --cert and --key")
        if certificate is None and authorities is None:
            return None
        return cls(_read(certificate, "--cert"), _read(key, "--key"), _read(authorities, where))

    def server_credentials(self) -> Any:
        """Return gRPC's credentials of a server; with authorities, clients need a certificate."""
        pair = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pair, self.authorities, self.authorities is not None)

    def channel_credentials(self) -> Any:
        """Return gRPC's credentials of a client; without authorities, those of the system count."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)


def _read(path: Path | None, where: str) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})", where=where, hint="give a PEM file") from None
    if b"-----BEGIN " not in content:
        raise InputError(f"{path} is not a PEM file", where=where, hint="it begins with -----BEGIN")
    return content


def read_token(path: Path | None) -> str:
    """Return the token in a file; empty without a file.

    Raises:
        InputError: the file cannot be read, or has no token of at least 16 printable characters.
    """
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})"
        raise InputError(what, where="--token-file", hint="write one with `openssl rand -hex 32`") from None
    if len(token) < _TOKEN_LEAST or not token.isprintable() or " " in token:
        what = f"{path} has no token of {_TOKEN_LEAST} characters or more"
        raise InputError(what, where="--token-file", hint="write one with `openssl rand -hex 32`")
    return token


def metadata_of(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with a token."""
    return ((_HEADER, _SCHEME + token),) if token else ()


def has_token(metadata: Iterable[tuple[str, str | bytes]], token: str) -> bool:
    """Return whether the metadata of a call have this token, in a time that does not depend on the characters."""
    given = [value for name, value in metadata if name == _HEADER and isinstance(value, str)]
    return len(given) == 1 and hmac.compare_digest(given[0].encode(), (_SCHEME + token).encode())
