"""Engines by SRV records of a real DNS server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.rcode
import pytest
from tests.serve.discovery.dns_server import DnsServer, dns_server
from tests.serve.stub_engines import run
from tests.waiting import until

from kvroute.serve.discovery.dns_records import DnsRecords
from kvroute.topology.schema import DnsDiscovery
from kvroute.types import Discovered, Endpoint, Place
from kvroute_engine.files.units import Duration

PREFILL, DECODE = "_http._tcp.prefill.example", "_http._tcp.decode.example"


@asynccontextmanager
async def followed(server: DnsServer, **more: Any) -> AsyncIterator[list[tuple[Discovered, ...]]]:
    """Follow two names; yield the list of the reports."""
    section = DnsDiscovery(
        prefill=PREFILL,
        decode=DECODE,
        nameservers=[server.address],
        **{"interval_min_s": Duration(0.02), "interval_max_s": Duration(5.0), "keep_s": Duration(3600.0)} | more,
    )
    reports: list[tuple[Discovered, ...]] = []

    def report(engines: tuple[Discovered, ...]) -> None:
        reports.append(engines)

    task = asyncio.create_task(DnsRecords(section).run(report))
    try:
        yield reports
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def publish(server: DnsServer, prefill: int, decode: int) -> None:
    """Publish numbers of engines; those for decode have their addresses in the same answer."""
    server.records = {
        (PREFILL, "SRV"): [f"0 0 8000 p{n}.example." for n in range(prefill)],
        (DECODE, "SRV"): [f"0 0 800{n} d.example." for n in range(decode)],
        **{(f"p{n}.example", "A"): [f"10.0.0.{n}"] for n in range(prefill)},
    }
    server.additional = {DECODE: [("d.example.", "10.0.1.1")]}


def names(reports: list[tuple[Discovered, ...]]) -> list[str]:
    """Return the names of the last report."""
    return [engine.name for engine in reports[-1]] if reports else []


def test_records_are_engines() -> None:
    """Roles by name, addresses from the answer or from a query, and all engines of a host on one node."""

    async def main() -> None:
        async with dns_server() as server:
            publish(server, 1, 2)
            async with followed(server, protocol="mooncake", bootstrap_port=8998, kv_events_port=5557) as reports:
                await until(lambda: bool(reports))
                assert reports[0][0] == Discovered(
                    name="d.example-8000",
                    uid="10.0.1.1:8000",
                    role="decode",
                    endpoint=Endpoint(url="http://10.0.1.1:8000", protocol="mooncake", kv_events="tcp://10.0.1.1:5557"),
                    place=Place(node="d.example"),
                )
                assert names(reports) == ["d.example-8000", "d.example-8001", "p0.example-8000"]
                assert reports[0][2].endpoint.bootstrap == "10.0.0.0:8998"
                assert ("d.example", "A") not in server.queries
                publish(server, 2, 1)
                await until(lambda: names(reports) == ["d.example-8000", "p0.example-8000", "p1.example-8000"])
                # Another host has the name now.
                server.records["p0.example", "A"] = ["10.0.9.9"]
                await until(lambda: reports[-1][1].uid == "10.0.9.9:8000")

    run(main())


def test_ipv6_addresses_are_written_in_brackets() -> None:
    """In URLs and in uids."""

    async def main() -> None:
        async with dns_server() as server:
            publish(server, 1, 1)
            del server.records["p0.example", "A"]
            server.records["p0.example", "AAAA"] = ["fd00::1"]
            async with followed(server) as reports:
                await until(lambda: bool(reports))
                assert reports[0][1].endpoint.url == "http://[fd00::1]:8000"

    run(main())


@pytest.mark.parametrize("outage", [pytest.param("silent", marks=pytest.mark.slow), "refused", "gone"])
def test_an_outage_keeps_the_engines(outage: str, caplog: pytest.LogCaptureFixture) -> None:
    """No answer, an error, and a name that no longer exists; logged once for each name."""

    async def main() -> None:
        async with dns_server() as server:
            publish(server, 1, 1)
            async with followed(server) as reports:
                await until(lambda: bool(reports))
                server.silent = outage == "silent"
                server.rcode = dns.rcode.SERVFAIL if outage == "refused" else server.rcode
                if outage == "gone":
                    server.records, server.additional = {}, {}
                await until(lambda: sum(record.message == "dns_not_resolved" for record in caplog.records) == 2)
                asked = len(server.queries)
                await until(lambda: len(server.queries) > asked + 4)
                assert len(reports) == 1
                server.silent, server.rcode = False, dns.rcode.NOERROR
                publish(server, 3, 1)
                await until(lambda: len(reports[-1]) == 4)
        assert sum(record.message == "dns_not_resolved" for record in caplog.records) == 2

    run(main())


def test_a_name_without_records_is_empty_after_the_stated_time() -> None:
    """The answer that it has none must repeat for that long."""

    async def main() -> None:
        async with dns_server() as server:
            publish(server, 1, 1)
            async with followed(server, keep_s=Duration(0.1)) as reports:
                await until(lambda: bool(reports))
                server.records, server.additional = {(DECODE, "TXT"): ["x"]}, {}
                await until(lambda: reports[-1] == ())

    run(main())


def test_before_the_first_answer_nothing_is_reported() -> None:
    """Also not that there are no engines; an answer that there are none is one."""

    async def main() -> None:
        async with dns_server() as server:
            server.rcode = dns.rcode.SERVFAIL
            async with followed(server) as reports:
                await until(lambda: len(server.queries) > 4)
                assert not reports
                server.rcode = dns.rcode.NOERROR
                await until(lambda: reports == [()])

    run(main())


def test_the_ttl_decides_when_to_ask_again() -> None:
    """Within the bounds: with a TTL of a day and the longest interval of 0.3 s, the next query comes after 0.3 s."""

    async def main() -> None:
        async with dns_server() as server:
            server.ttl_s = 86_400
            publish(server, 1, 1)
            start = asyncio.get_running_loop().time()
            async with followed(server, interval_max_s=Duration(0.3)) as reports:
                await until(lambda: bool(reports))
                publish(server, 2, 1)
                await until(lambda: len(reports) == 2)
                assert asyncio.get_running_loop().time() - start >= 0.3

    run(main())
