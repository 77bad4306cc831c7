"""Live: a tenant that floods real vLLM does not take the turns of another one; SLOs and rates hold."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from tests.live.vllm.gateway_rig import (
    GREEDY,
    TOKENS,
    Gateway,
    all_up,
    alone,
    openai_client,
    prompt,
    serving,
    token_ids,
    until,
    wait_until_idle,
)

from kvroute.serve.api.api_keys import hash_text

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
KEYS = ("flood", "bob", "carol")
FLOOD = 12


@pytest.fixture(scope="module")
def gateway(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway that sends one request at a time to the servers."""
    more: dict[str, Any] = {
        "keys": {"known": {name: hash_text(f"kvr_{name}") for name in KEYS}, "classes": {"carol": "small"}},
        "classes": {"default": {"slo": {"header": True}}, "small": {"requests_per_minute": 2}},
        "fair_queue": {"running": 1},
    }
    with serving(cluster, tmp_path_factory.mktemp("gateway"), **more) as found:
        all_up(found, cluster)
        yield found


def client_of(gateway: Gateway, name: str) -> openai.OpenAI:
    """Return a client with a key."""
    return openai_client(gateway.url).with_options(api_key=f"kvr_{name}")


def ask(client: openai.OpenAI, tokens: list[int], **more: Any) -> list[int]:
    """Return the tokens of a response."""
    answer = client.completions.create(model="tiny", prompt=tokens, extra_body=TOKENS, **GREEDY, **more)
    return token_ids(answer.choices[0])


def test_a_flood_does_not_take_the_turns_of_another_tenant(cluster: Pair, gateway: Gateway) -> None:
    """While requests of one key wait at all times, a request of another key is placed after two of them at most,
    and its tokens are right. In the order of arrival it would be placed after all of them."""
    stop, served = threading.Event(), [0]

    def flood(number: int) -> None:
        with client_of(gateway, "flood") as client:
            while not stop.is_set():
                ask(client, prompt(200, seed=number))
                served[0] += 1

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(FLOOD)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: gateway.metric("kvroute_placement_queue_requests") >= FLOOD - 2)
        with client_of(gateway, "bob") as client:
            for number in range(2):
                tokens, before = prompt(150, seed=1_000 + number), served[0]
                got, during = ask(client, tokens), served[0] - before
                assert got == alone(cluster, tokens)
                # One was being served, one was placed before by the rule. The others have ended before their counts
                # were read.
                assert during <= FLOOD // 2
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    wait_until_idle(gateway)


def test_requests_that_would_be_late_and_keys_without_tokens_are_refused(cluster: Pair, gateway: Gateway) -> None:
    """The SDK sees the status, Retry-After and the rate; the log has predictions and what came of them."""
    with client_of(gateway, "bob") as client:
        tokens = prompt(100, seed=77)
        with pytest.raises(openai.InternalServerError) as late:
            ask(client, tokens, extra_headers={"X-Slo-Ttft-Ms": "1"})
        assert late.value.status_code == 503
        assert late.value.code == "slo"
        assert int(late.value.response.headers["retry-after"]) >= 1
        assert ask(client, tokens, extra_headers={"X-Slo-Ttft-Ms": "600000"}) == alone(cluster, tokens)
        for number in range(6):
            with client.completions.create(
                model="tiny", prompt=prompt(40 + 20 * number, seed=number), max_tokens=2, stream=True
            ) as stream:
                assert list(stream)
    with client_of(gateway, "carol") as client:
        raw = client.completions.with_raw_response.create(model="tiny", prompt="hello", max_tokens=1)
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        ask(client, tokens)
        with pytest.raises(openai.RateLimitError) as limited:
            ask(client, tokens)
        assert int(limited.value.response.headers["retry-after"]) >= 1
    wait_until_idle(gateway)
    line = [sys.executable, "-m", "kvroute.cli.app", "explain", str(gateway.log), "--calibration", "--json"]
    shown = subprocess.run(line, capture_output=True, check=True)
    assert json.loads(shown.stdout)["requests"] >= 6
