"""Live: `kvroute doctor` with real vLLM servers and kvroute's connector; no gateway runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.vllm.gateway_rig import cluster_file

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_the_doctor_sees_kv_move_through_both_pairs(pair: Pair, tmp_path: Path) -> None:
    """Speed and size are not judged: these servers share two cores and run in float32, while the model file says
    bfloat16."""
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_file(pair, {}), encoding="utf-8")
    command = [sys.executable, "-m", "kvroute.cli.app", "doctor", str(file), "--json", "--timeout", "5 min"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode in (0, 1), ended.stderr
    document = json.loads(ended.stdout)
    for engine in document["engines"]:
        assert (engine["health"], engine["model_ok"]) == ("ok", True), engine
        assert engine["metrics"]["missing"] == [], engine
        assert engine["events"]["subscribed"], engine
        assert engine["events"]["replay"], engine
    assert {checked["prefill"] for checked in document["pairs"]} == {"prefill0"}
    assert {checked["decode"] for checked in document["pairs"]} == {"decode0", "decode1"}
    for checked in document["pairs"]:
        assert (checked["moved"], checked["evidence"]) == ("yes", "counters"), checked
        assert checked["kv_bytes"] > 0
