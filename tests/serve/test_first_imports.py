"""The first requests to a gateway find all modules imported and all kernels compiled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("policy", "variant"),
    [
        ("foresight-joint", "tenants"),
        *(pytest.param(policy, "policy", marks=pytest.mark.slow) for policy in ("foresight-joint", "netkv")),
    ],
)
def test_the_first_requests_import_and_compile_nothing(policy: str, variant: str) -> None:
    """On every path, with every kind of error. An import during a request blocks the event loop, and fails where the
    process has no file descriptor left."""
    command = [sys.executable, "-m", "tests.serve.first_requests", policy, variant]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(output.splitlines()[-1]) == {"modules": [], "kernels": []}
