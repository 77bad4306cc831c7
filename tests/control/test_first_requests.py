"""After the warm-up no kernel is compiled during the first requests, for each policy, constraint and option."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvroute.policies import DECODE_POLICIES

FAMILIES = ("foresight", "netkv")
FORESIGHT, NETKV = ([name for name in DECODE_POLICIES if name.startswith(family)] for family in FAMILIES)
OTHERS = [name for name in DECODE_POLICIES if not name.startswith(FAMILIES)]
GROUPS = [FORESIGHT, *(pytest.param(policies, marks=pytest.mark.slow) for policies in (NETKV, OTHERS))]


@pytest.mark.parametrize("policies", GROUPS, ids=lambda policies: policies[0])
def test_the_first_requests_compile_nothing(policies: list[str]) -> None:
    """In a process of its own, because kernels that other tests have used are compiled here already."""
    command = [sys.executable, "-m", "tests.control.first_requests", *policies]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == {policy: {} for policy in policies}
