"""The poller in virtual time: each engine is polled once per interval, however long the gateway runs and whatever
engines come and go."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kvroute.http.client.poller import Poller, PollSpec

INTERVAL_S = 10.0
EXACT_S = 1e-6
"""Rounding error of times after hours."""
LATE_S = 0.01 + EXACT_S
"""A poll waits that long at most after the poll of another engine."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(JumpingSelector(self))

    def time(self) -> float:
        return self.now_s


class JumpingSelector(selectors.DefaultSelector):
    """Moves the clock by the time that it is asked to wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


class Polled:
    """A poller and the times of its polls."""

    def __init__(self, loop: VirtualLoop, names: list[str], settings: PollSpec) -> None:
        self.times: dict[str, list[float]] = {}
        self._loop = loop
        self.poller = Poller(names, self._pool_of, lambda *_: None, settings)

    def _pool_of(self, name: str) -> None:
        """Record a poll that is due; without a pool it is not sent."""
        self.times.setdefault(name, []).append(self._loop.time())

    def gaps(self, name: str, begin_s: float, end_s: float) -> list[float]:
        """Return the times between polls of an engine in a period, with those to its ends."""
        times = [begin_s, *(at for at in self.times.get(name, ()) if begin_s < at < end_s), end_s]
        return [later - earlier for earlier, later in pairwise(times)]


def run(names: list[str], scenario: Callable[[Polled], Any], settings: PollSpec | None = None) -> None:
    """Run a scenario, a coroutine function, in virtual time."""
    plain = PollSpec(path="/health", interval_s=INTERVAL_S, timeout_s=1.0)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        polled = Polled(loop, names, settings or plain)

        async def whole() -> None:
            polled.poller.start()
            await scenario(polled)
            polled.poller.close()

        runner.run(whole())


def test_the_engines_that_stay_are_polled_after_hours_as_before() -> None:
    """Nine of ten engines leave after hours; the last one is polled once per interval from then on."""
    names = [f"decode{number}" for number in range(10)]

    async def scenario(polled: Polled) -> None:
        await asyncio.sleep(20_000)
        left_s = asyncio.get_running_loop().time()
        for name in names[1:]:
            polled.poller.remove(name)
        await asyncio.sleep(10 * INTERVAL_S)
        gaps = polled.gaps(names[0], left_s, left_s + 10 * INTERVAL_S)
        assert len(gaps) - 1 in (9, 10)
        assert max(gaps) <= INTERVAL_S + EXACT_S

    run(names, scenario)


changes = st.lists(st.tuples(st.floats(0.0, 5_000.0), st.integers(0, 5)), max_size=8)


@example(set(), [(0.0, 0), (3.825, 1), (100.0, 0)], 0.0)
@given(st.sets(st.integers(0, 5)), changes, st.floats(0.0, 1.0))
def test_engines_that_come_and_go_change_the_polls_of_no_other_engine(
    first: set[int], changes: list[tuple[float, int]], jitter: float
) -> None:
    """Law: an engine is polled when it comes, again within two intervals, and then once per interval. In the example,
    two engines are due within 5 ms, so the later one is polled when the poller's shortest timer ends."""
    longest_s = INTERVAL_S * (1 + jitter) + LATE_S
    present: dict[str, float] = {f"engine{number}": 0.0 for number in sorted(first)}

    def check(polled: Polled, name: str, begin_s: float, end_s: float) -> None:
        gaps = polled.gaps(name, begin_s, end_s)
        assert gaps[0] <= 2 * INTERVAL_S + LATE_S
        assert all(gap <= longest_s for gap in gaps[1:])
        assert all(gap >= INTERVAL_S - LATE_S for gap in gaps[:-1])
        assert begin_s in polled.times[name]

    async def scenario(polled: Polled) -> None:
        now = asyncio.get_running_loop().time
        for wait_s, number in changes:
            await asyncio.sleep(wait_s)
            name = f"engine{number}"
            if name in present:
                polled.poller.remove(name)
                check(polled, name, present.pop(name), now())
            else:
                polled.poller.add(name)
                present[name] = now()
        await asyncio.sleep(10 * longest_s)
        for name, since_s in present.items():
            check(polled, name, since_s, now())

    settings = PollSpec(path="/", interval_s=INTERVAL_S, timeout_s=1.0, jitter=jitter, draw=lambda: 1.0)
    run(list(present), scenario, settings)


def test_polls_that_a_stopped_process_has_missed_are_not_made_up_for() -> None:
    """After a long stop every engine is polled once, and then once per interval."""
    names = ["a", "b", "c"]

    async def scenario(polled: Polled) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(INTERVAL_S / 2)
        before = {name: len(polled.times[name]) for name in names}
        loop.now_s += 1_000 * INTERVAL_S
        await asyncio.sleep(INTERVAL_S * 0.9)
        assert all(1 <= len(polled.times[name]) - before[name] <= 2 for name in names)

    run(names, scenario)
