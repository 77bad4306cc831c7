"""Checks of a request's Host and Origin headers, against DNS rebinding and cross-site requests; URLs without secrets.

A browser lets any page send requests to any address. The Origin header is the page's site. With DNS rebinding the
page's own name resolves to this machine, so that Origin and Host agree; such a name is always in public DNS.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

_PRIVATE = re.compile(r"(^|\.)(localhost|internal|svc|cluster\.local|home\.arpa)\Z")
"""Names that no public DNS server resolves."""
_URL_SECRETS = re.compile(r"(?<=://)([^/?#\s]*@)?([^?#\s\"'<>]*)(\?[^#\s\"'<>]*)?")
STRUCK = "***"
"""Replacement for a secret; no secret setting accepts it as a value."""


def without_url_secrets(text: str) -> str:
    """Return a text in which no URL has a user, a password or a query."""
    if "://" not in text:
        return text

    def plain(found: re.Match[str]) -> str:
        user, place, query = found.groups()
        return (f"{STRUCK}@" if user else "") + place + ("?" + STRUCK if query else "")

    return _URL_SECRETS.sub(plain, text)


def host_name(host: str) -> str:
    """Return the Host header without its port, in lower case; an IPv6 address without its brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def address(text: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address in a text, or None."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return True if a port that listens on this host is reachable from this machine only."""
    name = host_name(host) if host.startswith("[") else host.lower()
    found = address(name.partition("%")[0])
    return found.is_loopback if found is not None else name == "localhost" or name.endswith(".localhost")


def is_own_name(name: str, known: Collection[str] = ()) -> bool:
    """Return True if no attacker can own this name: an IP address, a name without a dot, one of a private zone (`.svc`,
    `.cluster.local`, `.internal`), this machine's name, or one of `known` (lower case)."""
    if not name:
        return False
    if address(name) is not None or name in known or name == socket.gethostname().lower():
        return True
    return "." not in name or _PRIVATE.search(name) is not None


def refusal(
    host: str, origin: str | None, *, known: Collection[str], origins: Collection[str] = (), any_host: bool = False
) -> str:
    """Return the reason to reject a request; empty: it is accepted.

    Args:
        host: the Host header.
        origin: the Origin header, which browsers send with every request that may change something.
        known: further names of this port, lower case.
        origins: allowed sites of other pages, such as `https://app.example`; `*`: all.
        any_host: requests without an Origin may use any name.
    """
    if origin is not None and (origin in origins or "*" in origins):
        return ""
    if not (is_own_name(host_name(host), known) or (any_host and origin is None)):
        return "unknown host name in the Host header"
    if origin is not None and origin.partition("://")[2].lower() != host.strip().lower():
        return "requests from other web pages are rejected"
    return ""
