"""A command that the process of `tests.commands` forks starts and ends like one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.commands import folder_with_kvroute, kvroute_command
from tests.examples import EXAMPLES
from tests.waiting import PATIENCE_S

EMULATE = ("emulate", str(EXAMPLES / "small.yaml"), "--until-eof")


def begun() -> subprocess.Popen[str]:
    """Start engines, and wait until they serve."""
    process = subprocess.Popen(
        kvroute_command(*EMULATE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith('{"instances"')
    return process


def test_it_has_the_folder_environment_and_streams_of_its_client(tmp_path: Path) -> None:
    """And the exit code of the command is that of the client."""
    (tmp_path / "x.yaml").write_text("name: x\n")
    where = {"PATH": f"{folder_with_kvroute()}:/usr/bin:/bin", "COLUMNS": "60"}
    ended = subprocess.run("kvroute topology check x.yaml", shell=True, cwd=tmp_path, env=where, capture_output=True)
    assert (ended.returncode, b"x.yaml" in ended.stderr, b"Traceback" in ended.stderr) == (2, True, False)
    helped = subprocess.run(["kvroute", "llm", "--help"], env=where, stdout=subprocess.PIPE, text=True, check=True)
    assert max(map(len, helped.stdout.splitlines())) == 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_gets_the_signals_of_its_client(number: signal.Signals) -> None:
    """The command ends by itself, with exit code 0."""
    with begun() as process:
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_it_is_killed_with_its_client() -> None:
    """Its standard output ends although its standard input does not."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        kvroute_command(*EMULATE), stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    assert process.stdout.read() == b""
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process.stdout.close()
    for end in (reading, writing):
        os.close(end)
