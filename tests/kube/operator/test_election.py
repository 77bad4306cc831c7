"""Leader election: never two leaders, whatever order reads and writes have; a leader that ends is replaced."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kube.operator.election import DURATION_S, GIVE_UP_S, RENEW_S, Create, LeaderCandidate, Update, micro_time

CLOCK_S = 1.8e9


class LeaseStore:
    """A Lease with the API server's rules: create once, replace only what was read."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    def write(self, read: dict[str, Any] | None, step: object) -> bool:
        """Execute a step; return whether it succeeded."""
        current = self.lease and self.lease["version"]
        match step:
            case Create(spec) if self.lease is None:
                self._store(spec)
            case Update(spec) if read is not None and current == read["version"]:
                self._store(spec)
            case _:
                return False
        return True

    def _store(self, spec: dict[str, Any]) -> None:
        self.version += 1
        self.lease = {"spec": dict(spec), "version": self.version}


def attempt(candidate: LeaderCandidate, store: LeaseStore, now: float, *, answer: bool = True) -> None:
    """Let a candidate read and write; without `answer` its write succeeds, but it does not learn that."""
    read = store.lease
    done = store.write(read, candidate.step(read, now, CLOCK_S + now))
    if answer:
        candidate.written(now) if done else candidate.lost()


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0.1, 2 * DURATION_S), st.sampled_from(["write", "late", "silent"])),
    max_size=40,
)


@given(events=EVENTS)
def test_never_two_leaders(events: list[tuple[int, float, str]]) -> None:
    """Candidates come in any order with any pauses; reads may be old when they write, and answers may get lost."""
    candidates = [LeaderCandidate(name) for name in "abc"]
    store, now = LeaseStore(), 0.0
    old: list[dict[str, Any] | None] = [None, None, None]
    for index, pause_s, kind in events:
        now += pause_s
        if kind == "late":
            step = candidates[index].step(old[index], now, CLOCK_S + now)
            if store.write(old[index], step):
                candidates[index].written(now)
            else:
                candidates[index].lost()
        else:
            attempt(candidates[index], store, now, answer=kind == "write")
        old[index] = store.lease
        leaders = [candidate.leads(now) for candidate in candidates]
        assert leaders.count(True) <= 1


def test_a_leader_that_is_killed_is_replaced_after_the_duration() -> None:
    """The other operator measures the time itself: the times in the Lease are those of another clock."""
    store, one, two = LeaseStore(), LeaderCandidate("one"), LeaderCandidate("two")
    attempt(one, store, 0.0)
    attempt(one, store, RENEW_S)
    now = RENEW_S
    while not two.leads(now):
        now += RENEW_S
        attempt(two, store, now)
    assert DURATION_S <= now - RENEW_S <= DURATION_S + 2 * RENEW_S
    assert store.lease is not None
    assert store.lease["spec"]["leaseTransitions"] == 1


def test_a_leader_that_ends_is_replaced_at_once() -> None:
    store, one, two = LeaseStore(), LeaderCandidate("one"), LeaderCandidate("two")
    attempt(one, store, 0.0)
    assert store.write(store.lease, one.release(store.lease, CLOCK_S))
    assert not store.write(store.lease, two.release(store.lease, CLOCK_S)), "it gives up only its own"
    attempt(two, store, 0.1)
    assert two.leads(0.1)


def test_a_leader_without_renewal_stops() -> None:
    """It stops before another one may begin."""
    store, one = LeaseStore(), LeaderCandidate("one")
    attempt(one, store, 0.0)
    assert one.leads(GIVE_UP_S - 0.001)
    assert not one.leads(GIVE_UP_S)
    assert GIVE_UP_S < DURATION_S


@pytest.mark.parametrize("clock", [CLOCK_S, CLOCK_S + 0.5, 1.0])
def test_times_have_six_digits(clock: float) -> None:
    """The API server rejects a MicroTime of whole seconds."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", micro_time(clock))
