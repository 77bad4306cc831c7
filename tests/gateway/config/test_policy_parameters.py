"""Parameters of the policy in a cluster file: numbers, and times with their unit."""

from __future__ import annotations

import pytest

from kvroute.gateway.config.settings import GatewaySettings
from kvroute.types import InputError


def test_times_have_a_unit_and_numbers_none() -> None:
    given: dict[str, float | str] = {"tpot": "50 ms", "ttft": 2.0, "fading_s": "2 min", "token_delay_max": "1e9"}
    spec = GatewaySettings(parameters=given).control_spec()
    assert spec.parameters == {"tpot": 0.05, "ttft": 2.0, "fading_s": 120.0, "token_delay_max": 1e9}


@pytest.mark.parametrize("wrong", ["50 mm", "5o", "1 2"])
def test_another_text_is_named_with_its_parameter(wrong: str) -> None:
    with pytest.raises(InputError, match=f"tpot: '{wrong}' is neither a number nor a time; write a number, or a time"):
        GatewaySettings(parameters={"tpot": wrong}).control_spec()
