"""Runs a command several times beside busy loops and counts the runs that fail.

    python tests/soak.py --runs 10 --loops 2 -- make test

A test that passes on a quiet machine only is a defect: it fails on a shared one. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""Ends by itself when its parent process has ended in any way."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    """Return 0 if every run passed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="how often to run the command")
    parser.add_argument("--loops", type=int, default=2, help="busy loops beside it")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    options = parser.parse_args()
    failed = 0
    with busy_loops(options.loops):
        for number in range(1, options.runs + 1):
            began = time.monotonic()
            code = subprocess.run(options.command).returncode
            failed += code != 0
            outcome = "passed" if code == 0 else f"failed with exit code {code}"
            seconds = time.monotonic() - began
            _say(f"run {number} of {options.runs} {outcome} after {seconds:.0f} s; {number - failed} passed so far")
    _say(f"{options.runs - failed} of {options.runs} runs passed beside {options.loops} busy loop(s)")
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
