"""Parameters of the policy in a cluster file: numbers, and times with their unit."""

from __future__ import annotations

import jsonschema_rs
import pytest

from kvroute.cli.serve.overrides import Overrides
from kvroute.serve.config.policy import policy_text
from kvroute.serve.config.preflight import settings_of
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology.json_schema import cluster_json_schema
from kvroute.types import InputError, InputErrors


def test_times_have_a_unit_and_numbers_none() -> None:
    given: dict[str, float | str] = {"tpot": "50 ms", "ttft": "2 s", "fading_s": "2 min", "step_floor_s": 1e-5}
    spec = GatewaySettings(parameters=given).control_spec()
    assert spec.parameters == {"tpot": 0.05, "ttft": 2.0, "fading_s": 120.0, "step_floor_s": 1e-5}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("tpot", 50, "tpot: '50' is not a duration: it has no unit; write a number and one of .*, such as 50 ms"),
        ("ttft", 2.5, "ttft: '2.5' is not a duration: it has no unit"),
        ("tpot", "50 mm", "tpot: '50 mm' is not a duration: the unit 'mm'"),
        ("fading_s", "1 2", "fading_s: '1 2' is not a duration"),
        ("width", "2 ms", "width: '2 ms' is not a number; write a number without a unit"),
    ],
)
def test_a_wrong_unit_is_named_with_its_parameter(name: str, wrong: float | str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GatewaySettings(parameters={name: wrong}).control_spec()


def given(section: str) -> GatewaySettings:
    return settings_of(section, "c.yaml", None)


def test_a_policy_may_hold_its_parameters() -> None:
    targets = given("gateway: {policy: {tpot: 50 ms}, parameters: {ttft: 2 s}}\n")
    assert targets.policy == GatewaySettings().policy
    assert targets.control_spec().parameters == {"tpot": 0.05, "ttft": 2.0}
    named = given("gateway: {policy: {name: foresight, width: 1}}\n").control_spec()
    assert (named.decode, named.parameters) == ("foresight", {"width": 1.0})
    assert given("gateway: {policy: {token_delay_max: 1e9}}\n").parameters == {"token_delay_max": 1e9}


FAULTS = {
    "policy: {tpto: 50 ms}": ("policy.tpto", "has no parameter 'tpto'; did you mean 'tpot'?"),
    "policy: {tpot: 50}": ("policy.tpot", "'50' is not a duration: it has no unit"),
    "policy: {name: netkv, tpot: 50 ms}": ("policy.tpot", "'netkv' has no parameter 'tpot'; it takes none"),
    "policy: {name: foresight, ttft: 2 s}": ("policy.ttft", "'foresight' has no parameter 'ttft'; it takes "),
    "policy: {name: foresight-closed, width: 2}": ("policy.width", "'foresight-closed' has no parameter 'width'"),
    "policy: {name: foresigt, tpot: 1 s}": ("policy.name", "unknown decode policy 'foresigt'; did you mean"),
    "policy: {name: 5, tpot: 1 s}": ("policy.name", "5 does not fit; write text such as 'foresight-joint'"),
    "policy: [netkv]": ("policy", "['netkv'] does not fit; write text such as 'foresight-joint'"),
    "policy: {}": ("policy", "the mapping is empty; write the name of a policy, or parameters of foresight-joint"),
    "policy: {tpot: [1]}": ("policy.tpot", "[1] does not fit; write text such as '50 ms'"),
    "policy: {factor_max: 0.5}": ("policy.factor_max", "does not include 1"),
    "policy: {remembered: 1}": ("policy.remembered", "1.0 is out of range; use below 1"),
    "policy: {tpot: 1 s}, parameters: {tpot: 2 s}": ("policy.tpot", "is given here and in `gateway.parameters`"),
    "policy: {ttft: 1 s}, parameters: {width: -1}": ("parameters.width", "-1.0 is not a number of 0 or more"),
    "policy: cla, parameters: {cache_weight: 0, load_weight: 0}": ("parameters", "both weights are zero"),
    "policy: {name: cla, cache_weight: 0, load_weight: 0}": ("policy", "both weights are zero"),
    "policy: {ttft: 1 s}, parameters: 5": ("parameters", "5 is not a mapping"),
}


@pytest.mark.parametrize("section", FAULTS)
def test_a_fault_of_a_policy_with_parameters_is_named_at_its_key(section: str) -> None:
    field, message = FAULTS[section]
    with pytest.raises(InputErrors) as refused:
        given(f"gateway:\n  {{{section}}}\n")
    (fault,) = refused.value.problems
    assert str(fault).startswith(f"c.yaml:2: gateway.{field}: ")
    assert message in str(fault)


def test_every_fault_of_the_parameters_is_named() -> None:
    with pytest.raises(InputErrors) as refused:
        given("gateway:\n  policy:\n    tpto: 1 s\n    ttft: 2\n    width: 1.5\n")
    assert [str(fault).split(":")[1] for fault in refused.value.problems] == ["3", "4", "5"]


def test_the_schema_accepts_both_forms() -> None:
    schema = cluster_json_schema({"gateway": GatewaySettings})["$defs"]["GatewaySettings"]["properties"]["policy"]
    validator = jsonschema_rs.validator_for(schema)
    assert validator.is_valid("netkv")
    assert validator.is_valid({"name": "foresight", "tpot": "50 ms", "width": 1})
    assert not validator.is_valid(5)


def test_log_lines_and_remarks_name_the_parameters_of_the_policy() -> None:
    plain, targets = GatewaySettings(), given("gateway: {policy: {tpot: 50 ms, ttft: 2 s}, parameters: {width: 1}}\n")
    assert plain.policy_fields() == {"policy": plain.policy}
    assert targets.policy_fields() == {"policy": plain.policy, "parameters": "width=1, tpot=50 ms, ttft=2 s"}
    assert policy_text(targets.policy, targets.parameters) == f"{plain.policy} (width=1, tpot=50 ms, ttft=2 s)"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (None, []),
        ("foresight-joint", []),
        ("foresight", ["no effect on foresight: ttft of foresight-joint"]),
        ("netkv", ["no effect on netkv: tpot and ttft of foresight-joint"]),
    ],
)
def test_an_option_for_the_policy_keeps_the_parameters_that_it_has_and_names_the_others(
    option: str | None, said: list[str]
) -> None:
    targets, overrides = given("gateway: {policy: {tpot: 50 ms, ttft: 2 s}}\n"), Overrides(policy=option)
    kept = overrides.applied(targets).parameters
    assert overrides.remarks(targets) == said
    assert [name for name in targets.parameters if name not in kept] == [
        name for name in ("tpot", "ttft") if said and name in said[0]
    ]
