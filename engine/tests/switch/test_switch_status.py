"""The status file of a switch: what it says, when it counts, and the command that writes it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tests.commands import kvroute_command
from tests.waiting import PATIENCE_S

from kvroute_engine.switch import AggregationClient
from kvroute_engine.switch.status import STALE_S, SwitchStatus, read_status, write_status

STATUS = SwitchStatus(100.0, "10.0.0.1:7300", "python", 1024, 896, 5, 2)


def test_a_status_is_read_as_it_was_written_until_it_is_too_old(tmp_path: Path) -> None:
    path = tmp_path / "switch.json"
    assert read_status(path, 100.0) is None
    write_status(path, STATUS)
    assert read_status(path, 100.0 + STALE_S) == STATUS
    assert read_status(path, 100.1 + STALE_S) is None
    assert [place.name for place in tmp_path.iterdir()] == ["switch.json"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"written_unix_s": "x"}'])
def test_a_damaged_file_is_no_status(tmp_path: Path, content: str) -> None:
    (tmp_path / "switch.json").write_text(content)
    assert read_status(tmp_path / "switch.json", 0.0) is None


def test_the_command_writes_its_free_slots_and_removes_the_file_at_its_end(tmp_path: Path) -> None:
    """A group with 100 of 300 slots joins and leaves."""
    path = tmp_path / "switch.json"
    command = kvroute_command("switch", "--port", "0", "--slots", "300", "--status-file", str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, _, port = json.loads(process.stdout.readline())["address"].partition(":")
        assert _free(path, 300)
        with AggregationClient((host, int(port)), job=1, rank=0, ranks=1, slots=100) as client:
            client.all_reduce(np.ones(10, np.float32))
            assert _free(path, 200)
        assert _free(path, 300)
        status = read_status(path, time.time())
        assert status is not None
        assert (status.slots, status.address, status.data_plane) == (300, f"{host}:{port}", "python")
        assert status.packets > status.chunks > 0
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert not path.exists()


def _free(path: Path, slots: int) -> bool:
    """Return whether the switch says so within the limit."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        status = read_status(path, time.time())
        if status is not None and status.free_slots == slots:
            return True
        time.sleep(0.02)
    return False
