"""Live: a prefix that one vLLM server has cached is fetched by another one, which computes the rest and holds the whole
prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.conftest import BLOCK_TOKENS, LAYER_BYTES, start_member, wait_ready
from tests.live.vllm.gateway_rig import ANSWER_TOKENS, alone, cluster_file, serving, until
from tests.live.vllm.test_vllm_pair import REMOTE_DECODE, answer, complete, prompt

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.vllm.conftest import Pair, Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
LAYERS = 4


@pytest.fixture(scope="module")
def far(cluster: Pair) -> Iterator[Server]:
    """A server in another datacenter, which fetches prefixes and serves the KV of prompts."""
    server = start_member("kv_both", "far0", cluster.model, cluster.folder)
    try:
        wait_ready([server])
        yield server
    finally:
        server.kill()


def fetched(server: Server, source: str) -> float:
    """Return the bytes that the server has pulled from the source."""
    return server.metric("kvroute:kv_transfer_bytes_total", source=source)


def both(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the computing leg from the reply of the server that holds the prefix."""
    params: dict[str, Any] = reply["kv_transfer_params"]
    params.pop("remote_prefill_cached_tokens")
    return params | {"do_remote_decode": True, "do_remote_prefill": True}


def cached(reply: dict[str, Any]) -> int:
    """Return the number of cached prompt tokens."""
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(("tokens", "more"), [(320, 45), (32, 500), (2_080, 1_300), (640, 0)])
def test_three_legs_give_the_tokens_of_one_server(pair: Pair, far: Server, tokens: int, more: int) -> None:
    """The cases are part of a chunk, several chunks, and nothing to compute beside the copy. The whole blocks of the
    prefix are transferred once, then those of the prompt."""
    prefix = prompt(tokens, seed=40_000 + tokens)
    prompt_ids = prefix + prompt(more, seed=50_000 + tokens)
    complete(pair.prefill, prefix, 1)
    before = fetched(far, "prefill0"), fetched(pair.decode, "far0")
    held = complete(pair.prefill, prefix, 1, REMOTE_DECODE)
    assert cached(held) >= tokens - BLOCK_TOKENS, "the server that has the prefix computes at most one block"
    computed = complete(far, prompt_ids, 1, both(held))
    reply = complete(pair.decode, prompt_ids, ANSWER_TOKENS, computed["kv_transfer_params"])
    assert answer(reply) == alone(pair, prompt_ids, ANSWER_TOKENS)
    assert cached(computed) >= tokens - 1
    complete(far, prompt(8, seed=60_000), 1)  # counts are updated one step after the response
    complete(pair.decode, prompt(8, seed=60_001), 1)
    block_bytes = LAYERS * LAYER_BYTES
    blocks = -(-len(prompt_ids) // BLOCK_TOKENS)
    moved = fetched(far, "prefill0") - before[0], fetched(pair.decode, "far0") - before[1]
    assert moved == (tokens // BLOCK_TOKENS * block_bytes, blocks * block_bytes)


@pytest.mark.parametrize("change", [{"remote_request_id": "absent"}, {"remote_prompt": "0"}], ids=["gone", "other"])
def test_a_prefix_that_does_not_arrive_is_computed(pair: Pair, far: Server, change: dict[str, Any]) -> None:
    """The prompt is still held for its decode server, and the response is correct."""
    prefix = prompt(320, seed=70_000 + len(str(change)))
    prompt_ids = [*prefix, *prompt(50, seed=70_100)]
    held = complete(pair.prefill, prefix, 1, REMOTE_DECODE)
    computed = complete(far, prompt_ids, 1, both(held) | change)
    reply = complete(pair.decode, prompt_ids, ANSWER_TOKENS, computed["kv_transfer_params"])
    assert (cached(computed), answer(reply)) == (0, alone(pair, prompt_ids, ANSWER_TOKENS))


def test_the_gateway_sends_a_prefix_ahead_of_a_long_prompt(pair: Pair, far: Server, tmp_path: Path) -> None:
    """640 tokens are computed and cached at home; 2,000 more make the prompt long: it is computed at the remote site,
    with the 640 fetched from home, and decoded at home."""
    first, text = prompt(640, seed=80_000), two_datacenters(pair, far)
    prompt_ids = first + prompt(2_000, seed=80_001)
    before = fetched(far, "prefill0")
    with serving(pair, tmp_path, text) as gateway, gateway.client() as client:
        names = [server.name for server in [*pair.servers, far]]
        until(lambda: all(gateway.metric("kvroute_instance_up", engine=name) == 1 for name in names))
        options: dict[str, Any] = {"temperature": 0, "max_tokens": ANSWER_TOKENS}
        more = {"return_token_ids": True, "ignore_eos": True}
        client.completions.create(model="tiny", prompt=first, extra_body=more, **options)
        until(lambda: gateway.metric("kvroute_kv_events_total", engine="prefill0") > 0)
        reply = client.completions.create(model="tiny", prompt=prompt_ids, extra_body=more, **options)
        assert (reply.choices[0].model_extra or {})["token_ids"] == alone(pair, prompt_ids, ANSWER_TOKENS)
        assert gateway.metric("kvroute_copies_total", outcome="landed") == 1
        until(lambda: fetched(far, "prefill0") - before == 640 // BLOCK_TOKENS * LAYERS * LAYER_BYTES)


def two_datacenters(pair: Pair, far: Server) -> str:
    """Return the cluster of the other tests as home site, with a second datacenter that has one prefill-only server."""
    offload = {
        "threshold": "1000 tokens",
        "rule": "abundant",
        "copy": {},
        "short_term": {"enabled": False},
    }
    document = json.loads(cluster_file(pair, {"offload": offload}))
    document["datacenters"] = [{"name": "home"}, {"name": "away"}]
    uplinks = {"uplinks": {"count": 2, "capacity": "10 Gbps"}}
    document["racks"] = [{"name": f"rack{k}", "datacenter": site, **uplinks} for k, site in enumerate(("home", "away"))]
    (node, *_) = document["nodes"]
    document["nodes"].append(node | {"name": "node2", "rack": "rack1"})
    document["wan"] = [{"from": "away", "to": "home", "capacity": "10 Gbps", "latency": "1 ms"}]
    endpoint = {"url": far.url, "kv_events": far.events, "kv_replay": far.replay}
    document["instances"].append({"name": far.name, "role": "prefill", "gpus": "node2:0", "endpoint": endpoint})
    return json.dumps(document)
