"""PyTorch's backend `kvroute` with tensors on a GPU, which go through host memory: two ranks share the GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvroute_engine.all_reduce import VARIABLE

PROGRAM = Path(__file__).parents[1] / "live/vllm/reduce_tensors.py"
RANKS = 4


@contextmanager
def switch() -> Iterator[str]:
    """Run `kvroute switch`; yield its address."""
    command = [sys.executable, "-m", "kvroute.cli.app", "switch", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("scheme", ["ring", "hierarchical-ring", "ina", "hierarchical-ina"])
def test_tensors_on_a_gpu(tmp_path: Path, scheme: str) -> None:
    """Every size and type has the sum in double precision, and the same bits on all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with switch() as address:
        settings = tmp_path / "settings.yaml"
        settings.write_text(f"switch: {address}\nranks_per_server: [2, 2]\nschemes: [{{scheme: {scheme}}}]\n")
        environment = os.environ | {VARIABLE: str(settings), "KVROUTE_TEST_DEVICE": "cuda"}
        ranks = [
            subprocess.Popen(
                [sys.executable, PROGRAM, str(rank), str(RANKS), "127.0.0.1", str(port), "6"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        out = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS
    done = [json.loads(text.splitlines()[-1]) for text in out]
    assert len({outcome["hash"] for outcome in done}) == 1
    assert max(outcome["error"] for outcome in done) < 1.0
    assert all(outcome["calls"][scheme] >= 30 and not outcome["fallbacks"] for outcome in done), done
