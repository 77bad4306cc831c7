"""Worked examples of gateways that share one stream: one death, one loss, one joiner, one change of the cluster."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.churn_rig import base, engine, join, joining
from tests.control.live_rig import request
from tests.control.replica_rig import CLUSTER, LEASE_S, NAMES, SPEC, Gateways, counts, expected, least

from kvroute.control import Control, LogHashing
from kvroute.control.peers import BOOKINGS_MAX
from kvroute.types import (
    Arrived,
    ClusterChanged,
    InputError,
    KvStored,
    PeerBooking,
    PeerLost,
    PeerReport,
    PeerReported,
    Prefill,
    Reject,
    Served,
    SessionsServed,
)

BOOKING = PeerBooking(7, prefill="vp0", prefill_s=0.5)
IDLE = counts(SPEC.build(CLUSTER), 0.0)


def reported(control: Control, sequence: int, *bookings: PeerBooking, at: float = 1.0, whole: bool = False) -> None:
    """Give a core a report of the gateway `other`."""
    control.handle(PeerReported(at, PeerReport("other", sequence, at, bookings, whole=whole)))


def assigned(control: Control, name: str) -> int:
    """Requests that a core counts in prefill on an instance."""
    return control.loads(1.0)[name].queued


def test_a_request_is_counted_by_all_gateways_through_its_life() -> None:
    """Each step of a request at one gateway is in the views of the others after one report."""
    gateways = Gateways("a", "b", "c")
    gateways.settle()
    first = gateways.living[0]
    number = gateways.arrive(first)
    assert number is not None
    while number in first.flights:
        gateways.settle(1.0)
        for member in gateways.living:
            assert counts(member.control, gateways.at(member)) == expected(gateways)
        gateways.advance(first, number)
    gateways.settle(1.0)
    assert [counts(member.control, gateways.at(member)) for member in gateways.living] == [IDLE] * 3


def test_a_decode_that_another_instance_serves_moves_in_all_views() -> None:
    """A proxy such as Envoy may go on to the next instance of its list."""
    gateways = Gateways("a", "b")
    gateways.settle()
    first, second = gateways.living
    number, decoded = 0, ""
    while not decoded.startswith("vd"):  # of the instances that decode with this protocol there are several
        arrived = gateways.arrive(first)
        assert arrived is not None
        number = arrived
        while number in first.flights and not first.flights[number].target:
            gateways.advance(first, number)
        decoded = first.flights[number].target
    other = next(name for name in ("vd0", "vd1") if name != decoded)
    gateways.settle(1.0)
    first.own(Served(gateways.at(first), number, other))
    gateways.exchange()
    targets = {booking.request_id: booking.target for booking in second.control.peers.all["a"].bookings}
    assert targets[number] == other


def test_policies_see_the_load_of_other_gateways() -> None:
    """Two gateways that decide in turn do not choose the same idle instance."""
    gateways = Gateways("a", "b")
    gateways.settle()
    chosen = Counter[str]()
    for turn in range(4):
        member = gateways.living[turn % 2]
        decision = member.own(Arrived(gateways.at(member), request(turn + 1, 1_000, 4)))[0]
        assert isinstance(decision, Prefill)
        chosen[decision.instance] += 1
        gateways.exchange()
    assert max(chosen.values()) == 1


def test_the_bookings_of_a_dead_gateway_are_taken_back_once() -> None:
    """After its lease the others release what it has booked; its late reports book nothing again."""
    gateways = Gateways("a", "b")
    gateways.settle()
    dead, other = gateways.living
    for _ in range(3):
        gateways.arrive(dead)
    gateways.settle(0.5)
    late = len(gateways.entries) - 1
    assert sum(counts(other.control, gateways.at(other))["prefill llama-3-70b"]) == 3
    dead.alive = False
    gateways.settle(LEASE_S - 1.0)
    assert sum(counts(other.control, gateways.at(other))["prefill llama-3-70b"]) == 3
    gateways.settle(1.5)
    assert counts(other.control, gateways.at(other)) == IDLE
    gateways.read(other, repeat=late)
    gateways.settle()
    assert counts(other.control, gateways.at(other)) == IDLE
    lost = [record.event for record in other.log if isinstance(record.event, PeerLost)]
    assert [event.gateway for event in lost] == ["a"] * len(lost)


def test_a_repeated_or_late_report_changes_nothing() -> None:
    """Only reports newer than the last one count."""
    control = SPEC.build(CLUSTER)
    reported(control, 1, whole=True)
    reported(control, 2, BOOKING)
    reported(control, 3, PeerBooking(7))
    reported(control, 2, BOOKING)
    reported(control, 3, BOOKING)
    assert assigned(control, "vp0") == 0
    assert control.peers.all["other"].in_sync


def test_a_missing_report_is_noticed_and_a_whole_one_repairs_it() -> None:
    """The end of a request that was never read does not stay booked after the next whole report."""
    control = SPEC.build(CLUSTER)
    reported(control, 1, BOOKING, whole=True)
    assert control.peers.all["other"].in_sync
    reported(control, 3, PeerBooking(8, prefill="vp1", prefill_s=0.5))
    assert not control.peers.all["other"].in_sync
    assert (assigned(control, "vp0"), assigned(control, "vp1")) == (1, 1)
    reported(control, 4, PeerBooking(8, prefill="vp1", prefill_s=0.5), whole=True)
    assert control.peers.all["other"].in_sync
    assert (assigned(control, "vp0"), assigned(control, "vp1")) == (0, 1)


def test_nothing_is_booked_for_a_gateway_before_its_first_whole_report() -> None:
    """A core that has missed the beginning counts nothing that it could not release."""
    control = SPEC.build(CLUSTER)
    reported(control, 5, BOOKING)
    assert assigned(control, "vp0") == 0
    reported(control, 6, BOOKING, whole=True)
    assert assigned(control, "vp0") == 1
    control.handle(PeerLost(2.0, "other"))
    control.handle(PeerLost(2.0, "other"))
    reported(control, 7, BOOKING)
    assert assigned(control, "vp0") == 0


def test_a_reader_that_misses_reports_asks_for_a_whole_one() -> None:
    """Views are equal again after entries were lost, within some beats."""
    gateways = Gateways("a", "b")
    gateways.settle()
    first, second = gateways.living
    number = gateways.arrive(first)
    assert number is not None
    gateways.settle(0.5)
    gateways.end(first, number)
    gateways.write(first)
    assert gateways.read(second, lose=True)
    assert sum(counts(second.control, gateways.at(second))["prefill llama-3-70b"]) == 1
    gateways.settle(LEASE_S / 2)
    assert counts(second.control, gateways.at(second)) == IDLE


def test_a_joiner_gets_bookings_prefixes_and_bandwidths() -> None:
    """A gateway that joins knows what the others know, although it reads the stream from its end."""
    gateways = Gateways("a", "b")
    gateways.settle()
    first, second = gateways.living
    gateways.arrive(first)
    for chain in range(40):
        gateways.store(second, NAMES[chain % 5], tuple(range(1_000 * chain, 1_000 * chain + 9)))
    gateways.measure(second, "vp0", "vd1", 0.5)
    gateways.settle()
    third = gateways.join("c")
    gateways.settle()
    assert third.replica.state == "in_sync"
    views = [counts(member.control, gateways.at(member)) for member in gateways.living]
    assert views[0] == views[1] == views[2]
    assert sum(len(chains) for chains in views[2]["prefixes"]) == 40
    ratios = [member.control.oracle.learned_ratio(gateways.at(member)) for member in gateways.living]
    assert ratios[0] == ratios[1] == ratios[2]
    assert any(ratios[2])


def test_without_the_stream_every_gateway_goes_on_alone() -> None:
    """After the lease a gateway counts its own requests only; when the stream returns, all views are equal again."""
    gateways = Gateways("a", "b")
    gateways.settle()
    first, second = gateways.living
    gateways.arrive(first)
    gateways.arrive(second)
    gateways.settle(1.0)
    gateways.cut()
    gateways.arrive(second)
    gateways.settle()
    assert [member.replica.state for member in gateways.living] == ["disconnected", "disconnected"]
    assert sum(counts(first.control, gateways.at(first))["prefill llama-3-70b"]) == 1
    assert sum(counts(second.control, gateways.at(second))["prefill llama-3-70b"]) == 2
    gateways.restore()
    gateways.settle()
    assert [member.replica.state for member in gateways.living] == ["in_sync", "in_sync"]
    for member in gateways.living:
        assert counts(member.control, gateways.at(member)) == expected(gateways)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 4)), max_size=30))
def test_prefixes_are_equal_after_silence(stored: list[tuple[int, int, int]]) -> None:
    """Without losses every gateway knows the same cached prefixes, in whichever order it learned them."""
    gateways = Gateways("a", "b", "c")
    gateways.settle()
    for pick, instance, chain in stored:
        gateways.store(gateways.living[pick], NAMES[instance], tuple(range(100 * chain, 100 * chain + 5)))
    gateways.settle()
    views = [counts(member.control, gateways.at(member))["prefixes"] for member in gateways.living]
    assert views[0] == views[1] == views[2]
    assert sum(map(len, views[0])) == len({(instance, chain) for _, instance, chain in stored})


def test_the_first_gateway_in_sync_leads() -> None:
    """One gateway reviews roles; the next one takes over when it dies, and none does so alone."""
    gateways = Gateways("b", "a", "c")
    gateways.settle()
    assert [member.name for member in gateways.living if member.replica.leads] == ["a"]
    gateways.members[1].alive = False
    gateways.settle()
    assert [member.name for member in gateways.living if member.replica.leads] == ["b"]
    gateways.cut()
    gateways.settle()
    assert not any(member.replica.leads for member in gateways.living)


def test_foreign_bookings_follow_a_change_of_the_cluster() -> None:
    """Bookings on instances that stay are kept, those on an instance that leaves count no more, and those on one that
    joins later count from then on."""
    control = SPEC.build(base())
    join(control, 1.0, engine("p0", "prefill"), engine("d0", "decode", 1), engine("d1", "decode", 2))
    moving = PeerBooking(1, target="d0", need_bytes=1e9, source="p0", kv_bytes=1e9)
    reported(control, 1, moving, PeerBooking(2, target="d1", need_bytes=1e9, admitted=True), whole=True)
    reported(control, 2, PeerBooking(3, prefill="a0", prefill_s=1.0))
    assert control.loads(1.0)["d0"].queued == 1
    control.handle(ClusterChanged(2.0, joining(control, [engine("a0", "prefill", 3)]), ("d1",)))
    names = [instance.name for instance in control.cluster.instances]
    assert names == ["a0", "d0", "p0"]
    loads = control.loads(2.0)
    assert (loads["a0"].queued, loads["d0"].queued, loads["p0"].queued) == (1, 1, 0)
    reported(control, 3, *map(PeerBooking, (1, 2, 3)))
    assert [load.queued for load in control.loads(3.0).values()] == [0, 0, 0]
    assert least(control) == 0
    assert control.oracle.costs(2, control.parts.view.decode_ids, 3.0).in_flight.sum() == 0


def test_a_report_with_an_impossible_number_changes_nothing() -> None:
    """A booking that is not finite is refused with its gateway and request."""
    control = SPEC.build(CLUSTER)
    with pytest.raises(InputError, match="gateway other reports nan for request 7"):
        reported(control, 1, PeerBooking(7, prefill="vp0", prefill_s=float("nan")), whole=True)
    assert counts(control, 1.0) == IDLE


def free_bytes(control: Control) -> dict[str, float]:
    """Return the KV memory that a core counts as free, by instance."""
    names = [instance.name for instance in control.cluster.instances]
    pools = control.parts.view.decode.values()
    return {names[index]: float(pool.free_kv_bytes[at]) for pool in pools for index, at in pool.position.items()}


def test_a_booking_counts_for_no_more_than_its_instance_holds() -> None:
    """Its release gives back the same, also after a change of the cluster."""
    control = SPEC.build(base())
    join(control, 1.0, engine("p0", "prefill"), engine("d0", "decode", 1))
    before = free_bytes(control)
    reported(control, 1, PeerBooking(1, target="d0", need_bytes=1e18, source="p0", kv_bytes=1e18), whole=True)
    assert (before["d0"] > 0, free_bytes(control)["d0"]) == (True, 0.0)
    control.handle(ClusterChanged(2.0, joining(control, [engine("d1", "decode", 2)]), ()))
    assert free_bytes(control)["d0"] == 0.0
    reported(control, 2, PeerBooking(1), at=3.0)
    assert free_bytes(control) == before | {"d1": before["d0"]}
    assert least(control) == 0


def test_the_bookings_of_one_gateway_are_bounded() -> None:
    """Further ones count nowhere until others have ended."""
    control = SPEC.build(CLUSTER)
    for sequence in range(1, 4):
        first = sequence * BOOKINGS_MAX // 2
        some = [PeerBooking(number, "vp0", 1.0) for number in range(first, first + BOOKINGS_MAX // 2)]
        reported(control, sequence, *some, whole=sequence == 1)
    assert control.loads(1.0)["vp0"].queued == BOOKINGS_MAX
    reported(control, 4, whole=True)
    assert counts(control, 1.0) == IDLE


def test_a_log_has_no_block_hash_of_another_gateway() -> None:
    """Foreign prefixes are hashed with the key of the log, as own ones are."""
    hashing = LogHashing()
    event = PeerReported(1.0, PeerReport("other", 1, 1.0, events=(KvStored(1.0, "vp0", (11, 12)),)))
    logged = hashing.event(event)
    assert isinstance(logged, PeerReported)
    (stored,) = logged.report.events
    assert isinstance(stored, KvStored)
    assert stored.blocks == hashing.blocks((11, 12)) != (11, 12)


SESSIONS = msgspec.structs.replace(SPEC, session_bonus_s=1.0)


def test_a_session_is_known_to_all_gateways_and_to_a_joiner() -> None:
    """Those who were there learn the instances from the bookings; a gateway that joins later learns them too."""
    gateways = Gateways("a", "b", spec=SESSIONS)
    gateways.settle()
    first, second = gateways.living
    number = gateways.arrive(first, session=77)
    assert number is not None
    gateways.advance(first, number)
    flight = first.flights[number]
    gateways.settle(1.0)
    gateways.end(first, number)
    gateways.settle(1.0)
    third = gateways.join("c")
    gateways.settle()
    known = [
        [session for event in member.control.sessions(1.0) for session in event.sessions] for member in gateways.living
    ]
    assert known[0] == known[1] == known[2] == [(77, flight.source, flight.target)]
    assert third.replica.state == "in_sync"
    assert second.control.in_progress(number) is False


def test_sessions_are_not_shared_without_affinity() -> None:
    gateways = Gateways("a", "b")
    gateways.settle()
    number = gateways.arrive(gateways.living[0], session=77)
    assert number is not None
    assert gateways.living[0].control.booked(number).session == 0
    gateways.settle(1.0)
    assert not list(gateways.living[1].control.sessions(1.0))


def test_a_log_has_no_session_of_another_gateway() -> None:
    """Equal sessions of bookings and of a joiner's knowledge are equal in the log."""
    hashing = LogHashing()
    told = SessionsServed(1.0, ((77, "vp0", "vd1"), (78, "", "vd1")))
    booking = msgspec.structs.replace(BOOKING, session=77)
    logged = hashing.event(PeerReported(1.0, PeerReport("other", 1, 1.0, (booking, BOOKING), events=(told,))))
    assert isinstance(logged, PeerReported)
    keyed = hashing.blocks((77, 78))
    assert [booked.session for booked in logged.report.bookings] == [keyed[0], 0]
    assert logged.report.events == (SessionsServed(1.0, ((keyed[0], "vp0", "vd1"), (keyed[1], "", "vd1"))),)
    assert hashing.event(told) == logged.report.events[0]
    assert not {77, 78} & set(keyed)


def test_a_full_view_refuses_no_request_for_a_lost_gateway() -> None:
    """Memory booked by a gateway that is gone is free again."""
    control = SPEC.build(CLUSTER)
    full = [PeerBooking(n, target=name, need_bytes=4e9) for n, name in enumerate(NAMES) if name[1] in "db"]
    reported(control, 1, *full, whole=True)
    assert isinstance(control.handle(Arrived(1.0, request(1, 1_000, 4, one_leg=True)))[-1], Reject)
    control.handle(PeerLost(2.0, "other"))
    assert not isinstance(control.handle(Arrived(2.0, request(2, 1_000, 4, one_leg=True)))[-1], Reject)
