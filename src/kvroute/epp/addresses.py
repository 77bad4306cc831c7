"""Addresses of engines as Envoy writes them: `ip:port`, an IPv6 address in brackets."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvroute.types import InputError, Instance
from kvroute_engine.addresses import host_port

SIDECAR_RANKS = "a sidecar cannot tell the prefill engine its data-parallel rank"


@lru_cache(maxsize=65536)
def address_of(url: str) -> str:
    """Return the address of an engine's URL; empty if Envoy cannot use it: a host name, or another scheme than http."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return ""
    try:
        ip = ip_address(parts.hostname)
    except ValueError:
        return ""
    return host_port(str(ip), parts.port or 80)


def host_of(address: str) -> str:
    """Return the IP address of an `ip:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """Return the port of an `ip:port`."""
    return int(address.rpartition(":")[2])


def address_fault(url: str) -> str:
    """Return why Envoy cannot reach an engine by the address that a picker names; empty if it can."""
    return "" if address_of(url) else f"Envoy needs an IP address in the endpoint, which is {url}"


def check_addresses(instances: Iterable[Instance], source: str, *, sidecar: bool = False) -> None:
    """Check that Envoy can reach each instance by the address that a picker names. Args: `sidecar`: see
    `PickerSettings`.

    Raises:
        InputError: an endpoint has a host name or TLS, or a sidecar would need a data-parallel rank.
    """
    for instance in instances:
        if instance.endpoint is not None and (fault := address_fault(instance.endpoint.url)):
            hint = "write http://IP:PORT; Envoy adds TLS to engines itself"
            raise InputError(f"instance {instance.name}: {fault}", where=source, hint=hint)
        if sidecar and instance.engine:
            what = f"instance {instance.name}: {SIDECAR_RANKS}"
            raise InputError(what, where=source, hint="use --prefill-by picker, or remove `dp`")
