"""Live: kvroute's connector on real vLLM, whose decode servers read the KV from the prefill server's memory by NIXL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.live.vllm.conftest import start_member
from tests.live.vllm.connector_cases import ConnectorCases, completed, until_reported
from tests.live.vllm.gateway_rig import ANSWER_TOKENS, Gateway, alone, fetching, prompt, until
from tests.live.vllm.stock_connectors import StockConnector, prompt_bytes
from tests.live.vllm.test_vllm_pair import REMOTE_DECODE, announced, answer, complete

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.vllm.conftest import Pair, Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
FAULTS = {"stall": "stall-layer-2", "corrupt": "corrupt-layer-2"}


@dataclass(frozen=True)
class NixlPlane(StockConnector):
    """kvroute's connector with NIXL. The prefill server has the faults."""

    def inject(self, pair: Pair, fault: str) -> None:
        """Inject `stall` or `corrupt`; empty: remove the fault."""
        file = pair.prefill.fault_file
        file.write_text(FAULTS[fault], encoding="utf-8") if fault else file.unlink(missing_ok=True)

    def stalled(self, pair: Pair) -> bool:
        """Return whether a decode server waits for KV: the third layer is not offered to it."""
        return any(fetching(server) for server in (pair.decode, pair.other))

    def start(self, role: str, name: str, model: Path, folder: Path, ports: list[int] | None = None) -> Server:
        """Start a server; it is not ready yet."""
        return start_member(role, name, model, folder, ports, variables=self.variables([0] * 4), data_plane="nixl")


NIXL_PLANE = NixlPlane(
    name="KvrouteConnector",
    package="nixl._api",
    module="kvroute_engine.connector.vllm",
    protocol="vllm",
    mover="decode",
    moved_bytes=lambda server: server.metric("kvroute:kv_nixl_bytes_total", source="prefill0"),
    variables=lambda ports: {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
)


class TestNixlPlane(ConnectorCases):
    """All tests of connectors: `moved` are bytes that NIXL has read, so that a test fails if TCP takes over. KV is kept
    until a decode server has all of it."""

    connector, prefills = NIXL_PLANE, 1

    def test_the_oracle_learns_from_the_connector_s_own_counters(self, pair: Pair, gateway: Gateway) -> None:
        """They name the source; the kernel's counters of the TCP connections, which carry no KV, are not reported."""
        measured = gateway.events("transfer_measured")
        prompt_ids = prompt(640, seed=61)
        moved = self.connector.moved(pair)
        assert completed(gateway, prompt_ids) == alone(pair, prompt_ids)
        until_reported(pair, lambda: self.connector.moved(pair) == moved + prompt_bytes(640))
        until(lambda: len(gateway.events("transfer_measured")) > len(measured))
        event = gateway.events("transfer_measured")[-1]
        assert (event["source"], event["kv_bytes"]) == ("prefill0", prompt_bytes(640))
        assert pair.prefill.metric("kvroute:kv_sent_bytes_total") < prompt_bytes(640)

    def test_layers_are_read_while_the_prompt_is_computed(self, pair: Pair) -> None:
        """Both servers get their requests at once; 3,500 tokens are two chunks."""
        prompt_ids = prompt(3500, seed=63)
        moved, params = self.connector.moved(pair), announced(pair, "early-nixl")
        early = pair.decode.metric("kvroute:kv_early_bytes_total", source="prefill0")
        with ThreadPoolExecutor(1) as thread:
            reply = thread.submit(complete, pair.decode, prompt_ids, ANSWER_TOKENS, params)
            complete(pair.prefill, prompt_ids, 1, REMOTE_DECODE | {"transfer_id": "early-nixl"})
            assert answer(reply.result()) == alone(pair, prompt_ids)
        address = prompt_bytes(8)  # of the prompt from whose parameters the router knows the prefill server
        until_reported(pair, lambda: self.connector.moved(pair) == moved + address + prompt_bytes(3500))
        assert pair.decode.metric("kvroute:kv_early_bytes_total", source="prefill0") == early + prompt_bytes(3500)

    def test_a_prefill_server_without_nixl_sends_over_tcp(self, pair: Pair, gateway: Gateway) -> None:
        """TCP is the fallback: tokens are equal, and the decode server says why NIXL is not used."""
        pair.prefill.kill()
        ports, folder = pair.prefill.ports, pair.folder
        plain = start_member("kv_producer", "prefill0", pair.model, folder, ports)
        try:
            until(plain.ready)
            until(lambda: gateway.metric("kvroute_instance_up", engine="prefill0") == 1)
            prompt_ids = prompt(400, seed=62)
            moved = self.connector.moved(pair)
            assert completed(gateway, prompt_ids) == alone(pair, prompt_ids)
            assert self.connector.moved(pair) == moved
            logs = [server.log.read_text(encoding="utf-8", errors="replace") for server in (pair.decode, pair.other)]
            assert any("is transferred over TCP: it has no NIXL" in log for log in logs)
        finally:
            plain.kill()
