"""Parameters of the policy in a cluster file: numbers, and times with their unit."""

from __future__ import annotations

import pytest

from kvroute.serve.config.preflight import settings_of
from kvroute.serve.config.settings import GatewaySettings
from kvroute.types import InputError, InputErrors


def test_times_have_a_unit_and_numbers_none() -> None:
    given: dict[str, float | str] = {"tpot": "50 ms", "ttft": 2.0, "fading_s": "2 min", "token_delay_max": "1e9"}
    spec = GatewaySettings(parameters=given).control_spec()
    assert spec.parameters == {"tpot": 0.05, "ttft": 2.0, "fading_s": 120.0, "token_delay_max": 1e9}


@pytest.mark.parametrize("wrong", ["50 mm", "5o", "1 2"])
def test_another_text_is_named_with_its_parameter(wrong: str) -> None:
    with pytest.raises(InputError, match=f"tpot: '{wrong}' is neither a number nor a time; write a number, or a time"):
        GatewaySettings(parameters={"tpot": wrong}).control_spec()


def given(section: str) -> GatewaySettings:
    return settings_of(section, "c.yaml", None)


def test_a_policy_may_hold_its_parameters() -> None:
    targets = given("gateway: {policy: {tpot: 50 ms}, parameters: {ttft: 2 s}}\n")
    assert targets.policy == GatewaySettings().policy
    assert targets.control_spec().parameters == {"tpot": 0.05, "ttft": 2.0}
    named = given("gateway: {policy: {name: foresight, width: 1}}\n").control_spec()
    assert (named.decode, named.parameters) == ("foresight", {"width": 1.0})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("policy: {tpto: 50 ms}", "tpto"),
        ("policy: {name: netkv, tpot: 50 ms}", "tpot"),
        ("policy: {name: 5}", "gateway.policy: 5 does not fit"),
        ("policy: {tpot: [1]}", r"gateway: \[1\] does not fit; write text such as '50 ms'"),
        ("policy: {tpot: 50 ms}, parameters: {tpot: 60 ms}", "gateway.policy: .* does not fit"),
    ],
)
def test_faults_of_a_policy_with_parameters_are_named(section: str, message: str) -> None:
    with pytest.raises(InputErrors, match=message):
        given(f"gateway: {{{section}}}\n")
