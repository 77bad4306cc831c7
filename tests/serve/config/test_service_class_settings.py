"""The sections `classes` and `fair_queue`: each wrong value is one sentence with its place and its remedy."""

from __future__ import annotations

import pytest
from tests.serve.rig import CLUSTER

from kvroute.serve.config.preflight import deployment_of
from kvroute.types import InputErrors

KEY = '  keys: {known: {alice: "sha256:' + "0" * 64 + '"}, classes: {%s}}\n'

CASES = (
    (KEY % "alise: default", "there is no key 'alise'", "alice"),
    (KEY % "alice: fast" + "  classes: {fats: {}}\n", "there is no class 'fast'", "fats"),
    ("  classes: {default: {tokens_per_minute: 10}}\n", "rates are limited for each API key", "add `keys`"),
    ("  classes: {default: {priority: 2, priority_max: 1}}\n", "`priority_max` (1) is below `priority` (2)", "give 2"),
    ("  classes: {default: {slo: {late: defer}}}\n", "the section `slo` sets no limit", "ttft: 2 s"),
    ("  classes: {default: {weight: 0}}\n", "weight", ""),
    ("  classes: {default: {slo: {ttft: 2}}}\n", "2", "s"),
    ("  classes: {default: {slo: {ttft: 2 s, late: drop}}}\n", "drop", "refuse"),
    ("  fair_queue: {work: 0 s}\n", "0 s", "1 ms"),
    ("  fair_queue: {runing: 4}\n", "runing", "running"),
)


@pytest.mark.parametrize(("section", "what", "hint"), CASES)
def test_a_wrong_value_is_reported_with_its_line(section: str, what: str, hint: str) -> None:
    """The message says what is wrong, where, and how to fix it."""
    with pytest.raises(InputErrors) as raised:
        deployment_of(CLUSTER + section, "test.yaml", embedded=True)
    text = str(raised.value)
    assert what in text
    assert hint in text
    assert "test.yaml:" in text


def test_a_class_with_a_fault_is_not_reported_as_missing() -> None:
    """One fault gives one error."""
    section = KEY % "alice: fast" + "  classes: {fast: {priority: high}}\n"
    with pytest.raises(InputErrors) as raised:
        deployment_of(CLUSTER + section, "test.yaml", embedded=True)
    text = str(raised.value)
    assert "priority" in text
    assert "there is no class" not in text


def test_predictions_are_made_only_with_classes_or_a_fair_queue() -> None:
    """Without them a decision costs what it did."""

    def predicts(section: str) -> bool:
        return deployment_of(CLUSTER + section, "test.yaml", embedded=True)[1].control_spec().predicts

    assert not predicts("")
    assert predicts("  classes: {default: {}}\n")
    assert predicts("  fair_queue: {}\n")
