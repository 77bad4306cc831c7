"""The process may open as many files as its settings promise connections."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.gateway.rig import CLUSTER

LIMIT = 400


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="limits are read from /proc")
def test_serve_raises_the_limit_of_open_files(tmp_path: Path) -> None:
    file, ready = tmp_path / "cluster.yaml", tmp_path / "ready.json"
    file.write_text(f"{CLUSTER}  limits: {{connections: 200}}\n")
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--ready-file", str(ready)]
    limited = ["sh", "-c", f'ulimit -Sn {LIMIT}; exec "$@"', "sh", *command, "--until-eof"]
    with subprocess.Popen(limited, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.01)
            [line] = [each for each in limits_of(process.pid) if each.startswith("Max open files")]
            assert int(line.split()[3]) >= 3 * 200
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def limits_of(pid: int) -> list[str]:
    """One line for each limit, soft before hard."""
    return Path(f"/proc/{pid}/limits").read_text().splitlines()
