"""How commands name themselves in their output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INSTALLED = Path(sys.executable).with_name("kvroute")
pytestmark = pytest.mark.skipif(not INSTALLED.is_file(), reason="kvroute is not installed beside this Python")
SCRIPT = "from kvroute.cli.output import own_command; print(own_command())"


def printed_command(folder: Path, path: str) -> str:
    """Return the output of a process started in `folder` with this PATH."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=True
    )
    return ended.stdout.strip()


def test_a_command_on_the_path_is_printed_without_a_folder(tmp_path: Path) -> None:
    assert printed_command(tmp_path, f"{INSTALLED.parent}:/usr/bin") == "kvroute"


def test_a_command_outside_the_path_runs_as_printed(tmp_path: Path) -> None:
    """The path is relative if it is below the working folder; another kvroute on the PATH is a different command."""
    root = INSTALLED.parents[2]
    for path in ("/usr/bin", str(tmp_path)):
        (tmp_path / "kvroute").write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / "kvroute").chmod(0o755)
        for folder in (root, tmp_path):
            named = printed_command(folder, path)
            ended = subprocess.run(f"{named} --version", shell=True, cwd=folder, capture_output=True, text=True)
            assert ended.returncode == 0, named
            assert ended.stdout.startswith("kvroute ")
    assert printed_command(root, "/usr/bin") == str(INSTALLED.relative_to(root))
