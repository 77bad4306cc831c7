"""Duration of NetKV's whole evaluation: seven experiments, three profiles, five seeds, with tuning of CLA*."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measurement import ROOT, Failed, Row, show

TARGET_MIN = 15.0
TRACE = ROOT.parent / "shared" / "data" / "mooncake" / "conversation_trace.jsonl.zst"


def evaluate(folder: Path, trace: Path | None, reading: str) -> tuple[float, int]:
    """Run the evaluation in an empty `folder`; return wall-clock minutes and the number of runs."""
    command = [
        sys.executable,
        "-m",
        "kvroute.cli.app",
        "experiment",
        "netkv",
        "--reading",
        reading,
        "--out",
        str(folder),
    ]
    started = time.perf_counter()
    ended = subprocess.run(
        command + (["--trace", str(trace)] if trace else []), cwd=ROOT, capture_output=True, text=True
    )
    minutes = (time.perf_counter() - started) / 60
    if ended.returncode:
        raise Failed((ended.stderr.strip().splitlines() or ["no output"])[-1])
    runs = sum(len(path.read_bytes().splitlines()) for path in folder.rglob("*.jsonl"))
    return minutes, runs


def main() -> int:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reading", default="paper")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    trace = TRACE if TRACE.exists() else None
    with tempfile.TemporaryDirectory() as folder:
        minutes, runs = evaluate(Path(folder), trace, given.reading)
    note = (
        f"evaluation: {runs:,} runs in the reading {given.reading}, pages and figures included, on "
        f"{'the Mooncake conversation trace' if trace else 'the generated trace'}, all cores; no peer runs it"
    )
    row = Row(
        measure="NetKV's whole evaluation",
        unit="wall minutes",
        better="lower",
        ours=minutes,
        peer=TARGET_MIN,
        peer_name="bound",
        target=TARGET_MIN,
        note=note,
    )
    show([row], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
