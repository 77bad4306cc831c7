"""A DNS server on loopback that answers from a table, or as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


@dataclass(slots=True)
class DnsServer(asyncio.DatagramProtocol):
    """Answers queries over UDP."""

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Records by name and type."""
    additional: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Addresses that the answer for a name includes, as (target, address)."""
    ttl_s: int = 0
    rcode: dns.rcode.Rcode = dns.rcode.NOERROR
    """Anything but NOERROR: the answer to all queries."""
    silent: bool = False
    queries: list[tuple[str, str]] = field(default_factory=list)
    transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.DatagramTransport) or hasattr(transport, "sendto")
        self.transport = transport  # type: ignore[assignment]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer a query."""
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.queries.append((name, kind))
        if self.silent or self.transport is None:
            return
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA | dns.flags.RA
        response.set_rcode(self.rcode)
        if self.rcode == dns.rcode.NOERROR:
            found = self.records.get((name, kind), [])
            if found:
                response.answer.append(dns.rrset.from_text(question.name, self.ttl_s, "IN", kind, *found))
            elif not any(known == name for known, _ in self.records):
                response.set_rcode(dns.rcode.NXDOMAIN)
            for target, address in self.additional.get(name, []):
                response.additional.append(dns.rrset.from_text(target, self.ttl_s, "IN", "A", address))
        self.transport.sendto(response.to_wire(), addr)

    @property
    def address(self) -> str:
        """`address:port` for the cluster file."""
        assert self.transport is not None
        host, port = self.transport.get_extra_info("sockname")[:2]
        return f"{host}:{port}"


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """Run a server on a free port."""
    server = DnsServer()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
