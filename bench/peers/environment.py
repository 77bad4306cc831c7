"""Separate environments for peers, created at first use from hashed lists: Dynamo's runtime wheel; none needs a GPU."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from bench.measurement import ROOT, Failed

INSTALL_S = 600
QUIET = {"DYN_LOG": "error"}
"""At its default level Dynamo logs every decision, which would distort the comparison."""
WITHOUT_EVENTS = {**QUIET, "DYN_USE_KV_EVENTS": "false", "DYN_ROUTER_USE_KV_EVENTS": "false"}
"""For the selection service, which otherwise waits for KV events over one socket per worker."""


def dynamo_python() -> str:
    """Return the interpreter that can import dynamo. Raises Failed with the reason if it cannot be installed."""
    return str(programs("dynamo") / "python")


@lru_cache(maxsize=4)
def programs(peer: str) -> Path:
    """Return the program folder of bench/.venv-PEER, which is installed from requirements-PEER.txt.

    Raises:
        Failed: it cannot be installed here; the message gives the reason.
    """
    folder, requirements = ROOT / "bench" / f".venv-{peer}", Path(__file__).with_name(f"requirements-{peer}.txt")
    stamp = folder / "installed"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return folder / "bin"
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise Failed("uv is not installed; `make test` installs it")
    _install(peer, [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
    options = ["--require-hashes", "--only-binary", ":all:", "-r", str(requirements)]
    _install(peer, [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *options])
    stamp.write_text(digest)
    return folder / "bin"


def _install(peer: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"cannot install {peer}: {type(error).__name__}") from error
    if done.returncode:
        output = re.sub(r"\w+://\S+", "the package index", " ".join(done.stderr.split()))
        raise Failed(f"cannot install {peer}: {output[:200]}")
