"""NVIDIA Dynamo's runtime wheel in an environment of its own, made on first use from a hashed list; it needs no GPU."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from bench.measurement import ROOT, Failed

FOLDER = ROOT / "bench" / ".venv-dynamo"
REQUIREMENTS = Path(__file__).with_name("requirements-dynamo.txt")
INSTALL_S = 600
QUIET = {"DYN_LOG": "error"}
"""At its default level Dynamo logs every decision, which would be unfair."""
WITHOUT_EVENTS = {**QUIET, "DYN_USE_KV_EVENTS": "false", "DYN_ROUTER_USE_KV_EVENTS": "false"}
"""For the selection service, which else waits for KV events over one socket per worker."""


@lru_cache(maxsize=1)
def dynamo_python() -> str:
    """The interpreter that can import dynamo.

    Raises:
        Failed: it cannot be installed here; says why.
    """
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / "installed"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return str(python)
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise Failed("uv is not installed; `make test` installs it")
    _install([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(FOLDER)])
    requirements = ["--require-hashes", "--only-binary", ":all:", "-r", str(REQUIREMENTS)]
    _install([uv, "pip", "install", "--quiet", "--python", str(python), *requirements])
    stamp.write_text(digest)
    return str(python)


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"cannot install Dynamo: {type(error).__name__}") from error
    if done.returncode:
        said = re.sub(r"\w+://\S+", "the package index", " ".join(done.stderr.split()))
        raise Failed(f"cannot install Dynamo: {said[:200]}")
