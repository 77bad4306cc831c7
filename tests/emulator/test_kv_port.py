"""The KV port of an emulated engine: limits for unknown peers, and reuse of a transfer ID."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.emulator.test_early import PROMPT, Sites, on_sites
from tests.emulator.test_wan import AWAY, Hand
from tests.waiting import until

from kvroute.emulator.kv.kv_arrivals import HandshakeBounds
from kvroute.emulator.kv.kv_wire import (
    LINE_BYTES_MAX,
    PullFailed,
    PullHeader,
    PullRequest,
    pull,
    read_order,
    read_pull_header,
)


class Silent:
    """The connection of a peer that sends nothing."""

    def __init__(self) -> None:
        self.broken = 0

    def abort(self) -> None:
        """Count the aborts; at most one is allowed."""
        self.broken += 1


@given(
    most=st.integers(1, 4),
    steps=st.lists(st.one_of(st.just("arrive"), st.integers(0, 20), st.floats(0.0, 3.0)), max_size=40),
)
def test_silent_connections_are_bounded_in_number_and_time(most: int, steps: list[str | int | float]) -> None:
    """Never more than `most` wait; the oldest ones are closed first, none waits longer than 5 s, and those with a
    request are kept."""
    clock = Hand()
    arrivals = HandshakeBounds(clock, most, order_s=5.0)
    everyone: list[Silent] = []
    waiting: list[tuple[float, Silent]] = []
    for step in steps:
        match step:
            case "arrive":
                everyone.append(Silent())
                waiting.append((clock.now(), everyone[-1]))
                arrivals.begin(everyone[-1])
                waiting = waiting[-most:]
            case int() if step < len(everyone):
                arrivals.end(everyone[step])
                waiting = [(since, task) for since, task in waiting if task is not everyone[step]]
            case float():
                clock.run(clock.now() + step)
                waiting = [(since, task) for since, task in waiting if clock.now() < since + 5.0]
        assert len(arrivals) == len(waiting)
        assert not any(task.broken for _, task in waiting)
    assert all(connection.broken <= 1 for connection in everyone)


@given(st.binary(max_size=200) | st.binary(min_size=LINE_BYTES_MAX, max_size=LINE_BYTES_MAX + 50))
def test_any_bytes_parse_or_give_an_error_message(data: bytes) -> None:
    """Any response is parsed or gives an error message too; sizes are never negative."""
    order, parcel = read_order(data), read_pull_header(data)
    assert isinstance(order, PullRequest | str)
    assert isinstance(parcel, PullHeader | str)


@pytest.mark.parametrize(
    "line", [b'{"source": "p", "wire_bytes": -1}', b'{"source": "p", "kv_bytes": -1.0}', b"[" * 4000]
)
def test_invalid_responses_are_rejected(line: bytes) -> None:
    assert isinstance(read_pull_header(line), str)


@given(key=st.text(max_size=40), target=st.text(max_size=40), cached_tokens=st.integers(0, 2**40), early=st.booleans())
def test_pull_requests_round_trip(key: str, target: str, cached_tokens: int, early: bool) -> None:
    order = PullRequest(key, target, cached_tokens, awaited=early, early=early)
    assert read_order(msgspec.json.encode(order) + b"\nwhatever follows") == order


@pytest.mark.parametrize("begin", [b"", b"GET "], ids=["order", "query"])
def test_a_connection_that_sends_a_long_line_is_aborted(begin: bytes) -> None:
    """The connection is aborted at once, while an earlier silent connection stays open; other peers are served."""

    async def check(sites: Sites) -> None:
        host, _, port = sites.fleet.ready().instances[AWAY].bootstrap.rpartition(":")
        silent_reader, silent_writer = await asyncio.open_connection(host, int(port))
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begin + b"x" * LINE_BYTES_MAX)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert not silent_reader.at_eof()
        for writer_ in (writer, silent_writer):
            writer_.close()
            with suppress(ConnectionError):
                await writer_.wait_closed()
        answers = await asyncio.gather(sites.decode("k"), sites.prefill("k"))
        assert [status for status, _ in answers] == [200, 200]

    on_sites(check)


@pytest.mark.parametrize("answer", [b"x" * (2 * LINE_BYTES_MAX), b'{"source": 1}\n', b"\xff\n"])
def test_a_pull_from_a_source_with_an_invalid_response_fails(answer: bytes) -> None:
    """The pull fails with an error message, and reading is bounded."""

    async def main() -> None:
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            with suppress(ConnectionError):
                writer.write(answer)
                await writer.drain()
                await reader.read()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            left.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            with pytest.raises(PullFailed, match="cannot be read"):
                await pull("127.0.0.1", server.sockets[0].getsockname()[1], PullRequest("k", "t"))
            await left.wait()

    asyncio.run(main())


def test_a_name_in_use_is_rejected() -> None:
    """A different prompt is rejected; the same prompt may be held again, and the held KV stays."""

    async def check(sites: Sites) -> None:
        assert (await sites.prefill("k"))[0] == 200
        status, answer = await sites.prefill("k", PROMPT + "and another end")
        assert (status, "held under k" in answer["error"]["message"]) == (409, True)
        assert (await sites.prefill("k"))[0] == 200
        assert sites.held() == 1
        assert (await sites.decode("k"))[0] == 200
        await until(lambda: sites.held() == 0)
        assert (await sites.prefill("k", PROMPT + "and another end"))[0] == 200

    on_sites(check)
