"""Writes of one turn of the event loop: their order, when they are sent, and transports that close."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tests.http.server_rig import run

from kvroute.http.forwarding.turn_writes import TurnTransport

LARGE = b"x" * 20_000


class Recorder(asyncio.Transport):
    """Records the calls that reach the real transport."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.closing = False
        self.on_write: Callable[[], None] = lambda: None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))
        self.on_write()

    def writelines(self, list_of_data: Any) -> None:
        self.calls += list(list_of_data)

    def close(self) -> None:
        self.calls.append("close")
        self.closing = True

    def abort(self) -> None:
        self.calls.append("abort")
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.calls.append("eof")

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def get_write_buffer_size(self) -> int:
        return sum(len(call) for call in self.calls)


async def turn() -> None:
    """Let the loop end its turn."""
    await asyncio.sleep(0)


def test_writes_wait_for_the_end_of_the_turn_and_keep_their_order() -> None:
    async def scenario() -> None:
        first, second = Recorder(), Recorder()
        one, other = TurnTransport(first), TurnTransport(second)
        one.write(b"1")
        other.write(b"2")
        one.write(b"3")
        assert first.calls == second.calls == []
        await turn()
        assert (first.calls, second.calls) == ([b"1", b"3"], [b"2"])
        one.write(b"4")
        await turn()
        assert first.calls == [b"1", b"3", b"4"]

    run(scenario())


@pytest.mark.parametrize(
    ("act", "called"),
    [
        (TurnTransport.close, ["close"]),
        (TurnTransport.abort, ["abort"]),
        (TurnTransport.write_eof, ["eof"]),
        (lambda transport: transport.write(LARGE), [LARGE]),
        (lambda transport: transport.write_now(b"2"), [b"2"]),
        (lambda transport: transport.writelines((b"a", LARGE)), [b"a", LARGE]),
    ],
)
def test_what_follows_a_write_comes_after_it(act: Callable[[TurnTransport], None], called: list[Any]) -> None:
    async def scenario() -> None:
        own = Recorder()
        transport = TurnTransport(own)
        transport.write(b"1")
        act(transport)
        assert own.calls == [b"1", *called]
        await turn()
        assert own.calls == [b"1", *called]

    run(scenario())


def test_unsent_bytes_include_what_waits() -> None:
    async def scenario() -> None:
        transport = TurnTransport(Recorder())
        transport.write(b"12345")
        assert transport.get_write_buffer_size() == 5

    run(scenario())


def test_no_more_writes_wait_than_allowed() -> None:
    async def scenario() -> None:
        own = Recorder()
        transport = TurnTransport(own)
        for number in range(40):
            transport.write(b"%d" % number)
        assert own.calls == [b"%d" % number for number in range(32)]
        await turn()
        assert own.calls == [b"%d" % number for number in range(40)]

    run(scenario())


def test_a_closing_transport_gets_nothing_and_a_failing_one_harms_no_other() -> None:
    async def scenario() -> None:
        closing, failing, good = Recorder(), Recorder(), Recorder()
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

        def fail() -> None:
            raise OSError("no")

        failing.on_write = fail
        for own in (closing, failing, good):
            TurnTransport(own).write(b"1")
        closing.closing = True
        await turn()
        assert (closing.calls, good.calls) == ([], [b"1"])
        assert [str(context["exception"]) for context in reported] == ["no"]

    run(scenario())


def test_a_write_from_within_a_write_is_sent_too() -> None:
    """A transport with much unsent data pauses its writer, which may answer with another write."""

    async def scenario() -> None:
        first, second = Recorder(), Recorder()
        one, other = TurnTransport(first), TurnTransport(second)

        def once() -> None:
            first.on_write = lambda: None
            other.write(b"2")

        first.on_write = once
        one.write(b"1")
        await turn()
        await turn()
        assert second.calls == [b"2"]

    run(scenario())


def test_a_loop_that_has_ended_is_freed() -> None:
    """Otherwise its connections and their requests would be kept, too."""

    async def scenario() -> weakref.ref[asyncio.AbstractEventLoop]:
        TurnTransport(Recorder()).write(b"1")
        await turn()
        return weakref.ref(asyncio.get_running_loop())

    ended = run(scenario())
    gc.collect()
    assert ended() is None
