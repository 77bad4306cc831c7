"""kvroute-engine alone in an environment with vLLM's packages: it changes none of them, all of it can be imported, and
its tests pass there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
from tests.live.services import missing

pytestmark = pytest.mark.live
ROOT = Path(__file__).resolve().parents[3]
VLLM = ROOT / ".venv-vllm"
EXTRAS = {"obstore", "redis", "xxhash"}
"""What the extras of kvroute-engine bring and vLLM does not."""
TEST_TOOLS = (
    *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"),
    *("hypothesis", "_hypothesis_globals", "sortedcontainers", "xxhash"),
)
INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps({each.metadata["Name"].lower(): each.version for each in distributions()}))
"""
IMPORTED = """
import json, pkgutil, sys
from importlib import import_module
import kvroute_engine
failed = {}
found = pkgutil.walk_packages(kvroute_engine.__path__, "kvroute_engine.", onerror=failed.get)
names = [module.name for module in found if module.name != "kvroute_engine.all_reduce.vllm"]
for name in names:
    try:
        import_module(name)
    except ImportError as error:
        failed[name] = error.name or str(error)
print("\\n" + json.dumps([len(names), failed]))
"""
MINE = """
import json, sys
from importlib import import_module
import msgspec, numpy, yaml
for name in ("connector.scheduler", "connector.options", "block_keys", "files.document", "switch", "command.app"):
    import_module("kvroute_engine." + name)
heavy = ("kvroute", "numba", "scipy", "matplotlib", "typer", "rich")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with kvroute-engine beside the packages of vLLM's environment, which stays as it is."""
    if not (VLLM / "bin/python").exists():
        missing("vLLM's environment is not there: make vllm")
    folder = tmp_path_factory.mktemp("engine")
    run([VLLM / "bin/python", "-m", "venv", folder / "env"])
    [packages] = (folder / "env/lib").glob("python*/site-packages")
    [beside] = (VLLM / "lib").glob("python*/site-packages")
    (packages / "vllm.pth").write_text(f"{beside}\n")
    run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT / "engine"]
    )
    return folder / "env"


def run(command: list[object], **environment: str) -> str:
    """Run a command in the root of the repository; return its output."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT, env=environment or None, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def installed(environment: Path) -> Mapping[str, str]:
    """Return the version of each package by its name."""
    found: dict[str, str] = json.loads(run([environment / "bin/python", "-c", INSTALLED]))
    return found


@pytest.fixture(scope="module")
def before_and_after(environment: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The packages before and after kvroute-engine is installed, without an index to take others from."""
    before = installed(environment)
    [wheel] = environment.parent.glob("kvroute_engine-*.whl")
    run([environment / "bin/python", "-m", "pip", "install", "-q", "--no-index", wheel])
    return before, installed(environment)


def test_no_package_is_added_or_changed(
    before_and_after: tuple[Mapping[str, str], Mapping[str, str]],
) -> None:
    """All that kvroute-engine needs is there already."""
    before, after = before_and_after
    assert len(before) > 100
    assert after.keys() - before.keys() == {"kvroute-engine"}
    assert {name: version for name, version in after.items() if name in before} == before


@pytest.mark.usefixtures("before_and_after")
def test_every_module_can_be_imported(environment: Path) -> None:
    """Those of the extras say which package they miss. `all_reduce.vllm` is imported by vLLM after its plugin has
    registered, as tests/live/vllm/test_vllm_all_reduce.py shows."""
    count, failed = json.loads(run([environment / "bin/python", "-c", IMPORTED]).splitlines()[-1])
    assert count > 80
    assert {name: what for name, what in failed.items() if what not in EXTRAS} == {}


@pytest.mark.usefixtures("before_and_after")
def test_it_imports_no_heavy_package_itself(environment: Path) -> None:
    """vLLM may import them; the modules that need no vLLM do not."""
    assert json.loads(run([environment / "bin/python", "-c", MINE])) == []


@pytest.mark.usefixtures("before_and_after")
def test_the_tests_of_the_connector_pass_there(environment: Path, tmp_path: Path) -> None:
    """With pytest and Hypothesis of this environment, and xxhash of the extra `buffer` for the tests with a store."""
    for name in TEST_TOOLS:
        file = Path(str(import_module(name).__file__))
        place = file.parent if file.name == "__init__.py" else file
        (tmp_path / place.name).symlink_to(place)
    command: list[object] = [
        environment / "bin/python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
    ]
    command += ["--rootdir", ROOT / "engine", "--confcutdir", ROOT / "engine", ROOT / "engine/tests/connector"]
    out = run(
        command, PYTHONPATH=f"{tmp_path}:{ROOT}", PATH="/usr/bin:/bin", HYPOTHESIS_STORAGE_DIRECTORY=str(tmp_path)
    )
    assert " passed" in out.splitlines()[-1]
    assert "failed" not in out
