"""Tests that KV connectors of vLLM pass behind the gateway: equal tokens, servers that die while KV moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import pytest
from tests.live.vllm.gateway_rig import (
    ANSWER_TOKENS,
    GREEDY,
    TOKENS,
    Gateway,
    all_up,
    alone,
    during_request,
    fetching,
    prompt,
    server_that_is,
    serving,
    token_ids,
    until,
    wait_until_idle,
)
from tests.live.vllm.leaving_clients import leave_at_any_time
from tests.live.vllm.stock_connectors import StockConnector, external_tokens, prompt_bytes

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair, Server


LEAVING = 40
"""Requests whose clients leave."""


def until_reported(pair: Pair, condition: Callable[[], bool]) -> None:
    """Wait for counts of the servers. Each computes short prompts meanwhile: an idle engine does not report its last
    counts."""
    short = {"model": "tiny", "prompt": prompt(8, seed=799), "max_tokens": 1}

    def reported() -> bool:
        for server in pair.servers:
            server.post("/v1/completions", short)
        return condition()

    until(reported)


class TransferCases:
    """Tests of single transfers, for the connector that a subclass names."""

    connector: ClassVar[StockConnector]

    @pytest.fixture(scope="class")
    @classmethod
    def servers(cls, reference: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        """Servers with the connector, for all tests of the class."""
        with cls.connector.serving(tmp_path_factory.mktemp("servers"), reference) as pair:
            yield pair

    @pytest.fixture(scope="class")
    @classmethod
    def process(cls, servers: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
        """One gateway for all tests of the class."""
        with serving(servers, tmp_path_factory.mktemp("gateway")) as gateway:
            yield gateway

    @pytest.fixture
    def pair(self, servers: Pair) -> Pair:
        """All servers, up and without an injected fault."""
        self.connector.inject(servers, "")
        self.connector.forget_stall(servers)
        servers.restart_dead_servers()
        return servers

    @pytest.fixture
    def gateway(self, process: Gateway, pair: Pair) -> Gateway:
        """The gateway, once it reports that all servers are up, including those that an earlier test killed."""
        all_up(process, pair)
        return process

    @pytest.mark.parametrize("tokens", [20, 300, 3500])
    def test_tokens_equal_those_of_one_server(self, pair: Pair, gateway: Gateway, tokens: int) -> None:
        """The connector has moved exactly the prompt's blocks, and the decode server has computed none of them. Prompts
        of more than 2,048 tokens are computed in chunks."""
        prompt_ids = prompt(tokens, seed=2000 + tokens)
        moved, external = self.connector.moved(pair), external_tokens(pair)
        assert completed(gateway, prompt_ids) == alone(pair, prompt_ids)
        until_reported(pair, lambda: self.connector.moved(pair) == moved + prompt_bytes(tokens))
        until_reported(pair, lambda: external_tokens(pair) == external + tokens)

    def test_a_corrupted_block_changes_the_tokens(self, pair: Pair, gateway: Gateway) -> None:
        """The negative control of the test above: one block of one layer has another block's content."""
        prompt_ids = prompt(300, seed=60)
        moved = self.connector.moved(pair)
        self.connector.inject(pair, "corrupt")
        assert completed(gateway, prompt_ids) != alone(pair, prompt_ids)
        until_reported(pair, lambda: self.connector.moved(pair) > moved)


class ConnectorCases(TransferCases):
    """All tests: those of single transfers, of several at once, and of servers that die."""

    prefills: ClassVar[int] = 2
    """How often a prompt is prefilled whose decode server dies: twice if the KV is kept for one decode server only."""

    def half_moved(self, pair: Pair) -> Server:
        """Wait until half of the KV has been moved; return the decode server that gets it."""
        until(lambda: self.connector.stalled(pair))
        return server_that_is(pair, fetching)

    def test_concurrent_transfers_are_not_mixed(self, pair: Pair, gateway: Gateway) -> None:
        """Few tokens of each, because the rounding of a batch is not tested here."""
        prompts = [prompt(40 + 60 * number, seed=700 + number) for number in range(8)]

        def first_tokens(tokens: list[int]) -> list[int]:
            return completed(gateway, tokens, 3)

        moved = self.connector.moved(pair)
        with ThreadPoolExecutor(8) as threads:
            got = list(threads.map(first_tokens, prompts))
        assert got == [alone(pair, tokens, 3) for tokens in prompts]
        total = moved + sum(prompt_bytes(len(tokens)) for tokens in prompts)
        until_reported(pair, lambda: self.connector.moved(pair) == total)
        wait_until_idle(gateway)

    def test_clients_that_leave_strand_no_blocks(self, pair: Pair, gateway: Gateway) -> None:
        """They leave during the prefill, the transfer or the response. Afterwards no server holds blocks, and none of
        them has expired. The servers have not been killed yet, which would let KV expire."""
        expired = gateway.metric("kvroute_engine_kv_expired_total")
        left = leave_at_any_time(gateway, LEAVING, seed=4)
        assert left > LEAVING / 10
        until_reported(pair, lambda: all(blocks_in_use(server) == 0 for server in pair.servers))
        assert gateway.metric("kvroute_engine_kv_expired_total") == expired

    def test_a_decode_server_that_dies_mid_transfer_is_replaced(self, pair: Pair, gateway: Gateway) -> None:
        """Half of the KV has been moved when it dies. The client sees only its stream, from the other server."""
        prompt_ids = prompt(600, seed=88)
        victims: list[Server] = []

        def kill() -> None:
            try:
                victims.append(self.half_moved(pair))
                victims[0].kill()
            finally:
                self.connector.inject(pair, "")

        self.connector.inject(pair, "stall")
        earlier = gateway.metric("kvroute_prefill_leg_seconds_count")
        failed = gateway.metric("kvroute_leg_failures_total", leg="decode")
        got = during_request(gateway, kill, stream=True, prompt=prompt_ids, max_tokens=ANSWER_TOKENS)
        assert got == alone(pair, prompt_ids)
        assert gateway.metric("kvroute_prefill_leg_seconds_count") == earlier + self.prefills
        assert gateway.metric("kvroute_leg_failures_total", leg="decode") == failed + 1
        until(lambda: gateway.metric("kvroute_instance_up", engine=victims[0].name) == 0)
        wait_until_idle(gateway)

    def test_a_prefill_server_that_dies_mid_transfer(self, pair: Pair, gateway: Gateway) -> None:
        """The decode server computes the prompt when it has noticed that the rest of the KV does not arrive."""
        prompt_ids = prompt(600, seed=89)

        def kill() -> None:
            try:
                self.half_moved(pair)
                pair.prefill.kill()
            finally:
                self.connector.inject(pair, "")

        self.connector.inject(pair, "stall")
        got = during_request(gateway, kill, stream=True, prompt=prompt_ids, max_tokens=ANSWER_TOKENS)
        assert got == alone(pair, prompt_ids)
        until(lambda: gateway.metric("kvroute_instance_up", engine=pair.prefill.name) == 0)
        wait_until_idle(gateway)


def blocks_in_use(server: Server) -> float:
    """Return the share of a server's blocks that requests and transfers hold."""
    return server.metric("vllm:kv_cache_usage_perc")


def completed(gateway: Gateway, tokens: list[int], count: int = ANSWER_TOKENS) -> list[int]:
    """Return the tokens of the response to a prompt."""
    body = {**GREEDY, "max_tokens": count}
    with gateway.client() as client:
        reply = client.completions.create(model="tiny", prompt=tokens, extra_body=TOKENS, **body)
    return token_ids(reply.choices[0])
