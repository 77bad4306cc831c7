"""The generated code is that of agents.proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTO = "engine/src/kvroute_engine/agent/agents.proto"


@pytest.mark.parametrize("name", ["agents_pb2.py", "agents_pb2.pyi"])
def test_generated_code_is_that_of_the_proto_file(tmp_path: Path, name: str) -> None:
    """`make protos` writes it again."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "engine/src", f"--python_out={tmp_path}"]
    done = subprocess.run([*command, f"--pyi_out={tmp_path}", PROTO], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kvroute_engine/agent" / name).read_text() == (
        ROOT / "engine/src/kvroute_engine/agent" / name
    ).read_text()
