"""Every seed and every input of an earlier finding passes its target's check; `make fuzz` runs the fuzzer itself."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tests.fuzz.targets import TARGETS, corpus

CASES = [(target, path) for target in TARGETS for path in corpus(target)]


@pytest.mark.parametrize(("target", "path"), CASES, ids=[f"{target}-{path.name}" for target, path in CASES])
def test_inputs_of_the_corpus_pass(target: str, path: Path) -> None:
    importlib.import_module(f"tests.fuzz.{target}").check(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_a_corpus_has_accepted_and_rejected_inputs(target: str) -> None:
    """A target whose seeds all fail at the first byte tests little."""
    module = importlib.import_module(f"tests.fuzz.{target}")
    assert {module.check(path.read_bytes()) for path in corpus(target)} >= {"accepted", "refused"}
