"""Event loop lag: the law of a timeout, the measurement of lag, and that a late loop blames no engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.http.upstream_rig import GET, RecordedResponse

from kvroute.http.client.poller import PollSpec
from kvroute.http.client.pool import UpstreamPool
from kvroute.http.deadlines import NEVER_S, Deadlines
from kvroute.http.loop_lag import DISCARD_AFTER, LoopLag, judge
from kvroute.serve.engines.health import HealthChecks

TIMEOUT_S = 0.2
seconds = st.floats(0, 100)


def stall(seconds_s: float) -> None:
    """Block the event loop like a callback that computes for too long."""
    until_s = time.monotonic() + seconds_s
    while time.monotonic() < until_s:
        pass


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    uvloop.run(bounded())


@given(st.floats(0.001, 100), seconds, st.floats(0, 1))
def test_a_timeout_counts_as_a_failure_only_after_enough_time_without_loop_lag(
    timeout_s: float, elapsed_s: float, late_share: float
) -> None:
    """Without lag, a timeout is a failure. A loop whose on-time part is less than the timeout blames no engine, and
    every check is decided in the end."""
    lag_s = elapsed_s * late_share
    verdict = judge(timeout_s, elapsed_s, lag_s)
    assert (verdict == "failed") == (elapsed_s - lag_s >= timeout_s)
    assert judge(timeout_s, timeout_s, 0.0) == "failed"
    if verdict == "wait":
        assert elapsed_s < DISCARD_AFTER * timeout_s
    if verdict == "discarded":
        assert lag_s > (1 - 1 / DISCARD_AFTER) * elapsed_s * (1 - 1e-9), "the loop was late most of the time"


@given(st.floats(0.001, 100), seconds, seconds, seconds)
def test_more_lag_never_causes_a_failure_and_more_time_never_undoes_one(
    timeout_s: float, elapsed_s: float, lag_s: float, more_s: float
) -> None:
    if judge(timeout_s, elapsed_s, lag_s) != "failed":
        assert judge(timeout_s, elapsed_s, lag_s + more_s) != "failed"
    else:
        assert judge(timeout_s, elapsed_s + more_s, lag_s) == "failed"


def test_lag_is_the_delay_of_a_timer_during_and_after_the_delay() -> None:
    """The lag includes a late timer that has not run yet, because others due in the same turn read it."""

    async def scenario() -> None:
        clock = [0.0]
        lags: list[float] = []
        lag = LoopLag(lags.append, period_s=0.01, now=lambda: clock[0])
        assert lag.total_s() == 0.0
        lag.start()
        clock[0] = 3.01
        assert lag.total_s() == 3.0
        while not lags:
            await asyncio.sleep(0)
        assert lags == [3.0]
        assert lag.total_s() == 3.0
        clock[0] += 0.01
        while len(lags) < 2:
            await asyncio.sleep(0)
        assert lags[1] == 0.0
        assert lag.total_s() == 3.0, "a timer that runs in time adds nothing"
        lag.close()

    run(scenario)


def test_deadlines_move_by_the_lag() -> None:
    """Each deadline moves by the lag; an infinite one stays infinite."""

    class Waiting:
        def __init__(self, deadline_s: float) -> None:
            self.deadline_s, self.expired = deadline_s, False

        def expire(self, now: float) -> None:
            self.expired, self.deadline_s = True, NEVER_S

    async def scenario() -> None:
        clock = [0.0]
        lag = LoopLag(period_s=0.01, now=lambda: clock[0])
        lag.start()
        deadlines, loop = Deadlines(0.01, lag), asyncio.get_running_loop()
        due_s = loop.time() - 1.0
        late, never, overdue = Waiting(due_s), Waiting(NEVER_S), Waiting(due_s - 10_000.0)
        for waiting in (late, never, overdue):
            deadlines.watch(waiting)
        clock[0] = 5000.01
        while not overdue.expired:
            await asyncio.sleep(0)
        assert not late.expired
        assert late.deadline_s == due_s + 5000.0
        assert never.deadline_s == NEVER_S
        late.deadline_s = due_s
        while not late.expired:
            await asyncio.sleep(0)
        for waiting in (late, never, overdue):
            deadlines.forget(waiting)
        lag.close()

    run(scenario)


def test_a_stalled_loop_fails_no_health_check_and_a_silent_engine_still_fails_it() -> None:
    """One stall only prolongs the check; if the loop is late by three timeouts, the check is discarded."""

    async def scenario() -> None:
        responds = True
        requests = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal requests
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    requests += 1
                    if responds:
                        stall(1.5 * TIMEOUT_S)
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        lag = LoopLag(period_s=0.01)
        lag.start()
        pool = UpstreamPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", deadlines=Deadlines(0.01, lag))
        changes: list[bool] = []
        discarded: list[str] = []
        checks = HealthChecks(
            ["a"],
            {"a": pool}.get,
            lambda name, up, at: changes.append(up),
            lambda: 0.0,
            PollSpec(path="/health", interval_s=0.01, timeout_s=TIMEOUT_S, lag=lag, on_discard=discarded.append),
            failures=1,
        )
        checks.start()
        while requests < 5:
            await asyncio.sleep(0.001)
        assert checks.all_checked
        assert not changes, checks.why("a")
        responds = False
        while not discarded:
            stall(2 * TIMEOUT_S)
            await asyncio.sleep(0)
        assert set(discarded) == {"a"}
        assert not changes, checks.why("a")
        while not changes:
            await asyncio.sleep(0.001)
        assert changes == [False]
        assert checks.why("a")
        checks.close()
        pool.close()
        lag.close()
        server.close()

    run(scenario)


def test_a_stalled_loop_fails_no_request_leg() -> None:
    """The loop stalls during the connect and during the wait for the first byte; the response was available all the
    time."""

    async def scenario() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    await writer.drain()
                    stall(2 * TIMEOUT_S)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        lag = LoopLag(period_s=0.01)
        lag.start()
        deadlines = Deadlines(0.01, lag)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pool = UpstreamPool(url, connect_s=TIMEOUT_S, deadlines=deadlines)
        for _ in range(5):
            response = RecordedResponse()
            pool.send(GET, response, first_byte_s=TIMEOUT_S, idle_s=TIMEOUT_S)
            if not pool.idle:
                asyncio.get_running_loop().call_soon(stall, 2 * TIMEOUT_S)
            await response.ended.wait()
            assert response.failure is None, response.failure
            await asyncio.sleep(0)
        pool.close()
        lag.close()
        server.close()

    run(scenario)
