"""The rate of a key over all workers of a machine."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.serve.workers.test_workers import BODY, CLUSTER, Running, running, until
from tests.waiting import PATIENCE_S

from kvroute.serve.api.api_keys import hash_text

PER_MINUTE = 20
RATES = f"""\
  keys: {{known: {{alice: "{hash_text("kvr_alice")}"}}}}
  classes: {{default: {{requests_per_minute: {PER_MINUTE}}}}}
"""


def status(gate: Running) -> int:
    """Send a request of the key on a connection of its own, which any worker may accept."""
    connection = HTTPConnection(urlsplit(gate.url).netloc, timeout=PATIENCE_S)
    headers = {"content-type": "application/json", "authorization": "Bearer kvr_alice"}
    connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
    found = connection.getresponse()
    found.read()
    connection.close()
    return found.status


@pytest.mark.slow
def test_workers_keep_to_one_rate(tmp_path: Path) -> None:
    """Each worker counts what the other has charged: two workers do not serve two buckets."""
    with running(tmp_path, CLUSTER + RATES) as gate:
        until(gate.in_sync)
        start = time.monotonic()
        served = [status(gate) for _ in range(3 * PER_MINUTE)]
        refilled = (time.monotonic() - start) * PER_MINUTE / 60
        assert set(served) == {200, 429}
        assert PER_MINUTE <= served.count(200) <= PER_MINUTE + 2 + refilled
