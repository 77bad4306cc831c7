"""Hypothesis has no deadline, because a first call may compile and no test measures time. With CI set, the examples are
the same each time, so that a result depends on the change alone. Elsewhere each run draws new examples.

With COLLECT_GARBAGE set, garbage is collected after each test, so that a socket or file that a test has left open fails
this test. Otherwise it is found when the collector happens to run: in any later test, or never.

`make live` has two workers, and one of them runs all tests with vLLM's servers: see `LiveScheduling`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

settings.register_profile("kvroute", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvroute")

_WITHOUT_SERVERS = ("test_all_reduce_truth.py", "test_torch_all_reduce.py", "test_vllm_all_reduce.py")
"""Modules of tests/live/vllm that start no `vllm serve`."""


class LiveScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives all tests with vLLM's servers, which are fixtures of the session, to one worker, and each other module as a
    whole to any worker."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        path = PurePosixPath(module)
        return "vllm" if path.parent.name == "vllm" and path.name not in _WITHOUT_SERVERS else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LiveScheduling | None:
    """Schedule with `--dist loadscope`, which `make live` uses, by `LiveScheduling`."""
    return LiveScheduling(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(autouse=True)
def _garbage_collected() -> Iterator[None]:
    """Collect garbage when the other fixtures of a test have ended, before pytest looks for unraisable exceptions."""
    yield
    if os.environ.get("COLLECT_GARBAGE"):
        gc.collect()
