"""Live: a user without a home directory and without write access to the installation, as under systemd's DynamicUser or
in a read-only container: commands work if only a temporary folder is writable, and if nothing is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.examples import EXAMPLES
from tests.live.services import as_service, completed, missing, started

from kvroute.topology import load
from kvroute.topology.schema import EndpointEntry

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]
PROGRAM = Path(sys.executable).with_name("kvroute")


@pytest.fixture(autouse=True)
def _require_namespaces() -> None:
    """Root and a kernel with mount namespaces are required."""
    tried = subprocess.run(as_service(PROGRAM, None, "--version"), capture_output=True, text=True)
    if tried.returncode:
        missing(f"no user without rights can be played here: {tried.stderr.strip()[-200:]}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can write, with a cluster file; no part of its path is private, unlike that of pytest's
    folders."""
    with tempfile.TemporaryDirectory(prefix="kvroute-live-") as name:
        place = Path(name)
        place.chmod(0o1777)
        shutil.copyfile(EXAMPLES / "small.yaml", place / "small.yaml")
        (place / "small.yaml").chmod(0o644)
        yield place


def test_kernels_are_cached_in_the_temporary_folder_with_one_warning(folder: Path) -> None:
    """Several workers share the folder and print one warning in total."""
    arguments = ("simulate", f"{folder}/small.yaml", "--requests", "20", "--seeds", "2", "--policy", "netkv", "--json")
    done = subprocess.run(as_service(PROGRAM, folder, *arguments, "--workers", "2"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 2
    assert done.stderr.count("kvroute: ") == 1
    assert f"{folder}/kvroute-kernels-65534" in done.stderr


def test_kernels_are_compiled_in_memory_without_a_writable_folder(folder: Path) -> None:
    """Worker processes need a writable folder too, so the runs share one process."""
    arguments = ("simulate", f"{folder}/small.yaml", "--requests", "20", "--seeds", "2", "--policy", "netkv", "--json")
    done = subprocess.run(as_service(PROGRAM, None, *arguments, "--workers", "2"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 2
    assert done.stderr.count("kernels cannot be cached") == 1
    assert "Traceback" not in done.stderr


def test_the_gateway_serves_with_embedded_engines(folder: Path) -> None:
    arguments = ("serve", "--embedded", f"{folder}/small.yaml", "--port", "0", "--admin-port", "0")
    with started(as_service(PROGRAM, folder, *arguments), "kvroute serves") as ready:
        assert completed(ready) == 3


def test_embedded_engines_without_a_temporary_folder_are_rejected_in_one_sentence(folder: Path) -> None:
    command = as_service(PROGRAM, None, "serve", "--embedded", f"{folder}/small.yaml")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--embedded: no temporary folder is writable" in done.stderr
    assert "Traceback" not in done.stderr


def test_engines_and_gateway_run_without_a_writable_folder(folder: Path) -> None:
    emulated = as_service(PROGRAM, None, "emulate", f"{folder}/small.yaml")
    with started(emulated, '{"instances"') as line:
        file = load(EXAMPLES / "small.yaml").file
        assert isinstance(file.instances, list)
        urls = {name: places["url"] for name, places in json.loads(line)["instances"].items()}
        placed = [replace(entry, endpoint=EndpointEntry(url=urls[entry.name])) for entry in file.instances]
        section = {"listen": {"port": 0}, "admin": {"port": 0}}
        (folder / "endpoints.yaml").write_text(replace(file, instances=placed, gateway=section).to_yaml())
        command = as_service(PROGRAM, None, "serve", str(folder / "endpoints.yaml"))
        with started(command, "kvroute serves") as ready:
            assert completed(ready) == 3
