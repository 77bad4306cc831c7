"""Runs the fuzzing targets, each in a separate process: `python -m tests.fuzz.run [TARGET ...]`; see README.md."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.targets import CORPUS, TARGETS

FINDINGS = Path("fuzz-findings")
_DICTIONARIES = Path(__file__).with_name("dictionaries")
_INPUT_BYTES_MAX = 8192
_TIMEOUT_S = 20
"""Time limit of one input on a busy machine, in seconds; a longer run is a finding."""
_MEMORY_MIB = 2048
_SECONDS_MAX = 60
"""Time limit of the bounded number of runs, in seconds; they take 10 to 20 s on a quiet machine."""


def main() -> int:
    """Fuzz each target; return 1 if one has a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=0, help="time for each target (default: a number of runs)")
    parser.add_argument("--seed", type=int, default=0, help="0: drawn at random")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - set(TARGETS):
        parser.error(f"unknown target {min(unknown)}; known: {', '.join(TARGETS)}")
    if chosen.inside:
        _fuzz(chosen.targets[0], chosen.seconds, chosen.seed)
    try:
        importlib.import_module("atheris")
    except ImportError:
        sys.stderr.write("fuzzing needs atheris, which is there for Linux on x86-64 (pip install atheris)\n")
        return 2
    options = ["--inside", "--seconds", str(chosen.seconds), "--seed", str(chosen.seed)]
    failed = []
    for target in chosen.targets or TARGETS:
        command = [sys.executable, "-m", "tests.fuzz.run", target, *options]
        if subprocess.run(command).returncode:
            failed.append(target)
    for target in failed:
        sys.stderr.write(f"{target}: a finding, see above; its input is in {FINDINGS / target}\n")
    return 1 if failed else 0


def _fuzz(target: str, seconds: int, seed: int) -> None:
    """Fuzz one target. This never returns: libFuzzer ends the process."""
    import atheris

    module = importlib.import_module(f"tests.fuzz.{target}")
    for name in module.INSTRUMENTED:
        sys.modules.pop(name)
    sys.modules.pop(module.__name__)
    with atheris.instrument_imports(include=[*module.INSTRUMENTED]):
        module = importlib.import_module(module.__name__)
    findings = FINDINGS / target
    findings.mkdir(parents=True, exist_ok=True)
    dictionary = _DICTIONARIES / f"{target}.dict"
    bounds = [f"-max_total_time={seconds or _SECONDS_MAX}", *([] if seconds else [f"-runs={module.RUNS}"])]
    with tempfile.TemporaryDirectory(prefix="kvroute-fuzz-") as grown:
        options = [
            f"-artifact_prefix={findings}/",
            f"-dict={dictionary}",
            f"-max_len={_INPUT_BYTES_MAX}",
            f"-timeout={_TIMEOUT_S}",
            f"-rss_limit_mb={_MEMORY_MIB}",
            "-print_final_stats=1",
            *([f"-seed={seed}"] if seed else []),
            *bounds,
        ]
        atheris.Setup([sys.argv[0], *options, grown, str(CORPUS / target)], lambda data: module.check(data) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
