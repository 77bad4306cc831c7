"""Entry point of vLLM's plug-in. It imports nothing that imports numba: vLLM 0.32 fails if that is loaded so early."""

from __future__ import annotations

import os

from kvroute_engine.all_reduce import VARIABLE

COMMUNICATOR = "kvroute_engine.all_reduce.vllm.Communicator"
wrapped_communicator = ""
"""Name of the communicator class of vLLM's platform, set by `register`."""


def register() -> None:
    """Let vLLM's platform use our communicator, if KVROUTE_ALL_REDUCE is set. vLLM calls it in every process."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    global wrapped_communicator  # noqa: PLW0603  read when vLLM creates its groups
    if not os.environ.get(VARIABLE) or wrapped_communicator:
        return
    platform = type(current_platform)
    wrapped_communicator = platform.get_device_communicator_cls()
    platform.get_device_communicator_cls = classmethod(lambda cls: COMMUNICATOR)
