"""The circuit breaker: against a model that remembers everything, then the ways that breakers are known to stick."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvroute.gateway.breaker import Breaker, is_failure

FAILURES, WINDOW_S, OPEN_S, OPEN_MAX_S, PROBE_S = 3, 10.0, 4.0, 14.0, 6.0


def breaker(share: float = 0.5) -> Breaker:
    return Breaker(
        failures=FAILURES, window_s=WINDOW_S, open_s=OPEN_S, share=share, open_max_s=OPEN_MAX_S, probe_s=PROBE_S
    )


def opened(at: float = 0.0) -> Breaker:
    """Open since `at`, for the first time."""
    one = breaker()
    for attempt in [one.started(at) for _ in range(FAILURES)]:
        one.failed(attempt, at)
    assert one.state(at) == "open"
    return one


class AgainstTheModel(RuleBasedStateMachine):
    """The model keeps every period between two changes of state, with all that was started and reported in it."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = breaker()
        self.now = 0.0
        self.state = "closed"
        self.period = 0
        self.opened_at = 0.0
        self.reopenings = 0
        self.outcomes: list[tuple[float, bool]] = []
        """Time and success of what counted in this closed period."""
        self.probe: int | None = None
        self.probe_at = 0.0
        self.running: dict[int, int] = {}
        """Attempt to the period it was started in."""

    @initialize(at=st.floats(0, 100))
    def begin(self, at: float) -> None:
        self.now = at

    def enter(self, state: str) -> None:
        self.state, self.probe, self.outcomes = state, None, []
        self.period += 1

    def open_s(self) -> float:
        return float(min(OPEN_S * 2**self.reopenings, OPEN_MAX_S))

    def expected(self) -> bool:
        if self.state == "open":
            return self.now >= self.opened_at + self.open_s()
        return self.state == "closed" or self.probe is None or self.now >= self.probe_at + PROBE_S

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.expected())
    @rule()
    def send(self) -> None:
        if self.state == "open":
            self.enter("half-open")
        attempt = self.breaker.started(self.now)
        assert attempt not in self.running
        self.running[attempt] = self.period
        if self.state == "half-open":
            self.probe, self.probe_at = attempt, self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.sampled_from(["succeeded", "failed", "failed", "cancelled"]))
    def end(self, data: st.DataObject, end: str) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        counts = self.running.pop(attempt) == self.period
        if end == "cancelled":
            self.breaker.cancelled(attempt, self.now)
            if attempt == self.probe:
                self.probe = None
            return
        (self.breaker.succeeded if end == "succeeded" else self.breaker.failed)(attempt, self.now)
        if not counts or self.state == "open":
            return
        if self.state == "half-open":
            self.reopenings = 0 if end == "succeeded" else self.reopenings + 1
            self.enter("closed" if end == "succeeded" else "open")
        else:
            self.outcomes.append((self.now, end == "succeeded"))
            if end == "failed" and self.too_many():
                self.enter("open")
        if self.state == "open":
            self.opened_at = self.now

    def too_many(self) -> bool:
        in_a_row = [good for _, good in self.outcomes[-FAILURES:]]
        slice_s = WINDOW_S / 10
        recent = [good for at, good in self.outcomes if at // slice_s > self.now // slice_s - 10]
        many = len(recent) >= 4 * FAILURES and recent.count(False) * 2 >= len(recent)
        return many or (len(in_a_row) == FAILURES and not any(in_a_row))

    @invariant()
    def they_agree(self) -> None:
        assert self.breaker.allows(self.now) == self.expected()
        over = self.state == "open" and self.expected()
        assert self.breaker.state(self.now) == ("half-open" if over else self.state)

    @invariant()
    def it_never_refuses_for_ever(self) -> None:
        until = self.breaker.refuses_until(self.now)
        assert (until is None) == self.breaker.allows(self.now)
        if until is not None:
            assert self.now < until <= self.now + max(OPEN_MAX_S, PROBE_S)
            assert self.breaker.allows(until)


AgainstTheModel.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestAgainstTheModel = AgainstTheModel.TestCase


@given(st.lists(st.booleans(), min_size=200, max_size=200), st.sampled_from([0.3, 0.5, 0.9]))
@settings(max_examples=60, deadline=None)
def test_the_share_of_failures_opens_it_though_no_run_does(good: list[bool], share: float) -> None:
    """Ten requests a second; what the window's outcomes say is recomputed from all of them."""
    one = Breaker(failures=5, window_s=10.0, share=share)
    for index, success in enumerate(good):
        at = index * 0.1
        attempt = one.started(at)
        (one.succeeded if success else one.failed)(attempt, at)
        seen = [g for i, g in enumerate(good[: index + 1]) if int(i * 0.1) > int(at) - 10]
        run = not any(good[max(0, index - 4) : index + 1]) and index >= 4
        bad = not success and ((len(seen) >= 20 and seen.count(False) >= share * len(seen)) or run)
        assert (one.state(at) == "open") == bad
        if bad:
            return


def test_a_probe_whose_client_leaves_makes_room_for_another_at_once() -> None:
    one = opened()
    probe = one.started(OPEN_S)
    assert not one.allows(OPEN_S)
    one.cancelled(probe, OPEN_S)
    assert one.allows(OPEN_S)
    one.succeeded(one.started(OPEN_S), OPEN_S)
    assert one.state(OPEN_S) == "closed"


def test_a_probe_that_never_ends_makes_room_after_its_time() -> None:
    one = opened()
    one.started(OPEN_S)
    assert one.refuses_until(OPEN_S) == OPEN_S + PROBE_S
    assert one.allows(OPEN_S + PROBE_S)
    one.started(OPEN_S + PROBE_S)
    assert not one.allows(OPEN_S + PROBE_S), "one more, not all"


def test_a_late_probe_still_decides_and_its_client_leaving_takes_no_other_ones_place() -> None:
    one = opened()
    late = one.started(OPEN_S)
    one.started(OPEN_S + PROBE_S)
    one.cancelled(late, 11.0)
    assert not one.allows(11.0)
    one = opened()
    late = one.started(OPEN_S)
    one.started(OPEN_S + PROBE_S)
    one.succeeded(late, 11.0)
    assert one.state(11.0) == "closed"


def test_a_request_sent_against_advice_does_not_prolong_the_probes_place() -> None:
    one = opened()
    probe = one.started(OPEN_S)
    one.started(OPEN_S + 1)
    assert one.refuses_until(OPEN_S + 1) == OPEN_S + PROBE_S
    one.cancelled(probe, OPEN_S + 1)
    assert one.allows(OPEN_S + 1)


def test_old_requests_decide_nothing_while_a_probe_is_out() -> None:
    one = breaker()
    old = [one.started(0.0) for _ in range(FAILURES + 2)]
    for attempt in old[:FAILURES]:
        one.failed(attempt, 0.0)
    probe = one.started(OPEN_S)
    one.failed(old[-1], OPEN_S)
    assert one.state(OPEN_S) == "half-open", "it does not reopen"
    one.succeeded(old[-2], OPEN_S)
    assert one.state(OPEN_S) == "half-open", "it does not close"
    one.succeeded(probe, OPEN_S)
    assert one.state(OPEN_S) == "closed"


def test_the_open_time_doubles_up_to_its_bound_and_starts_afresh() -> None:
    one, now, lengths = opened(), 0.0, []
    for _ in range(4):
        until = one.refuses_until(now)
        assert until is not None
        lengths.append(until - now)
        now = until
        one.failed(one.started(now), now)
    assert lengths == [4.0, 8.0, 14.0, 14.0]
    until = one.refuses_until(now)
    assert until is not None
    one.succeeded(one.started(until), until)
    for attempt in [one.started(until) for _ in range(FAILURES)]:
        one.failed(attempt, until)
    assert one.refuses_until(until) == until + OPEN_S


@given(st.lists(st.sampled_from(["good", "bad", "forgiven"]), max_size=60))
def test_what_is_forgiven_counts_as_little_as_if_it_had_not_been(ends: list[str]) -> None:
    """The same sequence without it leads to the same state."""
    one, other = breaker(), breaker()
    for end in ends:
        attempt = one.started(1.0)
        if end == "forgiven":
            before = one.state(1.0)
            one.failed(attempt, 1.0)
            if one.state(1.0) != before:
                return  # what it has led to stays
            one.forgiven(attempt)
            continue
        (one.succeeded if end == "good" else one.failed)(attempt, 1.0)
        (other.succeeded if end == "good" else other.failed)(other.started(1.0), 1.0)
        assert one.state(1.0) == other.state(1.0)


def test_what_is_forgiven_does_not_count_against_later_failures_either() -> None:
    """It leaves the window's sums at once, and not a second time with its age."""
    one = breaker()
    for _ in range(10):
        attempt = one.started(0.0)
        one.failed(attempt, 0.0)
        one.forgiven(attempt)
    later = 2 * WINDOW_S
    for _ in range(2 * FAILURES):
        assert one.state(later) == "closed"
        one.succeeded(one.started(later), later)
        one.failed(one.started(later), later)
    assert one.state(later) == "open"


def test_what_is_forgiven_too_late_changes_nothing() -> None:
    """The breaker has opened meanwhile, or closed again."""
    one = breaker()
    attempts = [one.started(0.0) for _ in range(FAILURES)]
    for attempt in attempts:
        one.failed(attempt, 0.0)
    one.forgiven(attempts[-1])
    assert one.state(0.0) == "open"
    one.succeeded(one.started(OPEN_S), OPEN_S)
    one.failed(one.started(OPEN_S), OPEN_S)
    one.forgiven(attempts[0])
    for attempt in [one.started(OPEN_S) for _ in range(FAILURES - 1)]:
        one.failed(attempt, OPEN_S)
    assert one.state(OPEN_S) == "open"


@pytest.mark.parametrize(
    ("status", "failure"),
    [(200, False), (400, False), (404, False), (429, False), (500, True), (501, False), (503, True)],
)
def test_a_clients_fault_is_not_the_instances(status: int, failure: bool) -> None:
    assert is_failure(status) is failure
