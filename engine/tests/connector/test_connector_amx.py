"""When permission for AMX tiles is requested from the kernel, and what is logged."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import pytest

from kvroute_engine.connector.amx import (
    CPUINFO,
    allow_amx,
    cpu_flags,
    needs_permission,
    request_permission,
)

SAPPHIRE_RAPIDS = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu sse2 avx512f amx_bf16 avx512_fp16 amx_tile amx_int8\n"
    "vmx flags\t: vnmi\nbugs\t\t: spectre_v1\n\nprocessor\t: 1\nflags\t\t: fpu\n"
)
MILAN = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 avx2\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd sve\n"


@pytest.mark.parametrize(
    ("device", "machine", "cpuinfo", "needed"),
    [
        pytest.param("cpu", "x86_64", SAPPHIRE_RAPIDS, True, id="amx"),
        pytest.param("cuda", "x86_64", SAPPHIRE_RAPIDS, False, id="gpu"),
        pytest.param("cpu", "x86_64", MILAN, False, id="no-amx"),
        pytest.param("cpu", "aarch64", GRAVITON, False, id="arm"),
        pytest.param("cpu", "x86_64", "", False, id="unknown"),
    ],
)
def test_permission_is_needed_only_for_models_on_cpus_with_tiles(
    device: str, machine: str, cpuinfo: str, needed: bool
) -> None:
    assert needs_permission(device, machine, cpu_flags(cpuinfo)) == needed


@pytest.mark.skipif(platform.machine() != "x86_64", reason="arch_prctl is a system call of x86-64")
@pytest.mark.parametrize(("device", "is_requested"), [("cpu", True), ("cuda", False)])
def test_the_kernels_response_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: str, is_requested: bool
) -> None:
    """If the CPU has no tiles the kernel refuses; this gives a warning and has no other effect."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(SAPPHIRE_RAPIDS, encoding="utf-8")
    caplog.set_level(logging.INFO)
    allow_amx(device, cpuinfo)
    refusal = request_permission()
    expected = [("WARNING", refusal)] if refusal else [("INFO", "may use the CPU's AMX tiles")]
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert len(logged) == is_requested
    for (level, part), (logged_level, message) in zip(expected, logged, strict=False):
        assert level == logged_level
        assert part in message


def test_permission_is_not_requested_if_the_kernel_does_not_describe_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    allow_amx("cpu", tmp_path / "none")
    assert not caplog.records


@pytest.mark.skipif(platform.machine() != "x86_64", reason="arch_prctl is a system call of x86-64")
def test_the_kernel_grants_tiles_if_the_cpu_has_them() -> None:
    """The test runs on every machine, because the kernel's response depends on the CPU."""
    assert (request_permission() == "") == ("amx_tile" in cpu_flags(CPUINFO.read_text(encoding="utf-8")))
