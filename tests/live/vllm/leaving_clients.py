"""Clients that leave a gateway in front of vLLM at any time."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

from tests.live.vllm.gateway_rig import GREEDY, TOKENS, Gateway, prompt, wait_until_idle

CLIENTS = 3
"""Clients at a time."""


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


def response_times(gateway: Gateway, requests: int) -> tuple[float, float]:
    """Return the medians of the time to the headers and of whole streams, after one that warms the engines up."""
    first_s, whole_s, address = [], [], urlsplit(gateway.url)
    for number in range(requests, requests + 12, 2):
        connection, began_s = http.client.HTTPConnection(str(address.hostname), address.port), time.monotonic()
        with closing(connection):
            connection.request("POST", "/v1/completions", body(number), {"content-type": "application/json"})
            response = connection.getresponse()
            first_s.append(time.monotonic() - began_s)
            assert response.status == 200
            response.read()
            whole_s.append(time.monotonic() - began_s)
    return statistics.median(first_s[1:]), statistics.median(whole_s[1:])


def leave_at_any_time(gateway: Gateway, requests: int, seed: int) -> float:
    """Send requests whose clients leave after a random time, half of them before their first token; return how many
    left early."""
    draw, limits_s = random.Random(seed), response_times(gateway, requests)
    gone = gateway.metric("kvroute_client_disconnects_total")
    leaves_s = [draw.uniform(0.0, draw.choice(limits_s)) for _ in range(requests)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda number: ask(gateway, number, leaves_s[number]), range(requests)))
    wait_until_idle(gateway)
    return gateway.metric("kvroute_client_disconnects_total") - gone
