"""Live: the `openai` client, the gateway, and real vLLM behind it; equal tokens, prefix hits, and servers that die."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from tests.live.vllm.conftest import LAYER_BYTES
from tests.live.vllm.gateway_rig import (
    ANSWER_TOKENS,
    FAILURES,
    GREEDY,
    TOKENS,
    Gateway,
    all_up,
    alone,
    during_request,
    fetching,
    measured_bytes,
    prompt,
    pulled,
    pulled_bytes,
    requests_on,
    server_that_is,
    serving,
    token_ids,
    until,
    wait_until_idle,
)

from kvroute.serve.api.api_keys import hash_text

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair, Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
GENERATING = ("completions", "chat")


@pytest.fixture(scope="module")
def process(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all tests of the module."""
    with serving(cluster, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture
def gateway(process: Gateway, pair: Pair) -> Gateway:
    """The gateway, once it reports that all servers are up, including those that an earlier test killed."""
    all_up(process, pair)
    return process


@pytest.mark.parametrize("tokens", [20, 300, 2100, 3500])
def test_tokens_equal_those_of_one_server(pair: Pair, gateway: Gateway, tokens: int) -> None:
    """Streamed or not, each with a separate prompt; the KV is transferred over the network both times."""
    whole, streamed = prompt(tokens, seed=1000 + tokens), prompt(tokens, seed=5000 + tokens)
    moved = pulled(pair)
    with gateway.client() as client:
        reply = client.completions.create(model="tiny", prompt=whole, extra_body=TOKENS, **GREEDY)
        got: list[int] = []
        with client.completions.create(
            model="tiny", prompt=streamed, stream=True, extra_body=TOKENS, **GREEDY
        ) as stream:
            for chunk in stream:
                got += [token for choice in chunk.choices for token in token_ids(choice)]
    until(lambda: pulled(pair) == moved + 2)
    assert token_ids(reply.choices[0]) == alone(pair, whole)
    assert got == alone(pair, streamed)


def test_a_corrupted_block_changes_the_tokens(pair: Pair, gateway: Gateway) -> None:
    """The negative control of the test above: one block of one layer, on the same path, without a checksum."""
    prompt_ids = prompt(300, seed=60)
    moved = pulled(pair)
    pair.prefill.fault_file.write_text("corrupt-layer-2-block-4", encoding="utf-8")
    with gateway.client() as client:
        reply = client.completions.create(model="tiny", prompt=prompt_ids, extra_body=TOKENS, **GREEDY)
    until(lambda: pulled(pair) == moved + 1)
    assert token_ids(reply.choices[0]) != alone(pair, prompt_ids)


def test_transfers_update_the_learned_bandwidth(pair: Pair, gateway: Gateway) -> None:
    """The engines' own counters reach the oracle: exactly the transferred bytes, and a bandwidth learned from them."""
    before = measured_bytes(gateway)
    with gateway.client() as client:
        client.completions.create(model="tiny", prompt=prompt(640, seed=61), extra_body=TOKENS, **GREEDY)
    until(lambda: before < measured_bytes(gateway) == pulled_bytes(pair) - gateway.pulled_before)
    last = gateway.events("transfer_measured")[-1]
    assert (last["source"], last["target"]) in [("prefill0", "decode0"), ("prefill0", "decode1")]
    assert last["seconds"] > 0
    assert gateway.metric("kvroute_learned_bandwidth_ratio") > 0


def test_concurrent_transfers_are_not_mixed(pair: Pair, gateway: Gateway) -> None:
    """The blocks of concurrent transfers are not mixed up. Each has few tokens, because the rounding of a batch is not
    tested here."""
    prompts = [prompt(40 + 60 * number, seed=700 + number) for number in range(16)]
    moved = pulled(pair)

    def send_prompt(tokens: list[int]) -> list[int]:
        reply = client.completions.create(model="tiny", prompt=tokens, temperature=0, max_tokens=3, extra_body=TOKENS)
        return token_ids(reply.choices[0])

    with gateway.client() as client, ThreadPoolExecutor(8) as threads:
        got = list(threads.map(send_prompt, prompts))
    assert got == [alone(pair, tokens, 3) for tokens in prompts]
    takes_a_step(pair)
    until(lambda: pulled(pair) == moved + len(prompts))
    wait_until_idle(gateway)


def takes_a_step(pair: Pair) -> None:
    """Let both decode servers compute a little: an idle engine does not report its last counts."""
    for server in (pair.decode, pair.other):
        server.post("/v1/completions", {"model": "tiny", "prompt": prompt(8, seed=799), "max_tokens": 4})


def test_chat_responses_equal_those_of_one_server(pair: Pair, gateway: Gateway) -> None:
    """The chat template gives the same result on both servers; unknown fields and the model list pass through."""
    messages: list[Any] = [{"role": "user", "content": "network aware control plane? " * 20}]
    moved = pulled(pair)
    with gateway.client() as client:
        reply = client.chat.completions.create(model="tiny", messages=messages, extra_body=TOKENS, **GREEDY)
        models = [model.id for model in client.models.list()]
    until(lambda: pulled(pair) == moved + 1)
    body = {"model": "tiny", "messages": messages, **GREEDY, **TOKENS}
    expected = pair.alone.post("/v1/chat/completions", body)["choices"][0]
    assert reply.choices[0].message.content == expected["message"]["content"]
    assert token_ids(reply.choices[0]) == expected["token_ids"]
    assert models == ["tiny"]


def test_kv_events_route_the_second_request_to_the_cached_prefix(pair: Pair, gateway: Gateway) -> None:
    """The first request fills the index by the engines' events alone; the second one is routed to the instance with its
    prefix."""
    prompt_ids = prompt(640, seed=77)
    hits = {leg: gateway.metric("kvroute_prefix_hit_tokens_total", leg=leg) for leg in ("prefill", "decode")}
    with gateway.client() as client:
        client.completions.create(model="tiny", prompt=prompt_ids, extra_body=TOKENS, **GREEDY)
        until(lambda: {"prefill", "decode"} <= holders(gateway, prompt_ids))
        nbytes = pulled_bytes(pair)
        again = client.completions.create(model="tiny", prompt=[*prompt_ids, 5, 6, 7], extra_body=TOKENS, **GREEDY)
    for leg, before in hits.items():
        assert gateway.metric("kvroute_prefix_hit_tokens_total", leg=leg) - before == 640
    # Of 643 tokens only the last block is transferred, in 4 layers.
    until(lambda: pulled_bytes(pair) - nbytes == 4 * LAYER_BYTES)
    assert token_ids(again.choices[0]) == alone(pair, [*prompt_ids, 5, 6, 7])


def holders(gateway: Gateway, prompt: list[int]) -> set[str]:
    """Return the roles of the engines whose events report all whole blocks of the newest prompt; empty while the log,
    which is up to a second late, does not show all requests."""
    chains = [event["request"]["blocks"] for event in gateway.events("arrived")]
    if len(chains) < sum(gateway.metric("kvroute_requests_total", endpoint=name) for name in GENERATING):
        return set()
    chain = chains[-1]
    full = set(chain[: len(prompt) // 32])
    held: dict[str, set[int]] = {}
    for event in gateway.events("kv_stored"):
        held.setdefault(event["instance"].rstrip("01"), set()).update(event["blocks"])
    return {role for role, blocks in held.items() if full <= blocks}


def kill_decoding(pair: Pair, gateway: Gateway, earlier: int) -> Server:
    """Kill the decode server of the newest request once it decodes, and return it. The event log names the server, and
    shows by KV cache events of full blocks beyond the prompt that it decodes: an engine sends these while it computes,
    but reports the number of running requests seconds late, or not at all before the response.

    Args:
        pair: the servers.
        gateway: the gateway in front of them.
        earlier: number of requests that arrived before this one.
    """

    def decodes() -> bool:
        arrived = gateway.events("arrived")[earlier:]
        if not arrived:
            return False
        ((number, blocks),) = [(event["request"]["id"], event["request"]["blocks"]) for event in arrived]
        assert all(event["request_id"] != number for event in gateway.events("finished")), "it ended before the kill"
        target = gateway.decode_target()
        stored = [event["blocks"] for event in gateway.events("kv_stored") if event["instance"] == target]
        return any(chain[: len(blocks)] == blocks and len(chain) > len(blocks) for chain in stored)

    until(decodes)
    servers = {server.name: server for server in (pair.decode, pair.other)}
    victim = servers[gateway.decode_target()]
    victim.kill()
    return victim


def last_request(gateway: Gateway, kind: str) -> int:
    """Return the number of events of this kind for the newest request in the log."""
    newest = [event["request"]["id"] for event in gateway.events("arrived")][-1:]
    return sum(event["request_id"] in newest for event in gateway.events(kind))


def test_a_decode_server_that_dies_mid_transfer_is_replaced(pair: Pair, gateway: Gateway) -> None:
    """The client sees only its stream, from the other server, which pulls the same KV; the prompt is prefilled once."""
    prompt_ids = prompt(600, seed=88)
    victims: list[Server] = []
    takes_a_step(pair)
    failed = {server.name: server.metric(FAILURES) for server in (pair.decode, pair.other)}

    def kill() -> None:
        try:
            victims.append(server_that_is(pair, fetching))
            victims[0].kill()
        finally:
            pair.prefill.fault_file.unlink()

    pair.prefill.fault_file.write_text("stall-layer-1", encoding="utf-8")
    got = during_request(gateway, kill, stream=True, prompt=prompt_ids, max_tokens=ANSWER_TOKENS)
    assert got == alone(pair, prompt_ids)
    (survivor,) = (server for server in (pair.decode, pair.other) if server.alive)
    until(lambda: last_request(gateway, "decode_failed") == 1)  # the log is flushed from time to time
    assert last_request(gateway, "prefill_finished") == 1
    assert survivor.metric(FAILURES) == failed[survivor.name]
    assert gateway.metric("kvroute_leg_failures_total", leg="decode", engine=victims[0].name) == 1
    assert gateway.metric("kvroute_retries_total", leg="decode") == 1
    until(lambda: gateway.metric("kvroute_instance_up", engine=victims[0].name) == 0)
    wait_until_idle(gateway)


def test_a_decode_server_that_dies_during_decode(pair: Pair, gateway: Gateway) -> None:
    """A non-streaming response comes from the other server instead; a started stream ends with a proper error event;
    without any server there is a proper 503."""
    prompt_ids, errors = prompt(50, seed=95), gateway.metric("kvroute_stream_errors_total")
    long = 3900  # tokens: many seconds, because a machine may be slow to show that the engine decodes
    earlier = len(gateway.events("arrived"))

    def kill() -> None:
        kill_decoding(pair, gateway, earlier)

    got = during_request(gateway, kill, stream=False, prompt=prompt_ids, max_tokens=long)
    assert got == alone(pair, prompt_ids, long)
    until(lambda: last_request(gateway, "decode_failed") == 1)  # the log is flushed from time to time
    broken_stream(pair, gateway, seed=91)
    assert gateway.metric("kvroute_stream_errors_total") == errors + 1
    with gateway.client() as client, pytest.raises(openai.InternalServerError) as rejected:
        client.completions.create(model="tiny", prompt=[5, 6, 7], **GREEDY)
    assert rejected.value.status_code == 503
    wait_until_idle(gateway)


def broken_stream(pair: Pair, gateway: Gateway, seed: int) -> None:
    """Kill the decoding server after five chunks; the client gets an error in the stream."""
    arrived = 0
    body: dict[str, Any] = {"max_tokens": 3000, "temperature": 0, "extra_body": TOKENS}
    with gateway.client() as client:
        stream = client.completions.create(model="tiny", prompt=prompt(100, seed), stream=True, **body)
        while arrived < 5:
            next(stream)
            arrived += 1
        (victim,) = (engine for engine in (pair.decode, pair.other) if requests_on(gateway, engine) == 1)
        victim.kill()
        with stream, pytest.raises(openai.APIError) as caught:
            list(stream)
    assert not isinstance(caught.value, openai.APIConnectionError), "the stream was cut instead of ended"
    assert victim.name in str(caught.value)
    until(lambda: gateway.metric("kvroute_instance_up", engine=victim.name) == 0)
    wait_until_idle(gateway)


def test_api_keys_share_no_cached_prompts(pair: Pair, tmp_path: Path) -> None:
    """With a salt per key, the prompt of another key is not cached for this one, neither by the engine's count of
    cached tokens nor by the gateway's, which follows the engines' KV events. The prompt of the same key is."""
    names = ("alice", "bob")
    settings: dict[str, Any] = {"keys": {"known": {name: hash_text(name) for name in names}}, "cache_salt": "per-key"}
    prompt_ids = prompt(640, seed=4711)
    with serving(pair, tmp_path, **settings) as gateway:
        all_up(gateway, pair)

        def cached(name: str) -> tuple[int, float]:
            """Return the count in the response, and that of the gateway when it chose the prefill instance."""
            before = gateway.metric("kvroute_prefix_hit_tokens_total", leg="prefill")
            client = gateway.client().with_options(api_key=name)
            usage = client.completions.create(model="tiny", prompt=prompt_ids, extra_body=TOKENS, **GREEDY).usage
            assert usage is not None
            details = usage.prompt_tokens_details
            routed = gateway.metric("kvroute_prefix_hit_tokens_total", leg="prefill") - before
            return (details.cached_tokens or 0) if details else 0, routed

        for name in names:
            assert cached(name) == (0, 0)
            until(lambda: {"prefill", "decode"} <= holders(gateway, prompt_ids))
        reported, routed = cached("alice")
        assert reported >= 608
        assert routed == 639, "the last token is always computed"
