"""Engines by SRV records of DNS (RFC 2782), asked again when they may have changed.

Priority and weight of a record are not used: the decode policy decides.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import dns.asyncresolver
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rdatatype
import dns.resolver

from kvroute.serve.observe.logs import log_event
from kvroute.topology.schema import DnsDiscovery
from kvroute.types import Discovered, Endpoint, Place, Reporter, Role
from kvroute_engine.addresses import host_port

_QUERY_S = 4.0
"""Time limit for one query, repetitions included."""
_AT_ONCE = 32
"""Maximum number of queries for addresses at a time."""
_DNS_PORT = 53


class _Server(NamedTuple):
    """One SRV record with the address of its target."""

    target: str
    port: int
    address: str


@dataclass(slots=True)
class _Records:
    """What is known of one name."""

    servers: tuple[_Server, ...] = ()
    answered: bool = False
    """Whether a server has ever said what the name has."""
    empty_since_s: float | None = None
    """Time of the first of the last answers, if they all say that the name has no records."""
    ttl_s: float = 0.0
    fault: str = ""
    addresses: dict[str, str] = field(default_factory=dict)
    """Last known address of each target."""


class DnsRecords:
    """The source `discovery.dns`."""

    def __init__(self, section: DnsDiscovery) -> None:
        self._section = section
        names: tuple[tuple[Role, str | None], ...] = (
            ("prefill", section.prefill),
            ("decode", section.decode),
            ("both", section.both),
        )
        self._names: dict[Role, str] = {role: name for role, name in names if name is not None}
        self._records: dict[Role, _Records] = {role: _Records() for role in self._names}
        self._limit = asyncio.Semaphore(_AT_ONCE)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why a name cannot be resolved, for each that cannot."""
        faults = ((name, self._records[role].fault) for role, name in self._names.items())
        return tuple(f"{name}: {fault}" for name, fault in faults if fault)

    @property
    def findings(self) -> dict[str, int]:
        """None: each record with an address is an engine."""
        return {}

    async def run(self, report: Reporter) -> None:
        """See `DiscoverySource`. While no server answers, the engines of the last answers stay."""
        section, reported = self._section, None
        resolver = _resolver(section)
        while True:
            await asyncio.gather(*(self._ask(resolver, role, name) for role, name in self._names.items()))
            if all(records.answered for records in self._records.values()):
                engines = self._engines()
                if engines != reported:
                    reported = engines
                    report(engines)
            ttl_s = min(records.ttl_s for records in self._records.values())
            await asyncio.sleep(min(max(ttl_s, float(section.interval_min_s)), float(section.interval_max_s)))

    async def _ask(self, resolver: dns.asyncresolver.Resolver, role: Role, name: str) -> None:
        """Ask for the records of one name; a failure changes nothing."""
        records = self._records[role]
        try:
            answer = await resolver.resolve(name, "SRV", lifetime=_QUERY_S)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            self._empty(records, name)
        except (dns.exception.DNSException, OSError) as error:
            records.ttl_s = 0.0
            self._fault(records, name, str(error) or type(error).__name__)
        else:
            glue = _glue(answer.response)
            wanted = [(record.target.to_text(omit_final_dot=True), int(record.port)) for record in answer]
            targets = dict.fromkeys(target for target, _ in wanted)
            found = await asyncio.gather(*(self._address(resolver, target, glue) for target in targets))
            pairs = zip(targets, found, strict=True)
            known = {target: address or records.addresses.get(target, "") for target, address in pairs}
            records.addresses = {target: address for target, address in known.items() if address}
            records.servers = tuple(
                sorted({_Server(target, port, known[target]) for target, port in wanted if known[target]})
            )
            records.answered, records.empty_since_s = True, None
            records.ttl_s = float(answer.rrset.ttl) if answer.rrset is not None else 0.0
            lacking = sorted(target for target, address in known.items() if not address)
            self._fault(records, name, f"{lacking[0]} has no address" if lacking else "")

    async def _address(self, resolver: dns.asyncresolver.Resolver, target: str, glue: dict[str, str]) -> str:
        """Return an address of a target; empty if none is known."""
        if target in glue:
            return glue[target]
        async with self._limit:
            for kind in ("A", "AAAA"):
                try:
                    answer = await resolver.resolve(target, kind, lifetime=_QUERY_S)
                except dns.resolver.NoAnswer:
                    continue
                except (dns.exception.DNSException, OSError):
                    return ""
                return min(str(record.address) for record in answer)
        return ""

    def _empty(self, records: _Records, name: str) -> None:
        """Process the answer that a name has no records."""
        now_s, section = time.monotonic(), self._section
        records.ttl_s = 0.0
        if records.empty_since_s is None:
            records.empty_since_s = now_s
        if not records.servers or now_s - records.empty_since_s >= float(section.keep_s):
            records.servers = ()
        records.answered = True
        self._fault(records, name, "the name has no SRV records")

    def _fault(self, records: _Records, name: str, why: str) -> None:
        """Log a fault when it begins."""
        if why and not records.fault:
            log_event("warning", "dns_not_resolved", address=name, reason=why)
        records.fault = why

    def _engines(self) -> tuple[Discovered, ...]:
        found = (self._engine(role, server) for role, records in self._records.items() for server in records.servers)
        by_name = {engine.name: engine for engine in found}
        return tuple(by_name[name] for name in sorted(by_name))

    def _engine(self, role: Role, server: _Server) -> Discovered:
        section = self._section
        address = partial(host_port, server.address)
        bootstrap = address(section.bootstrap_port) if section.bootstrap_port and role == "prefill" else ""
        return Discovered(
            name=f"{server.target}-{server.port}",
            uid=address(server.port),
            role=role,
            endpoint=Endpoint(
                url=f"http://{address(server.port)}",
                protocol=section.protocol,
                bootstrap=bootstrap,
                kv_events=f"tcp://{address(section.kv_events_port)}" if section.kv_events_port else "",
            ),
            place=Place(node=server.target),
        )


def _resolver(section: DnsDiscovery) -> dns.asyncresolver.Resolver:
    """Return a resolver without a cache: the TTL decides when to ask again."""
    resolver = dns.asyncresolver.Resolver(configure=not section.nameservers)
    if section.nameservers:
        places = [_place(text) for text in section.nameservers]
        resolver.nameservers = [address for address, _ in places]
        resolver.nameserver_ports = dict(places)
    return resolver


def _place(text: str) -> tuple[str, int]:
    """Return address and port of `10.0.0.10`, `10.0.0.10:5353` or `[::1]:5353`."""
    host, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and (host.endswith("]") or ":" not in host):
        return host.strip("[]"), int(port)
    return text.strip("[]"), _DNS_PORT


def _glue(response: dns.message.Message) -> dict[str, str]:
    """Return the addresses that a server has added to its answer, by target."""
    found: dict[str, str] = {}
    for rrset in response.additional:
        if rrset.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
            target = rrset.name.to_text(omit_final_dot=True)
            found[target] = min(str(record.address) for record in rrset)
    return found
