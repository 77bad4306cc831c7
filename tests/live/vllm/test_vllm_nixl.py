"""Live: the gateway in front of real vLLM with NIXL over TCP, and what the gateway learns from NIXL's own metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.connector_cases import ConnectorCases, completed
from tests.live.vllm.gateway_rig import Gateway, alone, during_request, prompt, until
from tests.live.vllm.stock_connectors import NIXL, prompt_bytes

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


class TestNixl(ConnectorCases):
    """All tests of connectors, and those of NIXL's metrics."""

    connector = NIXL

    def test_the_oracle_learns_from_nixl(self, pair: Pair, gateway: Gateway) -> None:
        """NIXL's series do not name the source. The gateway knows it, and learns exactly the bytes that were moved; the
        dashboard and `kvroute explain` show what has measured them and the share of the cluster file's rate."""
        before, moved = measured(gateway), self.connector.moved(pair)
        prompt_ids = prompt(640, seed=61)
        assert completed(gateway, prompt_ids) == alone(pair, prompt_ids)
        until(lambda: len(measured(gateway)) > len(before))
        (event,) = measured(gateway)[len(before) :]
        assert event["measured_by"] == "nixl"
        assert event["source"] == "prefill0"
        assert event["target"] == gateway.decode_target()
        assert event["kv_bytes"] == prompt_bytes(640) == self.connector.moved(pair) - moved
        assert 0 < event["seconds"] < 60
        assert gateway.metric("kvroute_learned_bandwidth_ratio") > 0
        with urllib.request.urlopen(f"{gateway.admin}/state", timeout=10.0) as answer:
            paths = json.load(answer)["tick"]["paths"]
        (path,) = [measured_path for measured_path in paths if measured_path["target"] == event["target"]]
        assert (path["source"], path["measured_by"]) == ("prefill0", "nixl")
        assert path["ratio"] == pytest.approx(path["bytes_per_s"] / path["map_bytes_per_s"], rel=1e-4)
        last = gateway.events("arrived")[-1]["request"]["id"]
        command = [sys.executable, "-m", "kvroute.cli.app", "explain", str(gateway.log), str(last)]
        spoken = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "counted by NIXL" in " ".join(spoken.split())

    def test_kv_that_no_engine_fetches_is_counted(self, pair: Pair, gateway: Gateway) -> None:
        """The decode server dies before it has read everything. The prefill server keeps the blocks until their time is
        over; the gateway counts them as expired."""
        expired = gateway.metric("kvroute_engine_kv_expired_total", engine="prefill0")

        def kill() -> None:
            try:
                self.half_moved(pair).kill()
            finally:
                self.connector.inject(pair, "")

        self.connector.inject(pair, "stall")
        prompt_ids = prompt(600, seed=90)
        assert during_request(gateway, kill, stream=True, prompt=prompt_ids, max_tokens=8) == alone(pair, prompt_ids, 8)

        def counted() -> bool:
            # An idle engine does not report its last counts.
            pair.prefill.post("/v1/completions", {"model": "tiny", "prompt": prompt(8, seed=799), "max_tokens": 1})
            return gateway.metric("kvroute_engine_kv_expired_total", engine="prefill0") > expired

        until(counted)


def measured(gateway: Gateway) -> list[dict[str, Any]]:
    """Return the measurements in the event log."""
    return gateway.events("transfer_measured")
