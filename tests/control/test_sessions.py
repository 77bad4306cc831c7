"""Session affinity: the instances that have served a session last may cost a few seconds more, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.live_rig import cluster_of, request

from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal, replay
from kvroute.control.affinity.sessions import SESSIONS_MAX, Sessions
from kvroute.control.log.entries import decode_record, encode
from kvroute.control.log.hashing import LogHashing
from kvroute.types import Arrived, Decode, DecodeFailed, Event, Finished, Prefill, PrefillFailed, PrefillFinished

NAMES = ("vp0a", "vp1a", "vd0b", "vd1b")
BONUS_S = 0.5
SPEC = ControlSpec(decode="load-aware", prefill="cache-aware", session_bonus_s=BONUS_S)
MINE, OTHER = 7, 8


def core(spec: ControlSpec = SPEC, *names: str) -> Control:
    return spec.build(cluster_of(*(names or NAMES)))


def placed(control: Control, number: int, session: int = 0, only: tuple[str, ...] | None = None) -> tuple[str, str]:
    """Return the names of both instances of a new request, which is then over."""
    (prefill,) = control.handle(Arrived(0.0, request(number, session=session), only))
    (decode,) = control.handle(PrefillFinished(0.0, number))
    assert isinstance(prefill, Prefill)
    assert isinstance(decode, Decode)
    control.handle(Finished(0.0, number))
    return prefill.instance, decode.target


def test_a_session_returns_to_its_instances() -> None:
    """Others, and requests without a session, go to the first names."""
    control = core()
    assert placed(control, 1, MINE, ("vp1a", "vd1b")) == ("vp1a", "vd1b")
    assert placed(control, 2, MINE) == ("vp1a", "vd1b")
    assert placed(control, 3, OTHER) == placed(control, 4) == ("vp0a", "vd0b")
    assert placed(control, 5, MINE, ("vp0a", "vd1b")) == ("vp0a", "vd1b")
    assert placed(control, 6, MINE) == ("vp0a", "vd1b")


@pytest.mark.parametrize(("ahead_tokens", "expected"), [(4_000, "vp1a"), (6_000, "vp0a")])
def test_the_bonus_is_as_many_seconds_and_no_more(ahead_tokens: int, expected: str) -> None:
    """0.41 s of work ahead of the session's instance are less than the bonus, 0.61 s more."""
    control = core()
    placed(control, 1, MINE, ("vp1a", "vd1b"))
    control.handle(Arrived(0.0, request(2, ahead_tokens), ("vp1a", "vd1b")))
    (prefill,) = control.handle(Arrived(0.0, request(3, session=MINE)))
    assert isinstance(prefill, Prefill)
    assert prefill.instance == expected
    assert prefill.terms is not None
    assert prefill.terms.parts["session_s"].tolist() == [0.0, -BONUS_S]
    work_s = 10e-3 + 100e-6 * ahead_tokens
    own_s = 10e-3 + 0.1
    assert prefill.terms.cost.tolist() == pytest.approx([own_s, own_s + work_s - BONUS_S])


def test_the_terms_of_a_decode_have_the_bonus() -> None:
    control = core()
    placed(control, 1, MINE, ("vp1a", "vd1b"))
    control.handle(Arrived(0.0, request(2, session=MINE)))
    (decode,) = control.handle(PrefillFinished(0.0, 2))
    assert isinstance(decode, Decode)
    assert decode.terms is not None
    assert decode.terms.parts["session_s"].tolist() == [0.0, -BONUS_S]
    assert decode.terms.cost[1] == pytest.approx(decode.terms.cost[0] - BONUS_S)


def test_an_instance_that_fails_the_request_is_left_in_spite_of_the_bonus() -> None:
    control = core()
    placed(control, 1, MINE, ("vp1a", "vd1b"))
    control.handle(Arrived(0.0, request(2, session=MINE)))
    (prefill,) = control.handle(PrefillFailed(0.0, 2))
    assert isinstance(prefill, Prefill)
    assert prefill.instance == "vp0a"
    (decode,) = control.handle(PrefillFinished(0.0, 2))
    assert isinstance(decode, Decode)
    assert decode.target == "vd1b"
    (decode,) = control.handle(DecodeFailed(0.0, 2))
    assert isinstance(decode, Decode)
    assert decode.target == "vd0b"


def test_engines_that_need_both_legs_at_once_get_the_bonus_for_both() -> None:
    control = core(SPEC, "sp0a", "sp1a", "sd0b", "sd1b")

    def both(number: int, session: int, only: tuple[str, ...] | None = None) -> tuple[str, str]:
        prefill, decode = control.handle(Arrived(0.0, request(number, session=session), only))
        assert isinstance(prefill, Prefill)
        assert isinstance(decode, Decode)
        control.handle(Finished(0.0, number))
        return prefill.instance, decode.target

    assert both(1, MINE, ("sp1a", "sd1b")) == ("sp1a", "sd1b")
    assert both(2, MINE) == ("sp1a", "sd1b")
    assert both(3, OTHER) == ("sp0a", "sd0b")
    control.handle(Arrived(0.0, request(4, 4_000), ("sp1a", "sd0b")))  # 0.41 s of work, less than the bonus
    assert both(5, MINE) == ("sp1a", "sd1b")
    control.handle(Arrived(0.0, request(6, 2_000), ("sp1a", "sd0b")))  # 0.62 s
    assert both(7, MINE) == ("sp0a", "sd1b")


def test_without_the_option_sessions_change_nothing() -> None:
    control = core(ControlSpec(decode="load-aware", prefill="cache-aware"))
    placed(control, 1, MINE, ("vp1a", "vd1b"))
    assert placed(control, 2, MINE) == ("vp0a", "vd0b")


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["prefill", "decode"]), st.sampled_from("abc"))))
def test_the_last_instance_of_each_leg_counts(history: list[tuple[int, str, str]]) -> None:
    sessions, last = Sessions(BONUS_S), dict[tuple[int, str], str]()
    for session, leg, instance in history:
        sessions.served(session, leg, instance)  # type: ignore[arg-type]
        last[session, leg] = instance
    for session in range(6):
        for leg in ("prefill", "decode"):
            term_s = sessions.term_s(session, leg, ("a", "b"))  # type: ignore[arg-type]
            instance = last.get((session, leg), "c")
            expected = None if instance == "c" else [-BONUS_S * (instance == name) for name in "ab"]
            assert (None if term_s is None else term_s.tolist()) == expected


def test_the_session_that_was_served_longest_ago_is_forgotten() -> None:
    sessions = Sessions(BONUS_S)
    for session in range(1, SESSIONS_MAX + 1):
        sessions.served(session, "prefill", "a")
    sessions.served(1, "decode", "b")
    sessions.served(SESSIONS_MAX + 1, "prefill", "a")
    assert len(sessions) == SESSIONS_MAX
    assert sessions.term_s(1, "prefill", ("a",)) is not None
    assert sessions.term_s(2, "prefill", ("a",)) is None


def test_what_others_served_does_not_replace_what_is_known() -> None:
    """A core that continues another one learns its sessions, in their order."""
    old, new = core(), core()
    placed(old, 1, MINE, ("vp1a", "vd1b"))
    placed(old, 2, OTHER, ("vp1a", "vd1b"))
    placed(new, 3, MINE, ("vp0a", "vd0b"))
    for event in old.sessions(0.0):
        new.handle(event)
    (told,) = new.sessions(0.0)
    assert told.sessions == ((MINE, "vp0a", "vd0b"), (OTHER, "vp1a", "vd1b"))
    assert placed(new, 4, OTHER) == ("vp1a", "vd1b")


def test_a_log_replays_with_other_hashes_of_the_sessions() -> None:
    """The log has keyed hashes, from which a session cannot be guessed; equal ones stay equal."""
    control, records, hashing = core(), list[LogRecord](), LogHashing()
    events: list[Event] = []
    for number, (session, only) in enumerate([(MINE, ("vp1a", "vd1b")), (MINE, None), (OTHER, None), (0, None)]):
        events.append(Arrived(0.0, request(number, session=session), only))
        events += [PrefillFinished(0.0, number), Finished(0.0, number)]
    for event in events:
        record = LogRecord(hashing.event(event), control.handle(event))
        records.append(decode_record(encode(record)))
    again = list(replay(core(), records))
    assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)
    sessions = [logged.event.request.session for logged in records if isinstance(logged.event, Arrived)]
    assert sessions[0] == sessions[1] != sessions[2]
    assert not {MINE, OTHER} & set(sessions)
    assert sessions[3] == 0
