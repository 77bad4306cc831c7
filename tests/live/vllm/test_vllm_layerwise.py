"""Live: real vLLM whose KV is pulled through the gateway while it is computed: equal tokens, and a prefill server that
dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.conftest import BLOCK_TOKENS, LAYER_BYTES
from tests.live.vllm.gateway_rig import (
    FAILURES,
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

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
ANSWER_TOKENS = 24
LAYERS = 4


@pytest.fixture(scope="module")
def process(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that requests every KV cache early."""
    with serving(cluster, tmp_path_factory.mktemp("layerwise"), layerwise=True) as gateway:
        yield gateway


@pytest.fixture
def gateway(process: Gateway, pair: Pair) -> Gateway:
    """The gateway, once it reports that all servers are up."""
    all_up(process, pair)
    return process


def early(pair: Pair) -> tuple[float, float]:
    """Return the successful early pulls into the decode servers, and their bytes."""
    servers = (pair.decode, pair.other)
    names = ("kvroute:kv_early_total", "kvroute:kv_early_bytes_total")
    transfers, nbytes = (sum(server.metric(name, source="prefill0") for server in servers) for name in names)
    return transfers, nbytes


def decisions(gateway: Gateway, kind: str) -> list[list[str]]:
    """Return the decisions at every event of a kind."""
    lines = [json.loads(line) for line in gateway.log.read_text(encoding="utf-8").split("\n")[1:-1]]
    return [[d["type"] for d in line.get("decisions", [])] for line in lines if line["event"]["type"] == kind]


@pytest.mark.parametrize("tokens", [20, 300, 3500])
def test_tokens_equal_those_of_one_server(pair: Pair, gateway: Gateway, tokens: int) -> None:
    """Streamed or not; both legs are chosen when the request arrives, and all KV is pulled early."""
    whole, streamed = prompt(tokens, seed=31_000 + tokens), prompt(tokens, seed=35_000 + tokens)
    transfers, nbytes = early(pair)
    body: dict[str, Any] = {"model": "tiny", "extra_body": TOKENS, **GREEDY}
    with gateway.client() as client:
        reply = client.completions.create(prompt=whole, **body)
        with client.completions.create(prompt=streamed, stream=True, **body) as stream:
            got = [token for chunk in stream for choice in chunk.choices for token in token_ids(choice)]
    blocks = -(-tokens // BLOCK_TOKENS)
    until(lambda: early(pair) == (transfers + 2, nbytes + 2 * LAYERS * blocks * LAYER_BYTES))
    assert token_ids(reply.choices[0]) == alone(pair, whole)
    assert got == alone(pair, streamed)
    until(lambda: decisions(gateway, "arrived")[-2:] == [["prefill", "decode"]] * 2)
    assert decisions(gateway, "prefill_finished")[-2:] == [[], []]
    wait_until_idle(gateway)


def test_a_corrupted_block_changes_the_tokens(pair: Pair, gateway: Gateway) -> None:
    """The negative control of the test above: one block of one layer, on the same path, without a checksum."""
    prompt_ids = prompt(300, seed=36_000)
    transfers, _ = early(pair)
    pair.prefill.fault_file.write_text("corrupt-layer-2-block-4", encoding="utf-8")
    with gateway.client() as client:
        reply = client.completions.create(model="tiny", prompt=prompt_ids, extra_body=TOKENS, **GREEDY)
    until(lambda: early(pair)[0] == transfers + 1)
    assert token_ids(reply.choices[0]) != alone(pair, prompt_ids)


def test_a_decode_server_that_dies_mid_pull_is_replaced(pair: Pair, gateway: Gateway) -> None:
    """The other server requests the same transfer ID and pulls all KV; the prompt is prefilled once."""
    prompt_ids = prompt(600, seed=37_000)
    begun = len(decisions(gateway, "prefill_failed"))

    def kill() -> None:
        try:
            server_that_is(pair, fetching).kill()
        finally:
            pair.prefill.fault_file.unlink()

    pair.prefill.fault_file.write_text("stall-layer-1", encoding="utf-8")
    got = during_request(gateway, kill, stream=True, prompt=prompt_ids, max_tokens=ANSWER_TOKENS)
    assert got == alone(pair, prompt_ids)
    until(lambda: decisions(gateway, "decode_failed")[-1:] == [["decode"]])  # the log is flushed from time to time
    assert len(decisions(gateway, "prefill_failed")) == begun
    wait_until_idle(gateway)


def test_the_death_of_a_prefill_server_mid_pull_only_delays_the_response(pair: Pair, gateway: Gateway) -> None:
    """There is no other prefill server: the decode server computes the prompt whose KV is incomplete, and the client
    gets a later first token."""
    prompt_ids = prompt(3500, seed=38_000)
    failed = sum(server.metric(FAILURES) for server in (pair.decode, pair.other))

    def kill() -> None:
        server_that_is(pair, fetching)
        pair.prefill.kill()

    pair.prefill.fault_file.write_text("stall-layer-1", encoding="utf-8")
    got = during_request(gateway, kill, stream=True, prompt=prompt_ids, max_tokens=ANSWER_TOKENS)
    pair.prefill.fault_file.unlink()
    assert got == alone(pair, prompt_ids)
    until(lambda: sum(server.metric(FAILURES) for server in (pair.decode, pair.other)) == failed + 1)
    assert gateway.metric("kvroute_retries_total") == 1  # from the previous test
    wait_until_idle(gateway)
