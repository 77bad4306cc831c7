"""Live: the steps of the Dockerfile make an installation that serves as its own user on a read-only file system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.dockerfile import Instruction, of, stages
from tests.examples import EXAMPLES
from tests.live.services import SERVICE_USER, completed, missing, started

ROOT = Path(__file__).resolve().parents[2]
BUILD, FINAL = stages()
READ_ONLY = 'd=$1; shift; mount --bind $d $d && mount -o remount,bind,ro $d && ! touch $d/file 2>/dev/null && exec "$@"'
SEALED = ("unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh")
pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """The result of the build stage, with /opt below this folder."""
    with tempfile.TemporaryDirectory(prefix="kvroute-image-") as name:
        root = Path(name)
        root.chmod(0o755)
        [work] = of(BUILD, "WORKDIR")
        folder = root / work.rest.lstrip("/")
        folder.mkdir()
        (root / "opt").mkdir()
        for instruction in BUILD:
            if instruction.keyword == "COPY":
                _copy(instruction, folder)
            elif instruction.keyword == "RUN":
                _run(instruction, root, folder)
        yield root


def _copy(instruction: Instruction, folder: Path) -> None:
    *sources, target = instruction.arguments
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / target).mkdir(exist_ok=True)
            shutil.copy(ROOT / source, folder / target)


def _run(instruction: Instruction, root: Path, folder: Path) -> None:
    """Run a step of the Dockerfile with another location of /opt."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = instruction.rest.replace("/opt/", f"{root}/opt/")
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_final_stage_contains_only_the_environment_and_no_installer(image: Path) -> None:
    """kvroute is a plain installation in it: nothing refers to the sources."""
    [copied] = of(FINAL, "COPY")
    assert copied.rest == "--from=build /opt/kvroute /opt/kvroute"
    packages = {path.name.split("-")[0] for path in (image / "opt/kvroute").glob("lib/*/site-packages/*.dist-info")}
    assert {"kvroute", "aiohttp", "numba"} <= packages
    assert packages.isdisjoint({"pip", "setuptools", "wheel", "hatchling", "pytest"})
    assert not list((image / "opt/kvroute").glob("lib/*/site-packages/*kvroute*.pth"))


def test_the_gateway_serves_and_its_health_check_passes(image: Path) -> None:
    """The gateway starts with the image's entry point, on emulated engines and free ports. Only the volume is
    writable."""
    with tempfile.TemporaryDirectory(prefix="kvroute-live-") as name:
        writable = Path(name)
        writable.chmod(0o1777)
        (writable / "cache").mkdir()
        (writable / "cache").chmod(0o1777)
        shutil.copyfile(EXAMPLES / "small.yaml", writable / "cluster.yaml")
        (writable / "cluster.yaml").chmod(0o644)
        [entry], [default] = of(FINAL, "ENTRYPOINT"), of(FINAL, "CMD")
        command = [str(image / "opt/kvroute/bin" / program) for program in entry.arguments]
        command += [argument.replace("/etc/kvroute", name) for argument in default.arguments]
        user = [*SERVICE_USER, f"TMPDIR={name}", f"NUMBA_CACHE_DIR={name}/cache"]
        sealed = [*SEALED, str(image), *user]
        version = subprocess.run([*sealed, command[0], "--version"], capture_output=True, text=True)
        if version.returncode:
            missing(f"no read-only tree can be made here: {version.stderr.strip()[-200:]}")
        serve = [*sealed, *command, "--embedded", "--port", "0", "--admin-port", "0"]
        with started(serve, "kvroute serves") as ready:
            assert completed(ready) == 3
            port = re.findall(r":(\d+)/v1", ready)[0]
            [check] = of(FINAL, "HEALTHCHECK")
            assert _checked(image, check, port) == 0
        assert _checked(image, check, port) != 0, "the health check passes although the gateway has stopped"
        assert list((writable / "cache").rglob("*.nbi")), "compiled kernels are cached in the volume"


def _checked(image: Path, check: Instruction, port: str) -> int:
    """Return the exit code of the health check for that port."""
    command = [argument.replace("8080", port) for argument in check.arguments]
    command[0] = str(image / "opt/kvroute/bin" / command[0])
    return subprocess.run(command, capture_output=True).returncode
