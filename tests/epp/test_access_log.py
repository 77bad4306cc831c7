"""Entries of Envoy's access log: responses that broke off, clients that left, requests without a picker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.envoy_rig import PickerRig, address, alone, metadata_of, picker
from tests.serve.stub_engines import run
from tests.waiting import until

from kvroute.epp.access_log import address_text
from kvroute.epp.envoy_pb2 import (
    AccessLogCommon,
    Address,
    HttpAccessLogEntries,
    HttpAccessLogEntry,
    HttpRequestProperties,
    HttpResponseProperties,
    ResponseFlags,
    SocketAddress,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)
from kvroute.epp.messages import ACCESS_LOGS, DESTINATION, NAMESPACE

BROKEN = ("upstream_connection_termination", "upstream_remote_reset", "upstream_protocol_error", "stream_idle_timeout")
LEFT = ("downstream_connection_termination", "downstream_remote_reset")
SECTION = "  breaker: {failures: 1}\n  health: {panic: 0}\n"


def entry(upstream: str, status: int = 200, *, picked: bool = True, flags: tuple[str, ...] = ()) -> HttpAccessLogEntry:
    """Return the entry of one request."""
    host, _, port = upstream.rpartition(":")
    common = AccessLogCommon(
        upstream_remote_address=Address(socket_address=SocketAddress(address=host, port_value=int(port or 0))),
        response_flags=ResponseFlags(**dict.fromkeys(flags, True)),
        metadata=metadata_of(NAMESPACE, DESTINATION, upstream) if picked else None,
    )
    response = HttpResponseProperties()
    response.response_code.value = status
    return HttpAccessLogEntry(
        common_properties=common, request=HttpRequestProperties(request_id="my-17"), response=response
    )


class Log:
    """A stream of one Envoy's access log."""

    def __init__(self, rig: PickerRig) -> None:
        self.call: Any = rig.channel.stream_unary(
            ACCESS_LOGS,
            request_serializer=StreamAccessLogsMessage.SerializeToString,
            response_deserializer=StreamAccessLogsResponse.FromString,
        )()

    async def send(self, *entries: HttpAccessLogEntry) -> None:
        """Send entries in one message."""
        await self.call.write(StreamAccessLogsMessage(http_logs=HttpAccessLogEntries(log_entry=entries)))

    async def end(self) -> None:
        """End the stream; all entries have been processed then."""
        await self.call.done_writing()
        await self.call


async def counted(rig: PickerRig) -> tuple[int, int, bool]:
    """Return streams that broke off, clients that left, and whether the engine is still up."""
    page = (await rig.metrics()).split("\n")
    values = dict(line.rsplit(" ", 1) for line in page if line.startswith("kvroute_") and "{" not in line)
    up = rig.gateway.runtime.engines["engine0"].availability.up
    return int(values["kvroute_stream_errors_total"]), int(values["kvroute_client_disconnects_total"]), up


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([0, 200, 206, 400, 500, 503]),
    st.booleans(),
    st.sets(st.sampled_from([*BROKEN, *LEFT, "upstream_connection_failure"])),
)
def test_only_a_response_that_had_begun_breaks_off(status: int, picked: bool, flags: set[str]) -> None:
    """What came before its headers is known from the stream of the request; a request without a picker counts for
    nothing."""

    async def main() -> None:
        async with picker(alone(1), SECTION) as rig:
            log = Log(rig)
            engine = address_of_engine(rig)
            await log.send(entry(engine, status, picked=picked, flags=tuple(sorted(flags))))
            await log.end()
            begun = picked and 0 < status < 400
            broken = begun and not flags.isdisjoint(BROKEN)
            left = begun and not broken and not flags.isdisjoint(LEFT)
            assert await counted(rig) == (broken, left, not broken)

    run(main())


def address_of_engine(rig: PickerRig) -> str:
    """Return the address of the only engine."""
    endpoint = rig.gateway.runtime.engines["engine0"].instance.endpoint
    assert endpoint is not None
    return endpoint.url.removeprefix("http://")


@pytest.mark.parametrize("flag", BROKEN)
def test_a_response_that_breaks_off_is_a_failed_leg_of_its_engine(flag: str) -> None:
    """It has one line in the log, with the request's id."""

    async def main() -> None:
        engines = alone(2)
        async with picker(engines, SECTION) as rig:
            log = Log(rig)
            await log.send(entry(address(engines[1]), flags=(flag,)), entry("192.0.2.1:80", flags=(flag,)))
            await log.end()
            assert [engine.availability.up for engine in rig.gateway.runtime.engines.values()] == [True, False]
            assert 'kvroute_leg_failures_total{leg="decode",engine="engine1",kind="reset"} 1' in await rig.metrics()

    run(main())


def test_requests_without_a_picker_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Envoy has failed open; a request that reached no engine is not one of them."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            log = Log(rig)
            await log.send(entry("10.0.0.1:80", picked=False), entry("", picked=False))
            await log.end()

    run(main())
    assert [record.message for record in caplog.records].count("picker_bypassed") == 1


def test_a_picker_that_drains_ends_the_streams_of_access_logs() -> None:
    """They last as long as their Envoy, so nothing else would end them."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            log = Log(rig)
            await log.send(entry(address_of_engine(rig)))
            await asyncio.wait_for(rig.gateway.drain(), 60)
            await until(log.call.done)

    run(main())


@given(st.ip_addresses(), st.integers(1, 65535))
def test_an_address_is_written_as_endpoints_are(ip: object, port: int) -> None:
    """IPv6 in brackets; no address is empty text."""
    written = address_text(SocketAddress(address=str(ip), port_value=port))
    assert written == (f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}")
    assert address_text(SocketAddress()) == ""
