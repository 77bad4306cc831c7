"""The gain of a choice of paths where transfers are cheap, simulated: `python -m bench.cheap_transfers [--json]`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.measurement import ROOT, Row, show

POLICIES = ("round-robin", "foresight", "foresight-joint")
LINKS = {"links idle": (), "90 % of each link used": ("--background", "0.9", "--telemetry", "tier")}
"""Options by what the links carry."""
COMMAND = "simulate examples/superpod.yaml --profile rag --rate 3 --requests 1000 --seeds 3 --json"


def rows(links: str, runs: list[dict[str, Any]]) -> list[Row]:
    """Return the mean TTFT of each policy beside that of round-robin."""
    ttft_s = {
        policy: statistics.mean(run["ttft_s"]["mean"] for run in runs if run["policy"] == policy) for policy in POLICIES
    }
    first, *others = POLICIES
    return [
        Row(
            measure=f"mean TTFT, 400 Gbps per GPU, {links}, {policy}",
            unit="s",
            better="lower",
            ours=ttft_s[policy],
            peer=ttft_s[first],
            peer_name=first,
        )
        for policy in others
    ]


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    found = []
    for links, options in LINKS.items():
        command = [str(Path(sys.executable).with_name("kvroute")), *COMMAND.split(), *policies, *options]
        printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        found += rows(links, json.loads(printed)["runs"])
    show(found, given.json)


if __name__ == "__main__":
    main()
