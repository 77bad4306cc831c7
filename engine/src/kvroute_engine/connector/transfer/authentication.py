"""Proof of the shared token, bound to one connection, and the tags that bind every later frame to it. No I/O.

Both sides derive all values from the token and a transcript: the server's challenge and all fields of the client's
hello, including the address that it connected to. The token and the keys are never sent over the network.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from dataclasses import dataclass

from msgspec.structs import replace

from kvroute_engine.connector.transfer.wire import HANDSHAKE_BYTES_MAX, Challenge, Hello, encode

NONCE_BYTES = 16
TAG_BYTES = 16
_CONTEXT = b"kvroute KV connection 3\0"


@dataclass(frozen=True, slots=True)
class AuthenticatedSession:
    """Secrets that only the two sides of one connection have: proofs of the token, and a key for each direction."""

    client_proof: bytes
    server_proof: bytes
    client_key: bytes
    """Key of the frames that the client sends."""
    server_key: bytes
    """Key of the frames that the server sends."""


def fresh_nonce() -> bytes:
    """Return random bytes for a single use."""
    return secrets.token_bytes(NONCE_BYTES)


def session(token: str, challenge: Challenge, hello: Hello) -> AuthenticatedSession:
    """Return the session of a handshake; `hello.proof` is ignored.

    Each value is an HMAC-SHA256 with its own label, so that none can be reflected or used in place of another.

    Raises:
        WireError: the hello is longer than a handshake allows.
    """
    messages = (encode(message, HANDSHAKE_BYTES_MAX) for message in (challenge, replace(hello, proof=b"")))
    transcript = b"".join(hashlib.sha256(header).digest() for header in messages)
    secret = hmac.digest(token.encode(), _CONTEXT + transcript, hashlib.sha256)
    labels = (b"client proof", b"server proof", b"client key", b"server key")
    return AuthenticatedSession(*(hmac.digest(secret, label, hashlib.sha256) for label in labels))


def verify_proof(given: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, expected)


class FrameTags:
    """Tags of the frames of one direction, in order: keyed BLAKE2s over a frame's number and its header.

    The number prevents frames from being repeated, omitted or reordered.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2s(digest_size=TAG_BYTES, key=key)
        self._number = 0

    def next(self, header: bytes) -> bytes:
        """Return the tag of the next frame, which has this header."""
        tag = self._keyed.copy()  # takes half the time of setting the key again
        tag.update(self._number.to_bytes(8, "big") + header)
        self._number += 1
        return tag.digest()


def address_of(sockname: tuple[str, int, *tuple[int, ...]]) -> tuple[str, int]:
    """Return the IP address and port of a TCP socket's end, in the same notation on both sides of a connection."""
    address = ipaddress.ip_address(sockname[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), sockname[1]
