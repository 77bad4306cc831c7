"""Gateways that share one stream, under random traffic, deaths, joins and faults of delivery.

After silence all views are equal to what the living gateways have booked. No count is ever negative, nothing stays
booked for a dead gateway, and each log replays bit for bit.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.control.replica_rig import CLUSTER, LEASE_S, NAMES, SPEC, Gateways, Member, counts, expected, least

from kvroute.control import decisions_equal, replay

CHAINS = tuple(tuple(range(start, start + 12)) for start in (100, 200, 300))
LOAD = ("prefill", "decode", "transfers", "tracked")
PICK = st.integers(0, 1_000)


class SharedStream(RuleBasedStateMachine):
    """Random histories of gateways that share one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.gateways = Gateways("gateway0", "gateway1", "gateway2")
        self.gateways.settle()

    def member(self, pick: int) -> Member:
        """One of the living gateways."""
        return self.gateways.living[pick % len(self.gateways.living)]

    @rule(picks=st.lists(PICK, min_size=1, max_size=8), tokens=st.integers(1, 1_000))
    def requests_arrive(self, picks: list[int], tokens: int) -> None:
        """Gateways get requests, some of which begin with a known prefix."""
        for pick in picks:
            blocks = CHAINS[pick % len(CHAINS)] if pick % 2 else ()
            self.gateways.arrive(self.member(pick), tokens, blocks=blocks)

    @rule(picks=st.lists(st.tuples(PICK, PICK, st.booleans()), min_size=1, max_size=12))
    def requests_advance(self, picks: list[tuple[int, int, bool]]) -> None:
        """Requests take their next steps, or their legs fail."""
        for pick, which, fails in picks:
            member = self.member(pick)
            if member.flights:
                self.gateways.advance(member, sorted(member.flights)[which % len(member.flights)], fails=fails)

    @rule(pick=PICK, which=PICK)
    def request_is_cancelled(self, pick: int, which: int) -> None:
        """A client leaves."""
        member = self.member(pick)
        if member.flights:
            self.gateways.end(member, sorted(member.flights)[which % len(member.flights)])

    @rule(pick=PICK, instance=st.sampled_from(NAMES), chain=st.sampled_from(CHAINS))
    def prefix_is_stored(self, pick: int, instance: str, chain: tuple[int, ...]) -> None:
        """A gateway learns what an instance has cached."""
        self.gateways.store(self.member(pick), instance, chain)

    @rule(writers=st.lists(PICK, max_size=4), readers=st.lists(st.tuples(PICK, st.integers(1, 9)), max_size=4))
    def reports_pass(self, writers: list[int], readers: list[tuple[int, int]]) -> None:
        """Gateways write what has changed, and read some entries."""
        for pick in writers:
            self.gateways.write(self.member(pick))
        for pick, times in readers:
            for _ in range(times):
                self.gateways.read(self.member(pick))

    @rule(pick=PICK, times=st.integers(1, 4))
    def entries_are_lost(self, pick: int, times: int) -> None:
        """A gateway never reads some entries, because they were trimmed."""
        for _ in range(times):
            self.gateways.read(self.member(pick), lose=True)

    @precondition(lambda self: self.gateways.entries)
    @rule(pick=PICK, which=PICK)
    def entry_is_repeated(self, pick: int, which: int) -> None:
        """A gateway reads an entry that it has read or skipped before."""
        member = self.member(pick)
        if member.position:
            self.gateways.read(member, repeat=which % member.position)

    @rule(seconds=st.floats(0.01, LEASE_S / 2))
    def time_passes(self, seconds: float) -> None:
        """Time passes; leases may expire although their gateways live."""
        self.gateways.now += seconds
        for member in self.gateways.living:
            self.gateways.refresh(member)

    @precondition(lambda self: len(self.gateways.living) > 1)
    @rule(pick=PICK)
    def gateway_dies(self, pick: int) -> None:
        """A gateway is killed with its requests."""
        self.member(pick).alive = False

    @precondition(lambda self: len(self.gateways.members) < 6)
    @rule()
    def gateway_joins(self) -> None:
        """A gateway starts."""
        self.gateways.join(f"gateway{len(self.gateways.members)}")

    @precondition(lambda self: self.gateways.up)
    @rule()
    def server_stops(self) -> None:
        """The stream cannot be reached."""
        self.gateways.cut()

    @precondition(lambda self: not self.gateways.up)
    @rule()
    def server_returns(self) -> None:
        """The stream can be reached again."""
        self.gateways.restore()

    @invariant()
    def no_count_is_negative(self) -> None:
        """No history makes a count negative."""
        for member in self.gateways.living:
            assert least(member.control) >= 0

    def teardown(self) -> None:
        """After silence the views are equal; after the last request they are empty; the logs replay."""
        gateways = self.gateways
        if not gateways.up:
            gateways.restore()
        gateways.settle()
        self.check_views()
        for member in gateways.living:
            for number in list(member.flights):
                gateways.end(member, number)
        gateways.settle()
        self.check_views()
        idle = counts(SPEC.build(CLUSTER), 0.0)
        for member in gateways.members:
            if member.alive:
                seen = counts(member.control, gateways.at(member))
                assert {key: seen[key] for key in seen if key.startswith(LOAD)} == {
                    key: idle[key] for key in idle if key.startswith(LOAD)
                }
            again = replay(SPEC.build(CLUSTER), member.log)
            assert all(decisions_equal(record.decisions, decided) for record, decided in again)

    def check_views(self) -> None:
        """Each view has the bookings of all living gateways, once each."""
        gateways, wanted = self.gateways, expected(self.gateways)
        for member in gateways.living:
            seen = counts(member.control, gateways.at(member))
            for key in seen:
                if key.startswith(LOAD):
                    assert seen[key] == wanted[key], (member.name, key)
            assert member.replica.state == "in_sync"
            assert member.replica.gateways == tuple(
                sorted(other.name for other in gateways.living if other is not member)
            )


TestSharedStream = SharedStream.TestCase
TestSharedStream.settings = settings(max_examples=80, stateful_step_count=50)
