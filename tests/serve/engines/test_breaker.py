"""The circuit breaker: comparison with a model that stores all history, then known ways in which breakers get stuck."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvroute.serve.engines.breaker import Attempt, Breaker, Cause

FAILURES, WINDOW_S, OPEN_S, OPEN_MAX_S, PROBE_S = 3, 10.0, 4.0, 14.0, 6.0
CAUSES: tuple[Cause, ...] = ("no_answer", "error", "unexplained")


def make_breaker(share: float = 0.5) -> Breaker:
    return Breaker(
        failures=FAILURES, window_s=WINDOW_S, open_s=OPEN_S, share=share, open_max_s=OPEN_MAX_S, probe_s=PROBE_S
    )


def report(breaker: Breaker, attempt: Attempt, end: str, now: float) -> None:
    """Report the end of an attempt by its name: a cause of failure or another outcome."""
    if end in CAUSES:
        breaker.failed(attempt, now, end)
    else:
        {"succeeded": breaker.succeeded, "cancelled": breaker.cancelled, "discounted": breaker.discount_failure}[end](
            attempt, now
        )


def opened(at: float = 0.0) -> Breaker:
    """Return a breaker that opened at `at` for the first time."""
    breaker = make_breaker()
    for attempt in [breaker.started(at) for _ in range(FAILURES)]:
        breaker.failed(attempt, at)
    assert breaker.state(at) == "open"
    return breaker


class BreakerMachine(RuleBasedStateMachine):
    """The model stores every period between two state changes, with all attempts started and reported in it."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = make_breaker()
        self.now = 0.0
        self.state = "closed"
        self.period = 0
        self.opened_at = 0.0
        self.reopenings = 0
        self.outcomes: list[tuple[float, str]] = []
        """Time and kind of each outcome that counted in this closed period."""
        self.probe: int | None = None
        self.probe_at = 0.0
        self.running: dict[int, int] = {}
        """The period in which each running attempt was started, by attempt."""

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
    @rule(data=st.data(), end=st.sampled_from(["succeeded", "cancelled", "discounted", *CAUSES, "no_answer"]))
    def end(self, data: st.DataObject, end: str) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        counts = self.running.pop(attempt) == self.period
        report(self.breaker, attempt, end, self.now)
        if attempt == self.probe and end in ("cancelled", "discounted"):
            self.probe = None
        if not counts or self.state == "open" or end == "cancelled":
            return
        if self.state == "closed":
            if end == "unexplained" and self.recent().count("discounted") > self.bad(self.recent()):
                return
            self.outcomes.append((self.now, end))
            if end in CAUSES and self.too_many():
                self.enter("open")
        elif end != "discounted":
            self.reopenings = 0 if end == "succeeded" else self.reopenings + (end != "unexplained")
            self.enter("closed" if end == "succeeded" else "open")
        if self.state == "open":
            self.opened_at = self.now

    def recent(self) -> list[str]:
        slice_s = WINDOW_S / 10
        return [end for at, end in self.outcomes if at // slice_s > self.now // slice_s - 10]

    def bad(self, ends: list[str]) -> int:
        return sum(end in CAUSES for end in ends)

    def too_many(self) -> bool:
        counted = [end for end in self.recent() if end != "discounted"]
        all_ends = [end for _, end in self.outcomes]
        run = all_ends[len(all_ends) - all_ends[::-1].index("succeeded") :] if "succeeded" in all_ends else all_ends
        weight = sum({"no_answer": 4, "discounted": 0}.get(end, 1) for end in run)
        return weight >= 4 * FAILURES or (len(counted) >= 4 * FAILURES and self.bad(counted) * 2 >= len(counted))

    @invariant()
    def model_agrees(self) -> None:
        assert self.breaker.allows(self.now) == self.expected()
        over = self.state == "open" and self.expected()
        assert self.breaker.state(self.now) == ("half-open" if over else self.state)

    @invariant()
    def it_allows_a_request_eventually(self) -> None:
        until = self.breaker.refuses_until(self.now)
        assert (until is None) == self.breaker.allows(self.now)
        if until is not None:
            assert self.now < until <= self.now + max(OPEN_MAX_S, PROBE_S)
            assert self.breaker.allows(until)


BreakerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestBreaker = BreakerMachine.TestCase


@given(st.lists(st.booleans(), min_size=200, max_size=200), st.sampled_from([0.3, 0.5, 0.9]))
@settings(max_examples=60, deadline=None)
def test_the_error_rate_opens_the_breaker_without_consecutive_failures(outcomes: list[bool], share: float) -> None:
    """At ten requests a second, the share is recomputed from all outcomes of the window."""
    breaker = Breaker(failures=5, window_s=10.0, share=share)
    for index, success in enumerate(outcomes):
        at = index * 0.1
        attempt = breaker.started(at)
        (breaker.succeeded if success else breaker.failed)(attempt, at)
        recent = [outcome for i, outcome in enumerate(outcomes[: index + 1]) if int(i * 0.1) > int(at) - 10]
        run = not any(outcomes[max(0, index - 4) : index + 1]) and index >= 4
        bad = not success and ((len(recent) >= 20 and recent.count(False) >= share * len(recent)) or run)
        assert (breaker.state(at) == "open") == bad
        if bad:
            return


def test_a_probe_aborted_by_its_client_allows_another_probe_at_once() -> None:
    breaker = opened()
    probe = breaker.started(OPEN_S)
    assert not breaker.allows(OPEN_S)
    breaker.cancelled(probe, OPEN_S)
    assert breaker.allows(OPEN_S)
    breaker.succeeded(breaker.started(OPEN_S), OPEN_S)
    assert breaker.state(OPEN_S) == "closed"


def test_a_probe_that_never_ends_allows_another_one_after_the_timeout() -> None:
    breaker = opened()
    breaker.started(OPEN_S)
    assert breaker.refuses_until(OPEN_S) == OPEN_S + PROBE_S
    assert breaker.allows(OPEN_S + PROBE_S)
    breaker.started(OPEN_S + PROBE_S)
    assert not breaker.allows(OPEN_S + PROBE_S), "only one more"


def test_a_late_probe_still_decides_and_its_abort_does_not_release_another_probe() -> None:
    breaker = opened()
    late = breaker.started(OPEN_S)
    breaker.started(OPEN_S + PROBE_S)
    breaker.cancelled(late, 11.0)
    assert not breaker.allows(11.0)
    breaker = opened()
    late = breaker.started(OPEN_S)
    breaker.started(OPEN_S + PROBE_S)
    breaker.succeeded(late, 11.0)
    assert breaker.state(11.0) == "closed"


def test_a_request_sent_despite_an_open_breaker_does_not_extend_the_probe() -> None:
    breaker = opened()
    probe = breaker.started(OPEN_S)
    breaker.started(OPEN_S + 1)
    assert breaker.refuses_until(OPEN_S + 1) == OPEN_S + PROBE_S
    breaker.cancelled(probe, OPEN_S + 1)
    assert breaker.allows(OPEN_S + 1)


def test_older_requests_do_not_change_the_state_while_a_probe_is_in_flight() -> None:
    breaker = make_breaker()
    old = [breaker.started(0.0) for _ in range(FAILURES + 2)]
    for attempt in old[:FAILURES]:
        breaker.failed(attempt, 0.0)
    probe = breaker.started(OPEN_S)
    breaker.failed(old[-1], OPEN_S)
    assert breaker.state(OPEN_S) == "half-open", "it does not reopen"
    breaker.succeeded(old[-2], OPEN_S)
    assert breaker.state(OPEN_S) == "half-open", "it does not close"
    breaker.succeeded(probe, OPEN_S)
    assert breaker.state(OPEN_S) == "closed"


def test_the_open_time_doubles_up_to_its_maximum_and_is_reset_after_a_success() -> None:
    breaker, now, lengths = opened(), 0.0, []
    for _ in range(4):
        until = breaker.refuses_until(now)
        assert until is not None
        lengths.append(until - now)
        now = until
        breaker.failed(breaker.started(now), now)
    assert lengths == [4.0, 8.0, 14.0, 14.0]
    until = breaker.refuses_until(now)
    assert until is not None
    breaker.succeeded(breaker.started(until), until)
    for attempt in [breaker.started(until) for _ in range(FAILURES)]:
        breaker.failed(attempt, until)
    assert breaker.refuses_until(until) == until + OPEN_S


@given(st.lists(st.sampled_from(["succeeded", "no_answer", "discounted"]), max_size=60))
def test_an_attempt_of_a_poison_request_does_not_change_the_state(ends: list[str]) -> None:
    """The same sequence of outcomes without such attempts leads to the same state."""
    breaker, other = make_breaker(), make_breaker()
    for end in ends:
        report(breaker, breaker.started(1.0), end, 1.0)
        if end != "discounted":
            report(other, other.started(1.0), end, 1.0)
        assert breaker.state(1.0) == other.state(1.0)


@st.composite
def poisoned(draw: st.DrawFn) -> tuple[float, list[str]]:
    """Draw a share and the outcomes of a healthy engine, where in each ten fewer than that share fail by poison
    requests."""
    tenths = draw(st.integers(2, 9))
    ends: list[str] = []
    for _ in range(draw(st.integers(1, 40))):
        bad = draw(st.integers(0, tenths - 1))
        causes = draw(st.lists(st.sampled_from(["error", "unexplained"]), min_size=bad, max_size=bad))
        ends += draw(st.permutations([*causes, *["succeeded"] * (10 - bad)]))
    return tenths / 10, ends


@given(poisoned(), st.floats(0.001, 0.02))
@settings(max_examples=60, deadline=None)
def test_poison_requests_below_the_error_rate_never_open_the_breaker(
    given_: tuple[float, list[str]], every_s: float
) -> None:
    """The verdict on each poison request and the order of the outcomes have no effect."""
    share, ends = given_
    breaker = Breaker(share=share)
    for number, end in enumerate(ends):
        report(breaker, breaker.started(number * every_s), end, number * every_s)
        assert breaker.state(number * every_s) == "closed"


@given(
    st.lists(st.sampled_from(["succeeded", "cancelled", *CAUSES]), max_size=80),
    st.lists(st.sampled_from(CAUSES), min_size=20, max_size=20),
    st.integers(1, 5),
)
def test_an_engine_that_always_fails_opens_its_breaker_soon(
    before: list[str], after: list[Cause], failures: int
) -> None:
    """The breaker opens after at most 4 * `failures` errors or `failures` attempts without an answer, whatever the
    history before."""
    breaker = Breaker(failures=failures)
    for end in before:
        report(breaker, breaker.started(0.0), end, 0.0)
        if breaker.state(0.0) == "open":
            return
    for cause in after[: 4 * failures]:
        report(breaker, breaker.started(1.0), cause, 1.0)
    assert breaker.state(1.0) == "open"
    breaker = Breaker(failures=failures)
    report(breaker, breaker.started(0.0), "succeeded", 0.0)
    for _ in range(failures):
        assert breaker.state(0.0) == "closed"
        report(breaker, breaker.started(0.0), "no_answer", 0.0)
    assert breaker.state(0.0) == "open"


def test_unexplained_errors_do_not_count_while_most_errors_were_caused_by_requests() -> None:
    """The retry budget cannot cover a flood of poison requests; errors that are certainly the engine's still count."""
    breaker = make_breaker()
    report(breaker, breaker.started(0.0), "discounted", 0.0)
    for _ in range(100):
        report(breaker, breaker.started(0.0), "unexplained", 0.0)
    assert breaker.state(0.0) == "closed"
    for _ in range(4 * FAILURES):
        report(breaker, breaker.started(0.0), "error", 0.0)
    assert breaker.state(0.0) == "open"


def test_a_probe_by_a_poison_request_does_not_extend_the_open_time() -> None:
    """A probe whose failure is discounted makes room for another probe at once; an unexplained one leaves the open time
    unchanged."""
    breaker = opened()
    breaker.discount_failure(breaker.started(OPEN_S), OPEN_S)
    assert breaker.allows(OPEN_S)
    report(breaker, breaker.started(OPEN_S), "unexplained", OPEN_S)
    assert breaker.refuses_until(OPEN_S) == 2 * OPEN_S
