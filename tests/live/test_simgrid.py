"""Live: completion times against SimGrid, the validated flow-level simulator, on random scenarios."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvroute.flows import completion_times, parse_scenario

PYTHON = "/usr/bin/python3"
REFEREE = Path(__file__).with_name("simgrid_referee.py")
WORST_ALLOWED = 1e-6


def _scenario(seed: int) -> dict[str, Any]:
    """Draw up to 500 flows over up to 60 links; half of the starts and a third of the sizes and capacities are ties."""
    draw = random.Random(seed)
    links = [f"l{k}" for k in range(draw.randint(2, 60))]
    capacities = [draw.choice([1.25e9, 3.125e9, 12.5e9, float(draw.randint(10**8, 10**11))]) for _ in links]
    count = 500 if seed == 0 else draw.choice([1, 2, 5, 20, 60, 150])
    flows = [
        {
            "id": 7 * k,
            "links": draw.sample(links, draw.randint(1, min(6, len(links)))),
            "size_B": draw.choice([10**9, 2 * 10**9, draw.randint(10**8, 10**10)]),
            "start_s": draw.choice([0.0, 0.5 * draw.randint(0, 6), draw.uniform(0.0, 5.0)]),
        }
        for k in range(count)
    ]
    return {
        "links": [{"id": link, "capacity_Bps": value} for link, value in zip(links, capacities, strict=True)],
        "flows": flows,
    }


def _require_simgrid() -> None:
    try:
        done = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, text=True)
        reason = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        message = f"SimGrid is not importable by {PYTHON} ({reason}); install Debian's python3-simgrid"
        if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
            pytest.fail(message)
        pytest.skip(message)


@pytest.mark.live
def test_completion_times_equal_simgrids(capsys: pytest.CaptureFixture[str]) -> None:
    """In 60 scenarios of 1 to 500 flows every transfer takes as long as in SimGrid, with a relative error of at most
    1e-6."""
    _require_simgrid()
    scenarios = [_scenario(seed) for seed in range(60)]
    answer = subprocess.run([PYTHON, str(REFEREE)], input=json.dumps(scenarios), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    worst, flows = 0.0, 0
    for scenario, referee_s in zip(scenarios, json.loads(answer.stdout), strict=True):
        ends_s = completion_times(parse_scenario(json.dumps(scenario)))
        for flow, end_s, expected_s in zip(scenario["flows"], ends_s, referee_s, strict=True):
            worst = max(worst, abs(end_s - expected_s) / (expected_s - flow["start_s"]))
            flows += 1
    with capsys.disabled():
        print(f"\nSimGrid: {len(scenarios)} scenarios, {flows} flows, worst relative error {worst:.2g}")  # noqa: T201
    assert worst <= WORST_ALLOWED
