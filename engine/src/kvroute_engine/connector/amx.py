"""Requests permission to use AMX tiles, which Linux grants a process only on request.

vLLM's CPU attention uses the tiles without requesting permission. A large matrix product, such as a prefill's, requests
it as a side effect. So only a process whose first step is a decode of fetched KV, or a very short prompt, ends with
"Illegal instruction".
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)
CPUINFO = Path("/proc/cpuinfo")
_SYS_ARCH_PRCTL = 158
"""Number of the system call on x86-64."""
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18
"""Number of the tiles' register state."""


def needs_permission(device: str, machine: str, flags: Collection[str]) -> bool:
    """Return whether a model on this device may use AMX tiles.

    Args:
        device: type of the device that holds the KV cache, with torch's name.
        machine: architecture, as `platform.machine()` returns it.
        flags: CPU flags, with the kernel's names.
    """
    return device == "cpu" and machine == "x86_64" and "amx_tile" in flags


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the flags of the first CPU in the text of /proc/cpuinfo; empty if the kernel lists none."""
    for line in cpuinfo.splitlines():
        name, _, values = line.partition(":")
        if name.strip() == "flags":
            return frozenset(values.split())
    return frozenset()


def request_permission() -> str:
    """Request permission for this process and its threads (x86-64 only). Return the kernel's reason if it refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)
    if libc.syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def allow_amx(device: str, cpuinfo: Path | None = None) -> None:
    """Request AMX tiles if the model may use them. Must be called before the first step of a process."""
    try:
        text = (cpuinfo or CPUINFO).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # not Linux, or no /proc: no tiles to request, or no way to detect them
    if not needs_permission(device, platform.machine(), cpu_flags(text)):
        return
    refusal = request_permission()
    if refusal:
        log.warning(
            "the kernel does not let this process use the CPU's AMX tiles (%s), so vLLM may end with 'Illegal "
            "instruction': Linux 5.16 or later and a container runtime that allows arch_prctl are needed",
            refusal,
        )
    else:
        log.info("this process may use the CPU's AMX tiles")
