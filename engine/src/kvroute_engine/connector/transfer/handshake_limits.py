"""Selects the connection to close when too many are in their handshake. No I/O; the caller locks."""

from __future__ import annotations

import ipaddress
from typing import Generic, TypeVar

C = TypeVar("C")
_IPV6_NETWORK_BITS = 64
"""Length of the IPv6 prefix that one customer usually holds; it can use any address in it."""


class Handshakes(Generic[C]):
    """Connections whose peer has not proved the token yet, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begun = 0
        self._by_network: dict[str, dict[C, int]] = {}
        """Connections in order of arrival, each with its arrival number."""
        self._network: dict[C, str] = {}

    def __len__(self) -> int:
        return len(self._network)

    def begin(self, connection: C, address: str) -> C | None:
        """Add a connection. If there are too many, return the one to close.

        This is the oldest one of the network that has the most connections, so that a peer that opens many does not
        evict one of another network.
        """
        network = network_of(address)
        self._network[connection] = network
        self._by_network.setdefault(network, {})[connection] = self._begun
        self._begun += 1
        if len(self._network) <= self._most:
            return None
        largest = max(self._by_network.values(), key=lambda members: (len(members), -next(iter(members.values()))))
        oldest = next(iter(largest))
        self.end(oldest)
        return oldest

    def end(self, connection: C) -> bool:
        """Remove a connection whose handshake is over, successful or not. Return False if it was removed before."""
        network = self._network.pop(connection, None)
        if network is None:
            return False
        members = self._by_network[network]
        del members[connection]
        if not members:
            del self._by_network[network]
        return True


def network_of(address: str) -> str:
    """Return an IPv4 address unchanged, the first 64 bits of an IPv6 address, and any other text unchanged."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, _IPV6_NETWORK_BITS), strict=False))
