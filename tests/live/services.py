"""Programs as services, for live tests: run as a user without rights, waited for, asked for a completion."""

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
"""May read everything, for a checkout is often below a private home; may write what any other user may."""
SERVICE_USER = (
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *("--inh-caps", f"-all,{KEEPS}", "--ambient-caps", KEEPS, "--bounding-set", f"-all,{KEEPS}"),
    *("env", "-i", "HOME=/nonexistent", "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"),
)
SEALED = 'for d in /tmp /var/tmp; do mount --bind $d $d && mount -o remount,bind,ro $d || exit; done; exec "$@"'
NOTHING = ("unshare", "--mount", "--propagation", "private", "sh", "-c", SEALED, "sh")


def as_service(program: Path, temporary: Path | None, *arguments: str) -> list[str]:
    """The command line of a program for a user who can write in that folder alone, or nowhere."""
    if temporary is None:
        return [*NOTHING, *SERVICE_USER, str(program), *arguments]
    return [*SERVICE_USER, f"TMPDIR={temporary}", str(program), *arguments]


def missing(what: str) -> None:
    """Skip the test for want of a component; fail it where KVROUTE_REQUIRE_LIVE=1 asks for all of them."""
    if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
        pytest.fail(what)
    pytest.skip(what)


def required(program: str, package: str) -> str:
    """The path of a program of Debian's package."""
    found = shutil.which(program)
    if found is None:
        missing(f"there is no {program}; install Debian's package {package}")
    assert found is not None
    return found


def free_port() -> int:
    """A TCP port on loopback that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: list[str], ready: str) -> Iterator[str]:
    """A service while it runs, and the line that says `ready`; it ends without a fault."""
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
    """The URL of a Prometheus server with that configuration; its data and log go to the folder."""
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
    """Tokens that the gateway answers with."""
    base = ready.split(": ", 1)[1].strip()
    body = json.dumps({"model": "llama-3-70b", "prompt": "Once upon a time", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])
