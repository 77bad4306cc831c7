"""Live: congestion from a real Prometheus server (Debian's) that scrapes an exporter of link utilisation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from tests.live.services import prometheus, required

from kvroute.serve.config.field_types import Wait
from kvroute.serve.config.settings import LinkQuery, PrometheusSettings
from kvroute.serve.telemetry.prometheus import PrometheusSource
from kvroute.topology import load
from kvroute.types import CongestionMeasured, Event, LinksMeasured

EXAMPLE = Path(__file__).parents[2] / "examples" / "small.yaml"
CONFIG = """\
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: switches
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Switches:
    """An exporter with a byte counter and a capacity for each link, as a switch has them."""

    def __init__(self, links: list[str]) -> None:
        self.share = dict.fromkeys(links, 0.0)
        self._bytes = dict.fromkeys(links, 0.0)
        self._read_s = 0.0

    async def page(self, request: web.Request) -> web.Response:
        now_s = asyncio.get_running_loop().time()
        passed_s, self._read_s = now_s - self._read_s, now_s
        lines = []
        for link, share in self.share.items():
            self._bytes[link] += share * 1e9 * passed_s
            lines += [
                f'link_bytes_total{{port="{link}"}} {self._bytes[link]}',
                f'link_utilisation{{port="{link}",tier="{"rack" if "rack" in link else "other"}"}} {share}',
            ]
        return web.Response(text="\n".join([*lines, ""]), content_type="text/plain")


@asynccontextmanager
async def scraped(folder: Path, program: str, switches: Switches) -> AsyncIterator[str]:
    """Run a server that scrapes `switches` every second; yield its URL."""
    app = web.Application()
    app.router.add_get("/metrics", switches.page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(port=runner.addresses[0][1]))
    try:
        with prometheus(program, config, folder) as url:
            yield url
    finally:
        await runner.cleanup()


@pytest.mark.live
def test_link_and_tier_utilisation_is_read_from_prometheus(tmp_path: Path) -> None:
    """A gauge by link in the cluster's order; a rate over counters by tier; while the server is down, the reason."""
    program = required("prometheus", "prometheus")
    links = [link.name for link in load(EXAMPLE).links]

    async def scenario() -> None:
        switches = Switches(links)
        switches.share |= {links[0]: 0.5, links[-1]: 0.25}
        by_link: asyncio.Queue[Event] = asyncio.Queue()
        by_tier: asyncio.Queue[Event] = asyncio.Queue()
        chance = random.Random(0)
        async with scraped(tmp_path, program, switches) as url:
            interval_s, timeout_s = Wait(0.2), Wait(10.0)
            query = LinkQuery(query="link_utilisation", label="port")
            rate = f'sum(rate(link_bytes_total{{port="{links[0]}"}}[5s])) / 1e9'
            asks = [
                PrometheusSettings(url=url, per_link=query, interval_s=interval_s, timeout_s=timeout_s),
                PrometheusSettings(url=url, per_tier={"rack": rate}, interval_s=interval_s, timeout_s=timeout_s),
            ]
            sources = [
                PrometheusSource(asks[0], links, by_link.put_nowait, lambda: 1.0, chance),
                PrometheusSource(asks[1], [], by_tier.put_nowait, lambda: 2.0, chance),
            ]
            for source in sources:
                source.start()
            event = await by_link.get()
            assert event == LinksMeasured(1.0, tuple(switches.share.values()))
            tiers = await by_tier.get()
            assert isinstance(tiers, CongestionMeasured)
            assert tiers.per_tier[0] == 0.0
            while not 0.45 < tiers.per_tier[1] < 0.55:
                tiers = await by_tier.get()
                assert isinstance(tiers, CongestionMeasured)
        while not sources[0].failure:
            await asyncio.sleep(0.01)
        assert "127.0.0.1" in sources[0].failure
        for source in sources:
            source.close()
            await source.closed()

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    uvloop.run(bounded())
