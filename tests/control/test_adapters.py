"""LoRA adapters in the core: an instance that has loaded the adapter saves the seconds of loading it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.live_rig import cluster_of, request

from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal, replay
from kvroute.control.affinity.adapters import LoadedAdapters
from kvroute.control.log.entries import decode_record, encode
from kvroute.types import (
    AdaptersMeasured,
    Arrived,
    Decode,
    Event,
    Finished,
    InputError,
    KvCleared,
    KvStored,
    Prefill,
    PrefillFinished,
)

NAMES = ("vp0a", "vp1a", "vd0b", "vd1b")
LOAD_S = 0.5
SPEC = ControlSpec(decode="load-aware", prefill="cache-aware", adapters={"sql": LOAD_S, "chat": LOAD_S})


def core(spec: ControlSpec = SPEC, *names: str) -> Control:
    return spec.build(cluster_of(*(names or NAMES)))


def placed(
    control: Control, number: int, adapter: str = "", *, at: float = 0.0, tokens: int = 1_000
) -> tuple[str, str]:
    """Return the names of both instances of a new request, which is then over."""
    asked = request(number, tokens, adapter=adapter)
    (prefill,) = control.handle(Arrived(at, asked))
    assert isinstance(prefill, Prefill)
    (decode,) = control.handle(PrefillFinished(at, number))
    assert isinstance(decode, Decode)
    control.handle(Finished(at, number))
    return prefill.instance, decode.target


def test_both_legs_go_where_the_adapter_is_loaded() -> None:
    """The engines of the second names have it; without the report, and for the base model, the first names win."""
    control = core()
    assert placed(control, 1) == ("vp0a", "vd0b")
    for name in ("vp1a", "vd1b"):
        control.handle(AdaptersMeasured(0.0, name, ("sql",), 4))
    assert placed(control, 2, "sql") == ("vp1a", "vd1b")
    assert placed(control, 3, "chat") == ("vp0a", "vd0b")
    assert placed(control, 4) == ("vp0a", "vd0b")


def test_the_price_is_the_load_time_and_no_more() -> None:
    """An instance with the adapter and more work than the load time ahead is not taken; the terms tell why."""
    for ahead_tokens, expected in ((4_000, "vp1a"), (6_000, "vp0a")):  # 0.41 s and 0.61 s of work
        control = core()
        control.handle(AdaptersMeasured(0.0, "vp1a", ("sql",), 4))
        control.handle(AdaptersMeasured(0.0, "vp0a", ("other",), 4))
        control.handle(Arrived(0.0, request(1, ahead_tokens), ("vp1a", "vd1b")))
        (prefill,) = control.handle(Arrived(0.0, request(2, adapter="sql")))
        assert isinstance(prefill, Prefill)
        assert prefill.instance == expected
        assert prefill.terms is not None
        assert prefill.terms.parts["adapter_s"].tolist() == [LOAD_S, 0.0]
        base_s = 10e-3 + 1_000 * 100e-6
        assert prefill.terms.parts["prefill_s"].tolist() == pytest.approx([base_s + LOAD_S, base_s])


def test_loading_occupies_the_prefill_instance() -> None:
    control = core()
    control.handle(Arrived(0.0, request(1, adapter="sql")))
    assert control.loads(0.0)["vp0a"].pending_s == pytest.approx(10e-3 + 0.1 + LOAD_S)


def test_a_request_loads_its_adapter_for_the_next_one() -> None:
    """Also after other requests have made the instance busy for less than the load time."""
    control = core()
    assert placed(control, 1, "sql") == ("vp0a", "vd0b")
    control.handle(Arrived(0.0, request(2, 1_000), ("vp0a", "vd0b")))
    assert placed(control, 3, "sql") == ("vp0a", "vd0b")


def test_a_policy_without_seconds_breaks_ties_only() -> None:
    """`cla` has equal scores for idle instances, and prefers an idle one to a busy one with the adapter."""
    control = core(ControlSpec(decode="cla", adapters={"sql": LOAD_S}))
    control.handle(AdaptersMeasured(0.0, "vd1b", ("sql",), 4))
    assert placed(control, 1, "sql")[1] == "vd1b"
    control.handle(Arrived(1.0, request(2), ("vp0a", "vd1b")))
    control.handle(PrefillFinished(1.0, 2))
    assert placed(control, 3, "sql", at=1.0)[1] == "vd0b"


def test_an_instance_that_does_both_is_chosen_with_its_adapter() -> None:
    control = core(SPEC, "vb0a", "vb1a")
    control.handle(AdaptersMeasured(0.0, "vb1a", ("sql",), 4))
    decisions = control.handle(Arrived(0.0, request(1, adapter="sql")))
    assert [getattr(decision, "instance", getattr(decision, "target", None)) for decision in decisions] == [
        "vb1a",
        "vb1a",
    ]


def test_a_request_of_one_leg_goes_where_the_adapter_is_loaded() -> None:
    control = core()
    control.handle(AdaptersMeasured(0.0, "vd1b", ("sql",), 4))
    (decode,) = control.handle(Arrived(0.0, request(1, adapter="sql", one_leg=True)))
    assert isinstance(decode, Decode)
    assert decode.target == "vd1b"


def test_a_restarted_engine_has_no_adapter() -> None:
    control = core()
    control.handle(AdaptersMeasured(0.0, "vp1a", ("sql",), 4))
    control.handle(KvCleared(0.0, "vp1a"))
    assert placed(control, 1, "sql")[0] == "vp0a"


def test_an_unknown_instance_is_an_error() -> None:
    with pytest.raises(InputError, match="vp9a"):
        core().handle(AdaptersMeasured(0.0, "vp9a", ("sql",), 4))


adapters = st.sampled_from(["a", "b", "c", "d"])


@given(st.lists(st.one_of(adapters, st.lists(adapters, max_size=3, unique=True)), max_size=20), st.integers(1, 3))
def test_an_instance_has_the_adapters_used_last(uses: list[str | list[str]], slots: int) -> None:
    """The model is a list of all uses; an engine reports several at once."""
    loaded, order = LoadedAdapters(dict.fromkeys("abcd", 1.0)), list[str]()
    loaded.measured("p0", (), slots)
    for use in uses:
        if isinstance(use, str):
            loaded.used("p0", use)
        else:
            loaded.measured("p0", use, slots)
        order += [use] if isinstance(use, str) else use
    expected = list(dict.fromkeys(reversed(order)))[:slots]
    for adapter in "abcd":
        load_s = loaded.load_s(adapter, ("p0", "p1"))
        assert load_s is not None
        assert load_s.tolist() == [float(adapter not in expected), 1.0]
    assert loaded.load_s("unknown", ("p0",)) is None


def test_a_log_with_adapters_replays_and_without_them_nothing_changes() -> None:
    """Events and terms survive the log. Requests of the base model get the decisions of a core without adapters."""
    events: list[Event] = [
        KvStored(0.0, "vp1a", (1, 2, 3)),
        AdaptersMeasured(0.1, "vp0a", ("sql", "chat"), 2),
        Arrived(0.2, request(1, 100, blocks=(1, 2, 3))),
        Arrived(0.2, request(2, 100, adapter="chat")),
        Arrived(0.2, request(3, 100, adapter="sql")),
        PrefillFinished(0.5, 2),
        PrefillFinished(0.5, 1),
    ]
    control, records = core(), list[LogRecord]()
    for event in events:
        records.append(decode_record(encode(LogRecord(event, control.handle(event)))))
    again = list(replay(core(), records))
    assert [record.event for record, _ in again] == events
    assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)
    plain = ControlSpec(decode="load-aware", prefill="cache-aware").build(cluster_of(*NAMES))
    other = core()
    for event in (events[0], events[2], events[6]):
        assert encode(plain.handle(event)) == encode(other.handle(event))
    assert np.isfinite(records[2].decisions[0].terms.cost).all()  # type: ignore[union-attr]
