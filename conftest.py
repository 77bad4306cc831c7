"""Hypothesis has no deadline, because a first call may compile and no test measures time. With CI set, the examples are
the same each time, so that a result depends on the change alone. Elsewhere each run draws new examples.

The environment variable HYPOTHESIS_PROFILE chooses how many: with `full`, the number that a test asks for, or 100; with
`quick`, the default, QUICK_PERCENT of it.

With COLLECT_GARBAGE set, garbage is collected after each test, so that a socket or file that a test has left open fails
this test. Otherwise it is found when the collector happens to run: in any later test, or never.

`make live` has two workers, and one of them runs all tests with vLLM's servers: see `LiveScheduling`."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import PurePosixPath
from typing import Any
from unittest import TestCase

import pytest
from hypothesis import is_hypothesis_test, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

QUICK_PERCENT = 15
QUICK_LEAST = 3

for _profile in ("full", "quick"):
    settings.register_profile(_profile, deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

_SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute of a Hypothesis test from which its settings are read when it starts."""
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
"""Such as gw0; empty without workers."""
_WITHOUT_SERVERS = ("test_all_reduce_truth.py", "test_torch_all_reduce.py", "test_vllm_all_reduce.py")
"""Modules of tests/live/vllm that start no `vllm serve`."""


def _fewer(found: settings) -> settings:
    """Return `found` with the number of examples of the profile `quick`."""
    return settings(found, max_examples=max(QUICK_LEAST, round(found.max_examples * QUICK_PERCENT / 100)))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
    """Let each worker begin at another entry of a folder: pytest compiles a module of tests when it is first collected,
    and those that began at the same one would all compile all modules."""
    report = yield
    if _WORKER and report.passed and isinstance(collector, pytest.Directory):
        first = int(_WORKER.removeprefix("gw")) * len(report.result) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all workers the same order of tests. Lower the number of examples of each Hypothesis test, once if it has
    several parameters."""
    if _WORKER:
        items.sort(key=lambda item: item.path)
    if settings.get_current_profile_name() != "quick":
        return
    tests = [item for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.function)]
    for machine in {item.cls for item in tests if issubclass(item.cls or object, TestCase)}:
        machine.settings = _fewer(machine.settings)
    for function in {item.function for item in tests if not issubclass(item.cls or object, TestCase)}:
        setattr(function, _SETTINGS, _fewer(getattr(function, _SETTINGS)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, and leave what they have imported, millions of objects, out of every
    later one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
