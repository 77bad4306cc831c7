"""Live: the gateway in front of real vLLM whose prefill engine writes the KV into the decode engine's memory by NIXL.
The decode engine registers its blocks before the prompt is computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import openai
import pytest
from tests.live.vllm.connector_cases import ConnectorCases, blocks_in_use, completed, until_reported
from tests.live.vllm.gateway_rig import alone, fetching, prompt, until, wait_until_idle
from tests.live.vllm.stock_connectors import NIXL_PUSH

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair
    from tests.live.vllm.gateway_rig import Gateway

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


class TestNixlPush(ConnectorCases):
    """All tests of connectors with `NixlPushConnector`; both legs are sent at once."""

    connector = NIXL_PUSH

    def test_a_decode_server_registers_before_the_prompt_is_computed(self, pair: Pair, gateway: Gateway) -> None:
        """It waits for the KV while the prefill leg has no response yet."""
        completed(gateway, prompt(40, seed=50))  # its response shows the prefill server's address
        until(lambda: gateway.metric("kvroute_instance_requests") == 0)
        prompt_ids = prompt(3500, seed=51)
        prefills = gateway.metric("kvroute_prefill_leg_seconds_count")
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(completed, gateway, prompt_ids)
            until(lambda: fetching(pair.decode) or fetching(pair.other) or asked.done())
            during = gateway.metric("kvroute_prefill_leg_seconds_count")
            got = asked.result()
        assert during == prefills
        assert got == alone(pair, prompt_ids)
        wait_until_idle(gateway)

    def test_a_prefill_server_that_dies_mid_transfer(self, pair: Pair, gateway: Gateway) -> None:
        """The decode server does not notice it. The gateway does, but no other server can compute the prompt. The
        decode server keeps the blocks of the request."""
        prompt_ids = prompt(600, seed=89)
        self.connector.inject(pair, "stall")
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(completed, gateway, prompt_ids)
            try:
                victim = self.half_moved(pair)
                pair.prefill.kill()
            finally:
                self.connector.inject(pair, "")
            with pytest.raises(openai.InternalServerError) as failed:
                asked.result()
        assert failed.value.status_code in (502, 503)
        wait_until_idle(gateway)
        pair.restart_dead_servers()
        until_reported(pair, lambda: victim.metric("vllm:num_requests_waiting") == 0)
        assert blocks_in_use(victim) > 0.03, "vLLM has released the blocks: say so in docs/vllm.md"
        victim.kill()
