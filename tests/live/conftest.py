"""The groups of live tests that may run at the same time (`pytest --dist loadgroup`), one process for each group."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHAPED = ("test_kernel_network", "test_storage_nics", "test_switch_in_kernel", "test_wide_area_link")
"""Modules that measure a network whose links are shaped."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests with vLLM, and those that measure networks, in one group, and all others in a second one: servers with
    vLLM need too much memory to exist twice, and a measurement must not run beside another one."""
    for item in items:
        if item.get_closest_marker("live") is not None:
            alone = HERE / "vllm" in item.path.parents or item.path.stem in SHAPED
            item.add_marker(pytest.mark.xdist_group("vllm" if alone else "services"))
