"""Kernels that are not cached are compiled by another process than the gateway's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[3] / "examples/small.yaml"
WARM_UP = """
import os, sys
from pathlib import Path
from kvroute.control import ControlSpec
from kvroute.serve.lifecycle.compilation import warm_up
from kvroute.topology import parse

text = Path(sys.argv[1]).read_text()
if sys.argv[2] == "alone":
    sys.executable = "false"
warm_up(ControlSpec(decode="round-robin", prefill="round-robin"), parse(text), text)
print("numba.np.linalg" in sys.modules)
"""


def compiles_itself(cache: Path, mode: str) -> bool:
    """Return whether a process that warms up has loaded numba's compiler. Args: `mode` "alone": no other process can
    be started."""
    command = [sys.executable, "-c", WARM_UP, str(CLUSTER), mode]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return ended.stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "alone"])
def test_kernels_are_compiled_elsewhere(mode: str, tmp_path: Path) -> None:
    """The compiler is not loaded with an empty cache. If the other process fails, kernels are compiled all the same,
    and the next start finds them."""
    assert compiles_itself(tmp_path, mode) == (mode == "alone")
    assert any(tmp_path.rglob("*.nbi"))
    assert not compiles_itself(tmp_path, "alone")
