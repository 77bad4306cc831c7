"""Live: the gateway in front of real vLLM whose prefill engine writes the KV into the decode engine's memory by NIXL.

Not part of `make live`: several transfers at once hang without NIXL's progress thread, and with it the first one begins
after a minute. Run it on an idle machine: `pytest -n 0 -m live tests/live/vllm/nixl_push_by_hand.py`.
"""

from __future__ import annotations

import pytest
from tests.live.vllm.connector_cases import TransferCases
from tests.live.vllm.stock_connectors import NIXL_PUSH

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


class TestNixlPush(TransferCases):
    """`NixlPushConnector`: the prefill engine writes the KV after the decode leg has named its blocks. The gateway
    sends the legs one after the other."""

    connector = NIXL_PUSH
