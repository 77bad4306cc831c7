"""Programs as services, for live tests: run as an unprivileged user, wait until ready, request a completion."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KEEPS = "+dac_read_search"
"""Capability to read every file, because a checkout is often below a private home. Write access is that of any other
user."""
SERVICE_USER = (
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *("--inh-caps", f"-all,{KEEPS}", "--ambient-caps", KEEPS, "--bounding-set", f"-all,{KEEPS}"),
    *("env", "-i", "HOME=/nonexistent", "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"),
)
SEALED = 'for d in /tmp /var/tmp; do mount --bind $d $d && mount -o remount,bind,ro $d || exit; done; exec "$@"'
NOTHING = ("unshare", "--mount", "--propagation", "private", "sh", "-c", SEALED, "sh")


def as_service(program: Path, temporary: Path | None, *arguments: str) -> list[str]:
    """Return the command line of a program for a user who can write only to that folder, or nowhere."""
    if temporary is None:
        return [*NOTHING, *SERVICE_USER, str(program), *arguments]
    return [*SERVICE_USER, f"TMPDIR={temporary}", str(program), *arguments]


FULL = os.environ.get("KVROUTE_LIVE_FULL") == "1"
"""Whether long tests run in full."""


def extent(full: int, short: int) -> int:
    """Return how many requests a long test sends: `full` with KVROUTE_LIVE_FULL=1, otherwise `short`."""
    return full if FULL else short


def missing(what: str) -> None:
    """Skip the test because of a missing component; fail it if KVROUTE_REQUIRE_LIVE=1 requires all of them."""
    if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
        pytest.fail(what)
    pytest.skip(what)


def required(program: str, package: str) -> str:
    """Return the path of a program of Debian's package."""
    path = shutil.which(program)
    if path is None:
        missing(f"there is no {program}; install Debian's package {package}")
    assert path is not None
    return path


def free_port() -> int:
    """Return a TCP port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: list[str], ready: str) -> Iterator[str]:
    """Run a service and yield the line that contains `ready`; check that it ends without an error."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            while not lines or ready not in lines[-1]:
                line = process.stdout.readline()
                assert line, "".join(lines)
                lines.append(line)
            yield lines[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            lines.append(process.communicate(timeout=300)[0])
    assert process.returncode == 0, "".join(lines)
    assert "Traceback" not in "".join(lines)


@contextmanager
def prometheus(program: str, config: Path, folder: Path) -> Iterator[str]:
    """Run a Prometheus server with that configuration and yield its URL; its data and log are in the folder."""
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def completed(ready: str) -> int:
    """Request a completion from the gateway; return the number of its tokens."""
    base = ready.split(": ", 1)[1].strip()
    body = json.dumps({"model": "llama-3-70b", "prompt": "Once upon a time", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])
