"""Live: the gateway in front of real vLLM with Mooncake's transfer engine over TCP."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.live.vllm.connector_cases import ConnectorCases
from tests.live.vllm.gateway_rig import GREEDY, TOKENS, alone, prompt
from tests.live.vllm.stock_connectors import MOONCAKE

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


class TestMooncake(ConnectorCases):
    """All tests of connectors, and one of its transfer ids."""

    connector = MOONCAKE

    def test_the_cache_of_another_prompt_changes_the_tokens(self, pair: Pair) -> None:
        """A negative control without the gateway: the decode server fetches what is kept for another prompt."""
        wanted, other = prompt(300, seed=61), prompt(300, seed=62)
        address = f"http://127.0.0.1:{pair.prefill.ports[3]}"
        with urllib.request.urlopen(f"{address}/query", timeout=30.0) as answer:
            (rank,) = msgspec.json.decode(answer.read()).values()
        keep = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "one"}
        fetch = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "one",
            "remote_bootstrap_addr": address,
            "remote_engine_id": rank["engine_id"],
        }
        body: dict[str, Any] = {"model": "tiny", **GREEDY, **TOKENS}
        pair.prefill.post("/v1/completions", {**body, "prompt": other, "max_tokens": 1, "kv_transfer_params": keep})
        reply = pair.decode.post("/v1/completions", {**body, "prompt": wanted, "kv_transfer_params": fetch})
        assert reply["choices"][0]["token_ids"] != alone(pair, wanted)
