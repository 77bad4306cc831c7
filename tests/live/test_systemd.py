"""Live: systemd accepts the unit in the repository without a message and rates it as well protected."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.live.services import required

UNITS = sorted((Path(__file__).resolve().parents[2] / "deploy/systemd").glob("*.service"))
PROGRAM = Path(sys.executable).with_name("kvroute")
EXPOSURE_MAX = 2.0
"""Highest accepted exposure, on a scale up to 10; a unit without any protection has 9.6."""
pytestmark = pytest.mark.live


@pytest.fixture(params=UNITS, ids=lambda path: path.stem)
def unit(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Each unit, with the program of this environment instead of the installed one."""
    source: Path = request.param
    text = source.read_text()
    assert "/opt/kvroute/bin/kvroute" in text
    path = tmp_path / source.name
    path.write_text(text.replace("/opt/kvroute/bin/kvroute", str(PROGRAM)))
    return path


def test_systemd_accepts_every_directive(unit: Path) -> None:
    """An unknown directive or value causes a line on stderr, not a failure."""
    done = subprocess.run([required("systemd-analyze", "systemd"), "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_service_has_a_low_exposure_level(unit: Path) -> None:
    command = [required("systemd-analyze", "systemd"), "security", "--offline=true", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert level, done.stdout + done.stderr
    assert float(level[1]) <= EXPOSURE_MAX
