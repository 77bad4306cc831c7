"""The NIXL agent of a rank. Imports nixl, which the core does not need."""

from __future__ import annotations

import uuid

from kvroute_engine.connector.transfer.remote_memory import NixlAgent
from kvroute_engine.errors import InputError

_OPTION = "kv_connector_extra_config.data_plane"


def nixl_agent() -> NixlAgent:
    """Create an agent with NIXL's backend UCX.

    It has no thread of its own: a progress thread of NIXL polls without a pause, which takes a core. Where UCX has no
    RDMA, reads make progress while the two ends of the transfer wait for them.

    Raises:
        InputError: the package nixl is not installed, or UCX finds no transport.
    """
    try:
        from nixl._api import (  # type: ignore[import-not-found]
            nixl_agent as make,
        )
        from nixl._api import (
            nixl_agent_config,
            nixl_thread_sync_t,
        )
    except ImportError as error:
        raise InputError(
            f"data_plane is nixl, but nixl cannot be imported: {error}",
            where=_OPTION,
            hint="pip install nixl, or leave data_plane out to use TCP",
        ) from None
    strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
    try:
        agent: NixlAgent = make(f"kvroute-{uuid.uuid4()}", config)
    except Exception as error:  # NIXL's errors have no common class
        raise InputError(
            f"data_plane is nixl, but its backend UCX does not start: {error}",
            where=_OPTION,
            hint="let UCX_TLS name a transport that detects a peer's failure: rc or dc",
        ) from None
    return agent
