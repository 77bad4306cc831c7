"""Counts for common limits of admission, over reports that are lost, repeated or whole."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvroute.control import Admissions
from kvroute.types import AdmissionCounts, PeerReport

KEYS = ("a", "b", "c")


def report(admissions: Admissions, name: str, sequence: int, *, whole: bool = False) -> PeerReport:
    """The next report of a gateway."""
    counts = admissions.take(whole=whole)
    return PeerReport(name, sequence, float(sequence), whole=whole, admissions=counts)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("key"), st.sampled_from(KEYS), st.integers(0, 9)),
        st.tuples(st.just("report"), st.booleans(), st.booleans()),
    ),
    max_size=40,
)


@given(st.lists(steps, min_size=1, max_size=3))
def test_after_whole_reports_the_counts_are_the_sums_of_all_others(
    gateways: list[list[tuple[str, object, object]]],
) -> None:
    """Whatever was lost or repeated before. Here `report` has whether it is lost and whether it comes twice."""
    reader = Admissions()
    in_flight = queued = 0
    held: Counter[str] = Counter()
    for number, taken in enumerate(gateways):
        own, sequence = Admissions(), 0
        last, keys = (0, 0), dict.fromkeys(KEYS, 0)
        for kind, first, second in taken:
            if kind == "write":
                assert isinstance(first, int)
                assert isinstance(second, int)
                own.write(first, second)
                last = first, second
            elif kind == "key":
                assert isinstance(first, str)
                assert isinstance(second, int)
                own.write_key(first, second)
                keys[first] = second
            else:
                sequence += 1
                given_report = report(own, str(number), sequence)
                for _ in range(0 if first else 1 + bool(second)):
                    reader.received(given_report)
        reader.received(report(own, str(number), sequence + 1, whole=True))
        assert own.take(whole=False) is None
        in_flight, queued = in_flight + last[0], queued + last[1]
        held.update(keys)
    assert (reader.in_flight, reader.queued) == (in_flight, queued)
    assert {key: reader.held_by(key) for key in KEYS} == {key: held[key] for key in KEYS}
    for number in range(len(gateways)):
        reader.lost(str(number))
    assert (reader.in_flight, reader.queued, *map(reader.held_by, KEYS)) == (0,) * 5


def test_without_losses_no_whole_report_is_needed() -> None:
    reader, own = Admissions(), Admissions()
    for number, (in_flight, held) in enumerate([(1, 1), (2, 2), (1, 1), (0, 0)], start=1):
        own.write(in_flight, 3)
        own.write_key("a", held)
        assert own.changed
        reader.received(report(own, "other", number))
        assert not own.changed
        assert (reader.in_flight, reader.queued, reader.held_by("a")) == (in_flight, 3, held)


def test_a_late_report_changes_nothing() -> None:
    reader = Admissions()
    for sequence in (2, 1, 2):
        counts = AdmissionCounts(in_flight=sequence * 10, keys={"a": sequence})
        reader.received(PeerReport("other", sequence, 0.0, admissions=counts))
    assert (reader.in_flight, reader.held_by("a")) == (20, 2)


def test_workers_of_one_machine_are_left_out() -> None:
    """They count each other's requests at once."""
    reader = Admissions("machine")
    for sequence, group in enumerate(("machine", "other machine", ""), start=1):
        counts = AdmissionCounts(group, in_flight=10**sequence)
        reader.received(PeerReport(f"gateway of {group}", sequence, 0.0, admissions=counts))
    assert reader.in_flight == 1_100
