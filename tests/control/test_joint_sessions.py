"""Session affinity where prefill and decode are chosen together: the instances that served the session last may cost a
few seconds more, and no more, in pairs and alone."""

from __future__ import annotations

import numpy as np
import pytest
from tests.control.test_aggregated import TEXT, aggregated

from kvroute.control import Control, ControlSpec
from kvroute.policies import NO_BOUND
from kvroute.topology import parse
from kvroute.types import Arrived, Decision, Decode, Finished, Prefill, PrefillFinished, Request, SessionsServed

MINE = 7
BONUS_S = 0.5


def core(**parameters: float) -> Control:
    unbounded = parameters | {"token_delay_max": NO_BOUND}
    spec = ControlSpec(decode="foresight-joint", parameters=unbounded, session_bonus_s=BONUS_S)
    return spec.build(parse(TEXT))


def arrive(control: Control, number: int, tokens: int = 1_000, *only: str, session: int = 0) -> tuple[Decision, ...]:
    """Let a request arrive, which may be limited to some instances."""
    request = Request(id=number, input_tokens=tokens, max_output_tokens=10, session=session)
    return control.handle(Arrived(0.0, request, only=only or None))


def served_by(control: Control, *instances: str) -> None:
    """Serve a first request of the session by these instances, one or a pair, to its end."""
    decisions = arrive(control, 0, 1_000, *instances, session=MINE)
    if isinstance(decisions[0], Prefill) and len(decisions) == 1:
        decisions += control.handle(PrefillFinished(0.0, 0))
    assert isinstance(decisions[-1], Decode)
    assert decisions[-1].target == instances[-1]
    control.handle(Finished(0.0, 0))


@pytest.mark.parametrize(("ahead_tokens", "expected"), [(500, "d1"), (6_000, "d0")])
def test_an_aggregated_request_has_the_bonus(ahead_tokens: int, expected: str) -> None:
    """A prompt of 60 ms ahead of the session's decode instance costs less than the bonus: its time, its delay by this
    one, and the later prompts to which it points. One of 0.61 s costs more."""
    control = core(aggregated=1)
    served_by(control, "d1")
    arrive(control, 1, ahead_tokens, "d1")
    decisions = arrive(control, 2, session=MINE)
    assert aggregated(decisions) == expected
    assert isinstance(decisions[0], Decode)
    terms = decisions[0].terms
    assert terms is not None
    assert terms.parts["session_s"].tolist() == [0.0, -BONUS_S, 0.0]
    seconds = [part for name, part in terms.parts.items() if name.endswith("_s")]
    assert terms.cost.tolist() == pytest.approx(np.sum(seconds, axis=0).tolist())


def test_a_request_of_another_session_has_no_bonus() -> None:
    control = core(aggregated=1)
    served_by(control, "d1")
    decisions = arrive(control, 1, session=MINE + 1)
    assert aggregated(decisions) == "d0"


@pytest.mark.parametrize(("ahead_tokens", "expected"), [(4_000, "p1"), (6_000, "p0")])
def test_a_pair_has_the_bonus(ahead_tokens: int, expected: str) -> None:
    """0.41 s of work ahead of the session's prefill instance are less than the bonus, 0.61 s are more."""
    control = core(aggregated=0)
    served_by(control, "p1", "d1")
    arrive(control, 1, ahead_tokens, "p1", "d1")
    (prefill,) = arrive(control, 2, session=MINE)
    assert isinstance(prefill, Prefill)
    assert prefill.instance == expected
    assert prefill.terms is not None
    assert prefill.terms.parts["session_s"].tolist() == [0.0, -BONUS_S]
    parts = prefill.terms.parts
    assert prefill.terms.cost.tolist() == pytest.approx(
        (parts["start_s"] + parts["decode_s"] + parts["session_s"]).tolist()
    )


@pytest.mark.parametrize(("session", "first"), [(MINE, Prefill), (MINE + 1, Decode)])
def test_a_pair_with_the_bonus_can_be_cheaper_than_an_aggregated_request(session: int, first: type[Decision]) -> None:
    """Without the bonus a decode instance alone is cheaper, because nothing is transferred."""
    control = core(aggregated=1)
    control.handle(SessionsServed(0.0, ((MINE, "p1", ""),)))
    (decision,) = arrive(control, 1, session=session)
    assert isinstance(decision, first)
    if isinstance(decision, Prefill):
        assert decision.instance == "p1"
        assert decision.terms is not None
        assert decision.terms.parts["pair_s"][1] < decision.terms.parts["aggregated_s"][1]


def test_a_prefill_instance_that_goes_on_has_served_both_legs() -> None:
    control = core(aggregated=2)
    decisions = arrive(control, 0, 1_000, "p1", session=MINE)
    assert [type(decision) for decision in decisions] == [Prefill, Decode]
    (served,) = control.sessions(0.0)
    assert served.sessions == ((MINE, "p1", "p1"),)
