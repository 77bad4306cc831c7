"""Live: clients that leave at any time strand no KV cache on the prefill server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.live.services import extent
from tests.live.vllm.gateway_rig import Gateway, all_up, prompt, serving, until
from tests.live.vllm.leaving_clients import leave_at_any_time

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500)]
REQUESTS = extent(1_000, short=200)
EXPIRED = "kvroute:kv_expired_total"


@pytest.fixture(scope="module")
def gateway(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all tests of the module."""
    with serving(cluster, tmp_path_factory.mktemp("gateway")) as found:
        all_up(found, cluster)
        yield found


def strand_one(pair: Pair) -> None:
    """Let the prefill server keep a KV cache that no decode server fetches."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    request = {"model": "tiny", "prompt": prompt(64, seed=1), "max_tokens": 1, "kv_transfer_params": params}
    pair.prefill.post("/v1/completions", request)


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
    assert left > REQUESTS / 8
    assert gateway.metric("kvroute_abandoned_kv_total", outcome="fetched") > left / 10
    nothing_has_expired(cluster, expired)
