"""Live: a user without a home on an installation that he cannot write, as under systemd's DynamicUser or in a read-only
container: commands work where a temporary folder alone can be written, and where nothing can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.examples import EXAMPLES

from kvroute.topology import load
from kvroute.topology.schema import EndpointEntry

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]
PROGRAM = Path(sys.executable).with_name("kvroute")
KEEPS = "+dac_read_search"
"""May read everything, for a checkout is often below a private home; may write what any other user may."""
SERVICE_USER = (
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *("--inh-caps", f"-all,{KEEPS}", "--ambient-caps", KEEPS, "--bounding-set", f"-all,{KEEPS}"),
    *("env", "-i", "HOME=/nonexistent", "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"),
)
SEALED = 'for d in /tmp /var/tmp; do mount --bind $d $d && mount -o remount,bind,ro $d || exit; done; exec "$@"'
NOTHING = ("unshare", "--mount", "--propagation", "private", "sh", "-c", SEALED, "sh")


def as_service(temporary: Path | None, *arguments: str) -> list[str]:
    """The command line of kvroute for a user who can write in that folder alone, or nowhere."""
    if temporary is None:
        return [*NOTHING, *SERVICE_USER, str(PROGRAM), *arguments]
    return [*SERVICE_USER, f"TMPDIR={temporary}", str(PROGRAM), *arguments]


@pytest.fixture(autouse=True)
def _possible() -> None:
    """It takes root, and a kernel with mount namespaces."""
    tried = subprocess.run(as_service(None, "--version"), capture_output=True, text=True)
    if tried.returncode:
        if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
            pytest.fail(tried.stderr)
        pytest.skip(f"no user without rights can be played here: {tried.stderr.strip()[-200:]}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody can write, with a cluster file; no part of its path is private, as pytest's own is."""
    with tempfile.TemporaryDirectory(prefix="kvroute-live-") as name:
        place = Path(name)
        place.chmod(0o1777)
        shutil.copyfile(EXAMPLES / "small.yaml", place / "small.yaml")
        (place / "small.yaml").chmod(0o644)
        yield place


def test_kernels_are_cached_in_the_temporary_folder_with_one_warning(folder: Path) -> None:
    """Several workers share the folder and the warning."""
    arguments = ("simulate", f"{folder}/small.yaml", "--requests", "20", "--seeds", "2", "--policy", "netkv", "--json")
    done = subprocess.run(as_service(folder, *arguments, "--workers", "2"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 2
    assert done.stderr.count("kvroute: ") == 1
    assert f"{folder}/kvroute-kernels-65534" in done.stderr


def test_kernels_are_compiled_in_memory_where_nothing_can_be_written(folder: Path) -> None:
    """Worker processes need a folder as well; the runs share one process then."""
    arguments = ("simulate", f"{folder}/small.yaml", "--requests", "20", "--seeds", "2", "--policy", "netkv", "--json")
    done = subprocess.run(as_service(None, *arguments, "--workers", "2"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 2
    assert done.stderr.count("kernels cannot be cached") == 1
    assert "Traceback" not in done.stderr


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


def completed(ready: str) -> int:
    """Tokens that the gateway answers with."""
    base = ready.split(": ", 1)[1].strip()
    body = json.dumps({"model": "llama-3-70b", "prompt": "Once upon a time", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def test_the_gateway_serves_with_embedded_engines(folder: Path) -> None:
    arguments = ("serve", "--embedded", f"{folder}/small.yaml", "--port", "0", "--admin-port", "0")
    with started(as_service(folder, *arguments), "kvroute serves") as ready:
        assert completed(ready) == 3


def test_embedded_engines_without_a_temporary_folder_are_refused_in_one_sentence(folder: Path) -> None:
    command = as_service(None, "serve", "--embedded", f"{folder}/small.yaml")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--embedded: no temporary folder can be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_engines_and_gateway_run_where_nothing_can_be_written(folder: Path) -> None:
    emulated = as_service(None, "emulate", f"{folder}/small.yaml")
    with started(emulated, '{"instances"') as line:
        file = load(EXAMPLES / "small.yaml").file
        assert isinstance(file.instances, list)
        urls = {name: places["url"] for name, places in json.loads(line)["instances"].items()}
        placed = [replace(entry, endpoint=EndpointEntry(url=urls[entry.name])) for entry in file.instances]
        section = {"listen": {"port": 0}, "admin": {"port": 0}}
        (folder / "endpoints.yaml").write_text(replace(file, instances=placed, gateway=section).to_yaml())
        command = as_service(None, "serve", str(folder / "endpoints.yaml"))
        with started(command, "kvroute serves") as ready:
            assert completed(ready) == 3
