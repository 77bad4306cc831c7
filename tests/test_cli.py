"""The command line as a user meets it: help, version, wrong input."""

from __future__ import annotations

import subprocess
import sys


def test_version_is_the_packages() -> None:
    """`kvroute --version` prints the installed version."""
    from kvroute import __version__

    out = subprocess.run([sys.executable, "-m", "kvroute.cli.app", "--version"], capture_output=True, text=True)
    assert (out.returncode, out.stdout.strip()) == (0, f"kvroute {__version__}")
