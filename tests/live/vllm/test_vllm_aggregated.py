"""Live: real vLLM servers that serve a request aggregated: short and cached prompts on a decode server, and responses
of the prefill server itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.gateway_rig import (
    GREEDY,
    TOKENS,
    Gateway,
    all_up,
    alone,
    cluster_file,
    prompt,
    pulled,
    serving,
    token_ids,
    until,
    wait_until_idle,
)

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
LONG = 1_600


def text_of(pair: Pair, **parameters: int) -> str:
    """Return the cluster file. Decode servers are said to take 5 ms per token of a prompt, and the prefill server
    200 ms for any prompt, so that the choice does not depend on how fast this machine is."""
    document: dict[str, Any] = json.loads(
        cluster_file(pair, {"policy": "foresight-joint", "parameters": dict(parameters)})
    )
    fast = document["timing"]["default"]
    fast["prefill"] = {"kind": "linear", "per_token": "1 us", "base": "200 ms"}
    slow = {"kind": "linear", "per_token": "5 ms", "base": "1 ms"}
    document["timing"]["slow"] = {"prefill": slow, "decode": fast["decode"]}
    for instance in document["instances"]:
        if instance["role"] == "decode":
            instance["timing"] = "slow"
    return json.dumps(document)


def decisions(gateway: Gateway, count: int) -> list[tuple[str, ...]]:
    """Wait until the log has `count` decisions; return their instances: that of a prefill, or source and target of a
    decode."""
    until(lambda: len(logged(gateway)) >= count)
    return logged(gateway)


def logged(gateway: Gateway) -> list[tuple[str, ...]]:
    """Return those that the log has now."""
    lines = [json.loads(line) for line in gateway.log.read_text(encoding="utf-8").split("\n")[1:-1]]
    made = [decision for line in lines for decision in line.get("decisions", ())]
    return [
        (decision["instance"],) if decision["type"] == "prefill" else (decision["source"], decision["target"])
        for decision in made
        if decision["type"] in ("prefill", "decode")
    ]


def complete(gateway: Gateway, tokens: list[int], stream: bool) -> list[int]:
    """Return the tokens of a response."""
    with gateway.client() as client:
        reply: Any = client.completions.create(model="tiny", prompt=tokens, stream=stream, extra_body=TOKENS, **GREEDY)
        return [
            token for part in (reply if stream else [reply]) for choice in part.choices for token in token_ids(choice)
        ]


@pytest.mark.parametrize("stream", [True, False])
def test_short_and_cached_prompts_go_to_a_decode_server(pair: Pair, tmp_path: Path, stream: bool) -> None:
    """The prefill server computes the long prompt once and nothing else; all tokens are those of a single server."""
    short, long = prompt(20, seed=9_100 + stream), prompt(LONG, seed=9_200 + stream)
    with serving(pair, tmp_path, text_of(pair, aggregated=1)) as gateway:
        all_up(gateway, pair)
        moved, computed = pulled(pair), pair.prefill.metric("vllm:prompt_tokens_total")
        assert complete(gateway, short, stream) == alone(pair, short)
        ((source, target),) = decisions(gateway, 1)
        assert source == target
        assert target.startswith("decode")
        assert complete(gateway, long, stream) == alone(pair, long)
        assert [len(decision) for decision in decisions(gateway, 3)[1:]] == [1, 2]
        prefill, (source, target) = decisions(gateway, 3)[1:]
        assert prefill == ("prefill0",) != (target,)
        until(lambda: pulled(pair) == moved + 1)
        until(lambda: any(event["instance"] == target for event in gateway.events("kv_stored")))
        assert complete(gateway, long, stream) == alone(pair, long)
        assert decisions(gateway, 4)[3:] == [(target, target)]
        wait_until_idle(gateway)
        until(lambda: pair.prefill.metric("vllm:prompt_tokens_total") == computed + LONG)
        assert pulled(pair) == moved + 1


@pytest.mark.parametrize("stream", [True, False])
def test_the_prefill_server_goes_on_to_decode(pair: Pair, tmp_path: Path, stream: bool) -> None:
    """Without load no KV is transferred; the tokens are those of a single server."""
    long = prompt(LONG, seed=9_300 + stream)
    with serving(pair, tmp_path, text_of(pair)) as gateway:
        all_up(gateway, pair)
        moved = pulled(pair)
        assert complete(gateway, long, stream) == alone(pair, long)
        assert decisions(gateway, 2) == [("prefill0",), ("prefill0", "prefill0")]
        wait_until_idle(gateway)
        assert pulled(pair) == moved
