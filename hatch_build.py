"""The wheel's build: pure Python, or, with KVROUTE_COMPILED=1, the same with the gateway's data path compiled by mypyc.

What is compiled is a list of modules, not all: those that numba compiles cannot be, and msgspec reads the annotations
of its Structs, which mypyc does not keep where they are unions. `tests/test_compiled.py` holds what else must be so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED = {
    "control": "core dispatch pool view",
    "gateway": "admission answer_leg breaker budget call client deadlines entrance exchange exposition headers"
    " journey landing legs pool prefill_leg prompt reading reception relay serving state station traffic"
    " upstream",
    "oracle": "network",
    "prefix": "holdings index tree",
}
"""Modules by room: what runs for every request."""
_BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
config, target, *modules = sys.argv[1:]
sys.argv[1:] = ["build_ext", "--build-lib", target + "/lib", "--build-temp", target + "/temp"]
options = {"opt_level": "2", "debug_level": "0", "target_dir": target + "/c"}
setup(name="kvroute", packages=[], ext_modules=mypycify(["--config-file", config, *modules], **options))
"""


class CompiledDataPath(BuildHookInterface):  # type: ignore[type-arg]
    """See the module."""

    def dependencies(self) -> list[str]:
        """What a build needs besides."""
        return ["mypy[mypyc]>=1.14", "numpy>=2.0", "setuptools"] if _wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put the libraries beside their sources in the wheel."""
        if not _wanted() or version == "editable":
            return  # an editable install runs the sources as they stand
        root = Path(self.root)
        libraries = compiled(root, root / "build" / "compiled")
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["force_include"].update({str(path): str(name) for name, path in libraries.items()})


def compiled(root: Path, target: Path) -> dict[Path, Path]:
    """The libraries of the data path, by their place in the wheel."""
    modules = [f"kvroute/{room}/{name}.py" for room, names in COMPILED.items() for name in names.split()]
    command = [sys.executable, "-c", _BUILD, str(root / "pyproject.toml"), str(target), *modules]
    subprocess.run(command, cwd=root / "src", env={**os.environ, "MYPYPATH": str(root / "src")}, check=True)
    built = target / "lib"
    return {path.relative_to(built): path for path in sorted(built.rglob("*.so"))}


def _wanted() -> bool:
    return os.environ.get("KVROUTE_COMPILED") == "1"
