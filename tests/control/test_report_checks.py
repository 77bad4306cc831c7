"""What another gateway may report: a number beyond its bounds is refused, and no report makes a core unusable."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.live_rig import request
from tests.control.replica_rig import CLUSTER, NAMES, SPEC

from kvroute.control import Admissions, ChargedUsage, Control, Replica
from kvroute.types import (
    AdmissionCounts,
    Arrived,
    BandwidthLearned,
    CapacityLearned,
    InputError,
    KvStored,
    PeerBooking,
    PeerReport,
    PeerReported,
    Prefill,
    RatioLearned,
    Reject,
    RoleDraining,
    RoleSwitched,
    ScaleEnded,
    SessionsServed,
    ThresholdKnown,
    TransferMeasured,
    UsageCounts,
)

NUMBERS = st.sampled_from(
    [0.0, 1.0, 0.5, -1.0, 5e-324, 1e-9, 1e9, 1e15, 1e18, 1e300, -1e300, 1e308, math.inf, -math.inf, math.nan]
)
COUNTS = st.sampled_from([0, 1, 5, 16, -1, 2**31, 2**53, 2**62, -(2**63), 2**64 - 1])
INSTANCES = st.sampled_from([*NAMES[:3], NAMES[5], "", "another"])
RATIOS = st.builds(RatioLearned, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
FIVE = st.integers(4, 5)


def five(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return tuples with one value for each tier, or one too few."""
    return FIVE.flatmap(lambda length: st.tuples(*[values] * length))


EVENTS = st.one_of(
    st.builds(KvStored, NUMBERS, INSTANCES, st.lists(COUNTS, max_size=3).map(tuple), COUNTS),
    st.builds(TransferMeasured, NUMBERS, INSTANCES, INSTANCES, NUMBERS, NUMBERS, COUNTS),
    st.builds(ThresholdKnown, NUMBERS, INSTANCES, NUMBERS, NUMBERS),
    st.builds(
        BandwidthLearned,
        NUMBERS,
        five(st.none() | RATIOS),
        st.lists(st.tuples(INSTANCES, INSTANCES, RATIOS), max_size=2).map(tuple),
    ),
    st.builds(CapacityLearned, NUMBERS, five(NUMBERS), five(NUMBERS), five(COUNTS), five(st.none() | COUNTS)),
    st.builds(RoleDraining, NUMBERS, INSTANCES),
    st.builds(RoleSwitched, NUMBERS, INSTANCES, st.sampled_from(["prefill", "decode"])),
    st.builds(SessionsServed, NUMBERS, st.lists(st.tuples(COUNTS, INSTANCES, INSTANCES), max_size=2).map(tuple)),
    st.builds(ScaleEnded, NUMBERS, INSTANCES, st.booleans()),
)
BOOKINGS = st.builds(
    PeerBooking, COUNTS, INSTANCES, NUMBERS, INSTANCES, NUMBERS, st.booleans(), INSTANCES, NUMBERS, COUNTS
)
REPORTS = st.builds(
    PeerReport,
    st.just("other"),
    st.integers(1, 3),
    NUMBERS,
    bookings=st.lists(BOOKINGS, max_size=3).map(tuple),
    events=st.lists(EVENTS, max_size=2).map(tuple),
    whole=st.booleans(),
    admissions=st.none() | st.builds(AdmissionCounts, st.just(""), COUNTS, COUNTS, st.dictionaries(INSTANCES, COUNTS)),
    usage=st.none() | st.builds(UsageCounts, st.just(""), st.dictionaries(INSTANCES, st.tuples(COUNTS, COUNTS))),
)


def receive(control: Control, replica: Replica, report: PeerReport) -> None:
    event = replica.received(10.0, report)
    assert event is not None
    control.handle(event)


@given(st.lists(REPORTS, max_size=4))
def test_no_report_makes_a_core_unusable(reports: list[PeerReport]) -> None:
    """It is applied or refused with an InputError; afterwards the costs of all candidates are finite. Counts for common
    limits are never negative."""
    control, admissions = SPEC.build(CLUSTER), Admissions()
    replica = Replica("own", lease_s=4.0, approximate=frozenset(NAMES), admissions=admissions, usage=ChargedUsage())
    for report in reports:
        with suppress(InputError):
            receive(control, replica, report)
    assert admissions.in_flight >= 0
    assert admissions.queued >= 0
    decision = control.handle(Arrived(10.0, request(1, 1_000, 4)))[0]
    assert isinstance(decision, Prefill | Reject)  # a gateway may have booked all memory
    if isinstance(decision, Prefill) and decision.terms is not None:
        assert all(np.isfinite(term).all() for term in (decision.terms.cost, *decision.terms.parts.values()))


RATIO = RatioLearned(0.0, 1.0, 1.0, 0.0)
LEARNED = CapacityLearned(0.0, (0.0,) * 5, (1.0,) * 5, (1,) * 5, (None,) * 5)
IMPOSSIBLE: list[Any] = [
    PeerBooking(1, "vp0", 1e308),
    PeerBooking(1, "", 0.0, "vd0", 1e308),
    PeerBooking(1, "", 0.0, "vd0", 1.0, False, "vp0", 1e308),
    KvStored(0.0, "vp0", (1, -1)),
    KvStored(0.0, "vp0", (2**64,)),
    KvStored(0.0, "vp0", (1,), 0),
    TransferMeasured(0.0, "vp0", "vd0", 1e308, 1.0),
    TransferMeasured(0.0, "vp0", "vd0", 1.0, 1.0, 2**62),
    ThresholdKnown(0.0, "site", math.nan, 1.0),
    BandwidthLearned(0.0, (msgspec.structs.replace(RATIO, log=1e308),) * 5),
    BandwidthLearned(0.0, (None,) * 5, (("vp0", "vd0", msgspec.structs.replace(RATIO, ratio=1e300)),)),
    msgspec.structs.replace(LEARNED, log_sums=(1e308,) * 5),
    msgspec.structs.replace(LEARNED, weights=(-1.0,) * 5),
    msgspec.structs.replace(LEARNED, answers=(math.nan,)),
    SessionsServed(0.0, ((-1, "vp0", "vd0"),)),
]


@pytest.mark.parametrize("what", IMPOSSIBLE, ids=lambda what: type(what).__name__)
def test_an_impossible_number_is_refused(what: Any) -> None:
    """The whole report is refused, with the gateway's name and the bounds in the message."""
    control = SPEC.build(CLUSTER)
    before = control.loads(10.0)
    is_booking = isinstance(what, PeerBooking)
    report = PeerReport("other", 1, 1.0, (what,) if is_booking else (), () if is_booking else (what,), whole=True)
    with pytest.raises(InputError, match=r"gateway other reports .* (for request 1|in \w+); give numbers from"):
        control.handle(PeerReported(10.0, report))
    assert control.loads(10.0) == before


@pytest.mark.parametrize("counts", [(-1, 0, {}), (0, 2**62, {}), (0, 0, {"key": -5})])
def test_impossible_counts_for_common_limits_are_refused(counts: Any) -> None:
    admissions = Admissions()
    replica = Replica("own", lease_s=4.0, admissions=admissions)
    with pytest.raises(InputError, match="gateway other reports"):
        replica.received(10.0, PeerReport("other", 1, 1.0, admissions=AdmissionCounts("", *counts), whole=True))
    assert (admissions.in_flight, admissions.queued, admissions.held_by("key")) == (0, 0, 0)


def test_prefixes_of_an_instance_with_kv_events_are_not_taken_from_others() -> None:
    """Its own events say what it holds."""
    control, replica = SPEC.build(CLUSTER), Replica("own", lease_s=4.0, approximate=frozenset({"vp1"}))
    events = (KvStored(0.0, "vp0", (1, 2)), KvStored(0.0, "vp1", (1, 2)))
    receive(control, replica, PeerReport("other", 1, 1.0, events=events, whole=True))
    held = [name for index, name in enumerate(NAMES) if list(control.caches.chains(index))]
    assert held == ["vp1"]
