"""Gateways of several datacenters: drains, roles and thresholds of one gateway in the views of the others."""

from __future__ import annotations

from tests.control.test_offloading import AWAY, arrive, cluster, core, site

from kvroute.control import Control, Replica
from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.types import (
    PeerBooking,
    PeerEvent,
    PeerLost,
    PeerReport,
    PeerReported,
    Prefill,
    RoleDraining,
    RoleSwitched,
    ThresholdKnown,
)

SITES = cluster()
LOCAL = [instance.name for instance in SITES.instances if instance.role == "prefill" and instance.datacenter != AWAY]
MOVED = LOCAL[0]


def switchable() -> Control:
    """Return a core whose roles may change."""
    return core(SITES, long_term=LongTerm(role_switches=True))


def report(control: Control, sequence: int, *events: PeerEvent, bookings: tuple[PeerBooking, ...] = ()) -> None:
    """Give the core a whole report of the gateway `other`."""
    control.handle(PeerReported(1.0, PeerReport("other", sequence, 1.0, bookings, events, whole=True)))


def chosen(control: Control, first: int, count: int) -> set[str]:
    """Prefill instances of some short requests."""
    found = set[str]()
    for number in range(first, first + count):
        decision = arrive(control, number, 1_000, at=2.0)[0]
        assert isinstance(decision, Prefill)
        found.add(decision.instance)
    return found


def test_an_instance_that_another_gateway_drains_gets_no_requests() -> None:
    """From the start of the drain on; after the switch it has its new role here too."""
    control = switchable()
    assert MOVED in chosen(control, 0, 20)
    report(control, 1, RoleDraining(1.0, MOVED))
    assert MOVED not in chosen(control, 20, 20)
    report(control, 2, RoleSwitched(1.0, MOVED, "decode"))
    assert control.roles == {MOVED: "decode"}
    assert control.offloading is not None
    assert control.offloading.switching == 0
    control.handle(PeerLost(3.0, "other"))
    assert control.roles == {MOVED: "decode"}


def test_an_instance_serves_again_if_the_gateway_that_drains_it_is_lost() -> None:
    """No other gateway would end the drain. A drain that was reported twice is counted once."""
    control = switchable()
    report(control, 1, RoleDraining(1.0, MOVED))
    report(control, 2, RoleDraining(1.0, MOVED))
    assert MOVED not in chosen(control, 0, 20)
    control.handle(PeerLost(3.0, "other"))
    assert MOVED in chosen(control, 20, 20)
    assert control.offloading is not None
    assert control.offloading.switching == 0


def test_an_instance_that_may_not_switch_is_not_drained() -> None:
    """A report of a gateway with another file changes no role."""
    control = switchable()
    remote = next(instance.name for instance in SITES.instances if instance.datacenter == AWAY)
    report(control, 1, RoleDraining(1.0, remote), RoleSwitched(1.0, remote, "decode"))
    assert control.roles == {}


def test_transfers_of_other_gateways_load_the_link_between_datacenters() -> None:
    """Their bytes are in the backlog until they have arrived."""
    control = switchable()
    assert control.offloading is not None
    (egress,) = control.offloading.egress.values()
    source = next(instance.name for instance in SITES.instances if site(SITES, instance.name) == AWAY)
    target = next(instance.name for instance in SITES.instances if instance.role == "decode")
    booking = PeerBooking(5, target=target, need_bytes=1e9, source=source, kv_bytes=7e8)
    report(control, 1, bookings=(booking,))
    assert egress.backlog_bytes == 7e8
    report(control, 2, bookings=(PeerBooking(5, target=target, need_bytes=1e9),))
    assert egress.backlog_bytes == 0.0
    assert egress.own_share(1.0) > 0.0


def test_the_leader_reports_thresholds_and_a_joiner_learns_roles() -> None:
    """Thresholds come with each beat of the first gateway in sync, roles on request."""
    leader, other = switchable(), switchable()
    first, second = Replica("a", lease_s=4.0), Replica("b", lease_s=4.0)
    leader.handle(RoleSwitched(0.5, MOVED, "decode"))
    assert leader.offloading is not None
    threshold = next(iter(leader.offloading.thresholds.values()))
    threshold.resume(40_000.0, None)
    first.connected(0.0)
    for step in range(12):
        now = 0.5 * step
        if step == 4:
            second.connected(now)
        for replica, core_of in ((first, leader), (second, other)):
            found = replica.take(now, (core_of,))
            for reader, read_by in ((first, leader), (second, other)):
                event = reader.received(now, found) if found is not None and (reader is first or step >= 4) else None
                if event is not None:
                    read_by.handle(event)
                    reader.applied(now, read_by, event.report.gateway)
            replica.refresh(now)
    assert first.leads
    assert not second.leads
    assert other.roles == {MOVED: "decode"}
    assert other.offloading is not None
    assert next(iter(other.offloading.thresholds.values())).tokens == threshold.tokens == 40_000.0


def test_an_unknown_site_in_a_threshold_is_ignored() -> None:
    """Another file may have other sites."""
    control = switchable()
    report(control, 1, ThresholdKnown(1.0, "nowhere", 5_000.0, 5_000.0))
    assert control.peers.all["other"].in_sync
