"""Admission: limits hold, no request is lost or admitted twice, the order is first come, first served; then
Retry-After."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvroute.serve.proxy.admission.admission import (
    Accepted,
    AdmissionController,
    AdmissionLimits,
    Queued,
    Refused,
)

keys = st.sampled_from([None, "alice", "bob", "carol"])
limits = st.builds(
    AdmissionLimits,
    in_flight=st.integers(1, 4),
    queue=st.integers(0, 4),
    queue_wait_s=st.just(5.0),
    per_key=st.integers(1, 4),
    of_key=st.just({"carol": 2}),
)


class AdmissionMachine(RuleBasedStateMachine):
    """The model is a list of admitted requests and a list of waiting requests, both in the order of arrival."""

    @initialize(limits=limits)
    def open(self, limits: AdmissionLimits) -> None:
        self.limits, self.now, self.next = limits, 100.0, 0
        self.admission = AdmissionController(limits, 100.0)
        self.admitted: list[int] = []
        self.waiting: list[tuple[int, float]] = []
        self.key: dict[int, str | None] = {}
        self.admissions: Counter[int] = Counter()
        self.order: list[int] = []

    def admit_in_order(self, tickets: list[int]) -> None:
        """The requests that are admitted are those that have waited longest."""
        assert tickets == [ticket for ticket, _ in self.waiting[: len(tickets)]]
        del self.waiting[: len(tickets)]
        for ticket in tickets:
            self.enter_model(ticket)

    def enter_model(self, ticket: int) -> None:
        self.admitted.append(ticket)
        self.order.append(ticket)
        self.admissions[ticket] += 1

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=keys)
    def enter(self, key: str | None) -> None:
        ticket, self.next = self.next, self.next + 1
        self.key[ticket] = key
        present = [*self.admitted, *(t for t, _ in self.waiting)]
        held = sum(self.key[t] == key for t in present)
        most = self.limits.of_key.get(key or "", self.limits.per_key)
        entry = self.admission.acquire(ticket, key, self.now)
        if key is not None and held >= most:
            assert isinstance(entry, Refused)
            assert entry.status == 429
        elif len(self.admitted) < self.limits.in_flight and not self.waiting:
            assert entry == Accepted()
            self.enter_model(ticket)
        elif len(self.waiting) < self.limits.queue:
            assert entry == Queued(self.now + self.limits.queue_wait_s)
            self.waiting.append((ticket, self.now + self.limits.queue_wait_s))
        else:
            assert isinstance(entry, Refused)
            assert entry.status == 503
        assert not isinstance(entry, Refused) or 1 <= entry.retry_after_s <= 60

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.admitted))
        self.admitted.remove(ticket)
        self.admit_in_order(self.admission.release(ticket, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "leave"]))
    def cancel_waiting(self, data: st.DataObject, how: str) -> None:
        ticket = data.draw(st.sampled_from([ticket for ticket, _ in self.waiting]))
        self.waiting = [entry for entry in self.waiting if entry[0] != ticket]
        if how == "cancel":
            self.admission.cancel(ticket)
        else:
            assert self.admission.release(ticket, self.now) == []

    @precondition(lambda self: self.next)
    @rule(data=st.data())
    def leave_twice(self, data: st.DataObject) -> None:
        """Leaving has no effect for a request that is gone or was never admitted."""
        present = {*self.admitted, *(t for t, _ in self.waiting)}
        ticket = data.draw(st.integers(0, self.next - 1).filter(lambda t: t not in present) | st.just(-1))
        assert self.admission.release(ticket, self.now) == []
        self.admission.cancel(ticket)

    @rule()
    def expire(self) -> None:
        expired = [ticket for ticket, expires_at in self.waiting if expires_at <= self.now]
        assert self.admission.expire(self.now) == expired
        self.waiting = [entry for entry in self.waiting if entry[0] not in expired]

    @rule(limits=limits)
    def change(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.admit_in_order(self.admission.change(limits))

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "admission"):
            return
        assert self.admission.in_flight == len(self.admitted)
        assert self.admission.queued == len(self.waiting)
        present = [*self.admitted, *(t for t, _ in self.waiting)]
        for key in ("alice", "bob", "carol"):
            assert self.admission.held_by(key) == sum(self.key[t] == key for t in present)
        assert self.admission.expires_at == (self.waiting[0][1] if self.waiting else None)

    @invariant()
    def requests_wait_only_at_the_limit(self) -> None:
        if hasattr(self, "admission") and self.waiting:
            assert len(self.admitted) >= self.limits.in_flight

    @invariant()
    def each_request_is_admitted_once_and_in_order(self) -> None:
        if hasattr(self, "admission"):
            assert all(count == 1 for count in self.admissions.values())
            assert self.order == sorted(self.order)

    def teardown(self) -> None:
        """When all have left, nothing is held."""
        if not hasattr(self, "admission"):
            return
        while self.admitted:
            ticket = self.admitted.pop(0)
            self.admit_in_order(self.admission.release(ticket, self.now))
        assert (self.admission.in_flight, self.admission.queued, self.waiting) == (0, 0, [])
        assert not any(self.admission.held_by(key) for key in ("alice", "bob", "carol"))


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestAdmission = AdmissionMachine.TestCase


def busy(per_s: float, for_s: float, *, queue: int = 0, per_key: int = 1000) -> tuple[AdmissionController, float]:
    """Hold 100 admitted requests for `for_s` seconds: one leaves and another one enters `per_s` times a second."""
    in_flight = 100
    admission = AdmissionController(
        AdmissionLimits(in_flight=in_flight, queue=queue, queue_wait_s=1e6, per_key=per_key), 0.0
    )
    for ticket in range(in_flight):
        assert admission.acquire(ticket, f"key{ticket % 2}", 0.0) == Accepted()
    for turn in range(int(per_s * for_s)):
        at = (turn + 1) / per_s
        admission.release(turn, at)
        assert admission.acquire(turn + in_flight, f"key{turn % 2}", at) == Accepted()
    return admission, for_s


@given(st.floats(0.5, 50.0), st.floats(15.0, 100.0), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_retry_after_follows_the_measured_rate(per_s: float, for_s: float, queue: int) -> None:
    """Retry-After is (queue + 1) / rate within a factor of 1.5: the rate is of the last ten seconds, and seconds are
    whole."""
    admission, now = busy(per_s, for_s, queue=queue)
    for ticket in range(queue):
        assert isinstance(admission.acquire(10**6 + ticket, None, now), Queued)
    refused = admission.acquire(10**9, None, now)
    assert isinstance(refused, Refused)
    assert refused.status == 503
    wait_s = (queue + 1) / per_s
    assert min(60, max(1, wait_s / 1.5)) <= refused.retry_after_s <= min(60, wait_s * 1.5 + 1)


def test_retry_after_of_a_key_depends_on_its_own_requests() -> None:
    """The key has 50 of 100 requests and ten requests leave each second, so one of the key leaves within 0.2 s."""
    admission, now = busy(10.0, 50.0, per_key=50)
    refused = admission.acquire(10**6, "key0", now)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.retry_after_s) == (429, 1)
    assert "50 requests" in refused.reason
    slow, now = busy(0.5, 100.0, per_key=50)
    refused = slow.acquire(10**6, "key0", now)
    assert isinstance(refused, Refused)
    assert 3 <= refused.retry_after_s <= 6, "the key has 50 of 100 requests and one request ends every two seconds: 4 s"


def test_an_expired_request_holds_no_place() -> None:
    """A request expires exactly at its deadline. The place of its key is free again, and the next deadline is that of
    the next request."""
    admission = AdmissionController(AdmissionLimits(in_flight=1, queue=2, queue_wait_s=5.0, per_key=2))
    for ticket, at in enumerate((0.0, 1.0, 2.0)):
        admission.acquire(ticket, f"key{ticket}", at)
    assert (admission.expires_at, admission.expire(5.9)) == (6.0, [])
    assert admission.expire(6.0) == [1]
    assert (admission.queued, admission.held_by("key1"), admission.expires_at) == (1, 0, 7.0)
    assert admission.expire(100.0) == [2]
    assert admission.expires_at is None


def test_without_completions_retry_after_is_the_longest_wait() -> None:
    admission = AdmissionController(AdmissionLimits(in_flight=1, queue=0), 5.0)
    admission.acquire(0, None, 5.0)
    refused = admission.acquire(1, None, 1000.0)
    assert refused == Refused(503, "the gateway is full", 60)
    assert "waited 30 s" in admission.overdue(1000.0).reason


@given(st.integers(1, 50), st.integers(0, 50), st.floats(0.0, 100.0))
@settings(deadline=None)
def test_before_the_first_departure_retry_after_follows_the_age_of_the_requests(
    n: int, queue: int, age_s: float
) -> None:
    """What has run for some time is taken to need that time: of n requests, one leaves within age / n."""
    admission = AdmissionController(AdmissionLimits(in_flight=n, queue=queue), 0.0)
    for ticket in range(n + queue):
        admission.acquire(ticket, None, 1000.0)
    refused = admission.acquire(n + queue, None, 1000.0 + age_s)
    assert isinstance(refused, Refused)
    wait_s = age_s * (queue + 1) / n
    assert min(60, max(1, wait_s - 1e-6)) <= refused.retry_after_s <= min(60, wait_s + 1 + 1e-6)


@given(st.floats(0.5, 20.0), st.sampled_from([0.0, 100.0, 1e6]))
@settings(deadline=None)
def test_after_a_pause_retry_after_follows_the_requests_before_it(lasts_s: float, pause_s: float) -> None:
    """Eight requests at once fill the gateway, some time after others have taken as long each."""
    admission = AdmissionController(AdmissionLimits(in_flight=8, queue=0), 0.0)
    for ticket in range(20):
        admission.acquire(ticket, None, ticket * lasts_s)
        admission.release(ticket, (ticket + 1) * lasts_s)
    now = 20 * lasts_s + pause_s
    for ticket in range(20, 28):
        assert admission.acquire(ticket, None, now) == Accepted()
    refused = admission.acquire(28, None, now + 0.1)
    assert isinstance(refused, Refused)
    assert max(1.0, lasts_s / 8 - 1e-3) <= refused.retry_after_s <= lasts_s / 8 + 1.001


def test_one_key_cannot_fill_the_queue() -> None:
    admission = AdmissionController(AdmissionLimits(in_flight=2, queue=10, per_key=4))
    entries = [admission.acquire(ticket, "greedy", 0.0) for ticket in range(10)]
    assert [type(entry) for entry in entries] == [Accepted] * 2 + [Queued] * 2 + [Refused] * 6
    assert isinstance(admission.acquire(10, "modest", 0.0), Queued)


def test_a_key_may_have_its_own_limit() -> None:
    admission = AdmissionController(AdmissionLimits(per_key=1, of_key={"batch": 3}))
    assert [type(admission.acquire(t, "batch", 0.0)) for t in range(4)] == [Accepted] * 3 + [Refused]
    assert [type(admission.acquire(t, "other", 0.0)) for t in range(9, 11)] == [Accepted, Refused]
    assert isinstance(admission.acquire(20, None, 0.0), Accepted)
    assert isinstance(admission.acquire(21, None, 0.0), Accepted), "without an API key there is no limit per key"


def test_limits_of_zero_requests_are_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        AdmissionLimits(in_flight=0)
