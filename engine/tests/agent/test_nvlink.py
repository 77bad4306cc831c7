"""Rates of NVLink from dcgm-exporter's page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvroute_engine.agent.agent import fetch_rates, nvlink_rates

PAGE = """
# HELP DCGM_FI_PROF_NVLINK_TX_BYTES The rate of data transmitted over NVLink
# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES gauge
DCGM_FI_PROF_NVLINK_TX_BYTES{gpu="0",UUID="GPU-1",device="nvidia0"} 1.5e+09
DCGM_FI_PROF_NVLINK_TX_BYTES{gpu="1",UUID="GPU-2",device="nvidia1"} 0
DCGM_FI_PROF_NVLINK_TX_BYTES{gpu="2",UUID="GPU-3",device="nvidia2"} NaN
# HELP DCGM_FI_PROF_NVLINK_RX_BYTES The rate of data received over NVLink
# TYPE DCGM_FI_PROF_NVLINK_RX_BYTES counter
DCGM_FI_PROF_NVLINK_RX_BYTES{gpu="0",UUID="GPU-1",device="nvidia0"} 25
DCGM_FI_PROF_NVLINK_RX_BYTES{gpu="1",UUID="GPU-2",device="nvidia1"} 26
DCGM_FI_PROF_NVLINK_RX_BYTES{gpu="2",UUID="GPU-3",device="nvidia2"} 27
DCGM_FI_DEV_GPU_UTIL{gpu="0"} 97
"""


class Exporter(BaseHTTPRequestHandler):
    """Answers with the page, or with 500 bytes that are none."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.encode() if self.path == "/metrics" else b"{" * 500 + b"\n")

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def exporter() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Exporter)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_gpus_with_both_rates_are_read() -> None:
    assert nvlink_rates(PAGE) == {0: (1.5e9, 25.0), 1: (0.0, 26.0)}
    assert nvlink_rates("") == {}


def test_a_page_is_fetched_and_failures_are_no_rates(exporter: str) -> None:
    assert fetch_rates(f"{exporter}/metrics") == {0: (1.5e9, 25.0), 1: (0.0, 26.0)}
    assert fetch_rates(f"{exporter}/other") is None
    assert fetch_rates("http://127.0.0.1:1/metrics") is None
    assert fetch_rates("no url") is None
