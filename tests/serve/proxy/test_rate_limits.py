"""Token buckets: never above the rate beyond one bucket, exact refunds, and one rate for several processes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvroute.control import ChargedUsage
from kvroute.serve.proxy.admission.rate_limits import KeyCharges, KeyRates, RateLimiter
from kvroute.types import PeerReport

RATES = KeyRates(requests=60, tokens=6_000)


class Shared:
    """An `OtherUsage` over `ChargedUsage`, without a stream."""

    def __init__(self) -> None:
        self.usage = ChargedUsage()

    def used_by(self, key: str) -> KeyCharges:
        return KeyCharges(*self.usage.by_others(key))

    def known_keys(self) -> Iterable[str]:
        return self.usage.keys_of_others()

    def write_used(self, key: str, used: KeyCharges) -> None:
        self.usage.write(key, *used)


class LimiterMachine(RuleBasedStateMachine):
    """Several processes with one key; reports between them are delivered at any time."""

    @initialize(processes=st.integers(1, 3))
    def start(self, processes: int) -> None:
        self.now = 0.0
        self.others = [Shared() for _ in range(processes)]
        self.limiters = [RateLimiter(lambda key: RATES, others) for others in self.others]
        self.sequence = 0
        self.charged: list[tuple[int, int]] = []
        self.requests = self.tokens = 0
        for number in range(processes):
            self.report(number)  # all know each other

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 7.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, 2), tokens=st.sampled_from([1, 40, 900, 6_000, 7_000]))
    def charge(self, number: int, tokens: int) -> None:
        number %= len(self.limiters)
        exceeded = self.limiters[number].charge("a", tokens, self.now)
        if exceeded is None:
            self.charged.append((number, tokens))
            self.requests += 1
            self.tokens += tokens
        else:
            never = tokens > (RATES.tokens or 0)
            assert exceeded.retry_after_s is None if never else (exceeded.retry_after_s or 0) >= 1

    @rule(share=st.floats(0.0, 1.0))
    def settle(self, share: float) -> None:
        if self.charged:
            number, tokens = self.charged.pop()
            used = int(share * tokens)
            self.limiters[number].settle("a", tokens, used, self.now)
            self.tokens -= tokens - used

    @rule()
    def refund(self) -> None:
        if self.charged:
            number, tokens = self.charged.pop()
            self.limiters[number].refund("a", tokens, self.now)
            self.requests -= 1
            self.tokens -= tokens

    @rule(number=st.integers(0, 2))
    def report(self, number: int) -> None:
        number %= len(self.limiters)
        self.sequence += 1
        usage = self.others[number].usage.take(whole=True)
        for place, other in enumerate(self.others):
            if place != number:
                other.usage.received(PeerReport(str(number), self.sequence, self.now, whole=True, usage=usage))
                self.limiters[place].observe(self.now)

    @invariant()
    def the_rate_is_kept(self) -> None:
        """Without delay of reports the bound is one bucket; each further process may add one before it hears."""
        buckets = len(self.limiters)
        assert 0 <= self.requests <= RATES.requests * (buckets + self.now / 60) + 1e-6  # type: ignore[operator]
        assert 0 <= self.tokens <= RATES.tokens * (buckets + self.now / 60) + 1e-6  # type: ignore[operator]
        for limiter in self.limiters:
            assert all(0 <= state.remaining <= state.limit for state in limiter.states("a", self.now))


TestLimiter = LimiterMachine.TestCase


@given(st.lists(st.integers(1, 3_000), max_size=8))
def test_refunds_are_exact(amounts: list[int]) -> None:
    """After all charges are taken back the buckets are as before, with and without a settlement."""
    limiter = RateLimiter(lambda key: RATES)
    before = limiter.states("a", 1.0)
    taken = [amount for amount in amounts if limiter.charge("a", amount, 1.0) is None]
    for amount in taken:
        limiter.refund("a", amount, 1.0)
    assert limiter.states("a", 1.0) == before


def test_a_rejection_says_when_to_come_back() -> None:
    """6,000 tokens per minute are 100 per second; a request that is larger than the bucket is never possible."""
    limiter = RateLimiter(lambda key: KeyRates(tokens=6_000))
    assert limiter.charge("a", 6_000, 0.0) is None
    exceeded = limiter.charge("a", 1_000, 2.0)
    assert exceeded is not None
    assert (exceeded.limited, exceeded.retry_after_s) == ("tokens", 8)
    assert "200 of the 6000 per minute" in exceeded.reason
    assert limiter.charge("a", 1_000, 10.0) is None
    larger = limiter.charge("a", 6_001, 300.0)
    assert larger is not None
    assert "shorten the prompt" in larger.reason


def test_what_others_charge_is_taken_from_the_own_bucket() -> None:
    """Reports with changes, a lost gateway and one that joins late: past charges are not counted twice."""
    own, limiter = Shared(), None
    limiter = RateLimiter(lambda key: RATES, own)
    other = ChargedUsage()
    other.write("a", 10, 1_000)
    own.usage.received(PeerReport("other", 7, 0.0, usage=other.take(whole=False)))
    limiter.observe(0.0)
    assert limiter.states("a", 0.0)[1].remaining == 6_000, "what was charged before the other was known may be old"
    other.write("a", 12, 3_000)
    report = PeerReport("other", 8, 0.0, usage=other.take(whole=True), whole=True)
    own.usage.received(report)
    own.usage.received(report)
    limiter.observe(0.0)
    assert [state.remaining for state in limiter.states("a", 0.0)] == [58, 4_000]
    own.usage.lost("other")
    limiter.observe(0.0)
    assert [state.remaining for state in limiter.states("a", 0.0)] == [58, 4_000]


@pytest.mark.parametrize("within", [False, True])
def test_own_limits_count_the_workers_of_one_machine_only(within: bool) -> None:
    """With `limits: own` a gateway ignores the charges of other machines."""
    usage, worker, stranger = ChargedUsage("here", within_group=within), ChargedUsage("here"), ChargedUsage("there")
    for number, rates in enumerate((worker, stranger)):
        usage.received(PeerReport(str(number), 1, 0.0, usage=rates.take(whole=True), whole=True))
        rates.write("a", 1, 100)
        usage.received(PeerReport(str(number), 2, 0.0, usage=rates.take(whole=False)))
    assert usage.by_others("a") == ((1, 100) if within else (2, 200))
    lone, other = ChargedUsage(within_group=within), ChargedUsage()
    other.write("a", 1, 100)
    lone.received(PeerReport("2", 1, 0.0, usage=ChargedUsage().take(whole=True), whole=True))
    lone.received(PeerReport("2", 2, 0.0, usage=other.take(whole=False)))
    assert lone.by_others("a") == ((0, 0) if within else (1, 100))
