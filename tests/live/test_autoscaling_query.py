"""Live: the query of docs/autoscaling.md, on a real Prometheus server (Debian's) that scrapes a gateway."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
import uvloop
from tests.live.services import prometheus, required
from tests.serve.rig import Rig, rig

PAGE = Path(__file__).parents[2] / "docs" / "autoscaling.md"
CONFIG = """\
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: kvroute
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.mark.live
def test_the_documented_query_returns_the_desired_instances(tmp_path: Path) -> None:
    program = required("prometheus", "prometheus")
    (query,) = re.findall(r"^ +query: (.*)$", PAGE.read_text(), re.M)

    async def ask(gate: Rig, url: str) -> float | None:
        try:
            async with gate.session.get(f"{url}/api/v1/query", params={"query": query}) as response:
                found = (await response.json())["data"]["result"] if response.status == 200 else []
        except aiohttp.ClientConnectorError:  # the server starts
            return None
        return float(found[0]["value"][1]) if found else None

    async def scenario() -> None:
        async with rig("  autoscaling: {interval: 100 ms, scale_in: 0 s, prefill: {min: 3}}\n") as gate:
            config = tmp_path / "prometheus.yml"
            config.write_text(CONFIG.format(port=gate.gateway.admin_port))
            with prometheus(program, config, tmp_path) as url:
                async with asyncio.timeout(120):
                    while await ask(gate, url) != 3.0:
                        await asyncio.sleep(0.1)

    uvloop.run(scenario())
