"""How addresses with a port are written, and sockets that listen on them."""

from __future__ import annotations

import ipaddress
import socket


def host_port(host: str, port: int | str) -> str:
    """Return `host:port` as URLs have it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bound(host: str, port: int, *, shared: bool = False) -> socket.socket | None:
    """Return a socket bound to an IP address, so that no resolver is queried for it; None if the host is a name. `::`
    stands for all addresses of this machine, those of IPv4 too.

    Args:
        host, port: the address.
        shared: other processes of the same user may bind it too.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
    """
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    own = socket.socket(socket.AF_INET6 if found.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if found.version == 6:
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not found.is_unspecified)
        own.bind((host, port))
    except OSError:
        own.close()
        raise
    own.setblocking(False)
    return own
