"""Live: clients that leave at any time strand no KV cache on the prefill server."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from tests.live.services import extent
from tests.live.vllm.gateway_rig import GREEDY, TOKENS, Gateway, all_up, prompt, serving, until, wait_until_idle

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500)]
REQUESTS, CLIENTS = extent(1_000, short=200), 3
EXPIRED = "kvroute:kv_expired_total"


@pytest.fixture(scope="module")
def gateway(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all tests of the module."""
    with serving(cluster, tmp_path_factory.mktemp("gateway")) as found:
        all_up(found, cluster)
        yield found


def body(number: int) -> bytes:
    """The request of this number: no two have equal prompts, every second one is a stream."""
    tokens = prompt(40 + 60 * (number % 8), seed=500_000 + number)
    return json.dumps({"model": "tiny", "prompt": tokens, "stream": number % 2 == 0, **GREEDY, **TOKENS}).encode()


def ask(gateway: Gateway, number: int, leave_s: float) -> bool:
    """Send a request, and close the connection after this time; return whether the response was complete by then."""
    address = urlsplit(gateway.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=leave_s)
    try:
        connection.request("POST", "/v1/completions", body(number), {"content-type": "application/json"})
        response = connection.getresponse()
        limit = time.monotonic() + leave_s
        while response.read(64):
            if time.monotonic() > limit:
                return False
        return response.status == 200
    except TimeoutError:
        return False
    finally:
        connection.close()


def strand_one(pair: Pair) -> None:
    """Let the prefill server keep a KV cache that no decode server fetches."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    request = {"model": "tiny", "prompt": prompt(64, seed=1), "max_tokens": 1, "kv_transfer_params": params}
    pair.prefill.post("/v1/completions", request)


def leave_at_any_time(gateway: Gateway, requests: int, seed: int) -> float:
    """Send requests whose clients leave after a random time; return how many of them left early."""
    draw, started = random.Random(seed), time.monotonic()
    assert all(ask(gateway, requests + number, 120.0) for number in range(5))
    whole_s = (time.monotonic() - started) / 5
    gone = gateway.metric("kvroute_client_disconnects_total")
    leaves_s = [draw.uniform(0.0, CLIENTS * whole_s) for _ in range(requests)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda number: ask(gateway, number, leaves_s[number]), range(requests)))
    wait_until_idle(gateway)
    return gateway.metric("kvroute_client_disconnects_total") - gone


def nothing_has_expired(pair: Pair, expired: float) -> None:
    """Check that no KV cache has expired since the counter had this value, and none will. One is stranded here on
    purpose: once it has expired, any other one would have, too."""
    strand_one(pair)

    def another_has_expired() -> bool:
        pair.prefill.post("/v1/completions", {"model": "tiny", "prompt": prompt(8, seed=2), "max_tokens": 1})
        return pair.prefill.metric(EXPIRED) > expired  # an idle engine does not check its time limits

    until(another_has_expired)
    assert pair.prefill.metric(EXPIRED) == expired + 1


def test_many_clients_that_leave(cluster: Pair, gateway: Gateway) -> None:
    """They leave during the prefill, the transfer or the response."""
    expired = cluster.prefill.metric(EXPIRED)
    left = leave_at_any_time(gateway, REQUESTS, seed=3)
    assert left > REQUESTS / 4
    assert gateway.metric("kvroute_abandoned_kv_total", outcome="fetched") > left / 10
    nothing_has_expired(cluster, expired)
