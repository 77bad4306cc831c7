"""Fixtures for tests of the command line: the command in an empty folder, a trace, and an event log."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.cli.cli_rig import CLUSTER, Ended, Kvroute

from kvroute.cli.app import main


@pytest.fixture
def kvroute(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Kvroute:
    """The entry point of the installed command, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # independent of the terminal that runs the tests
    # The completion script is requested by name; shell detection depends on the calling process.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kvroute", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twenty requests within two seconds; some share a prefix, and one requests no output."""
    lines = [
        {
            "timestamp": 100 * number,
            "input_length": 700 + 400 * (number % 5),
            "output_length": 0 if number == 7 else 5 + number,
            "hash_ids": [number % 3, *(100 * number + k for k in range(1, -(-(700 + 400 * (number % 5)) // 512)))],
        }
        for number in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def log(kvroute: Kvroute, trace: str) -> Path:
    """A recorded run with NetKV."""
    run = kvroute(
        "simulate", CLUSTER, "--trace", trace, "--policy", "netkv", "--seeds", "1", "--log", "run.log", "--workers", "1"
    )
    assert run.code == 0, run.err
    return Path("run.log")
