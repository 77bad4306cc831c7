"""Telemetry from Prometheus and by push: the meaning of responses, the rejected ones, and the handling of failures."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import HANGS_S

from kvroute.serve.config.field_types import Wait as WaitTime
from kvroute.serve.config.settings import TIERS, LinkQuery, PrometheusSettings
from kvroute.serve.telemetry.prometheus import (
    LinkReader,
    PrometheusSource,
    TelemetryError,
    read_reply,
    tier_value,
)
from kvroute.serve.telemetry.push import read_push
from kvroute.topology import Cluster, load
from kvroute.types import CongestionMeasured, Event, InputError, LinksMeasured, TransferMeasured

EXAMPLE = Path(__file__).parents[3] / "examples" / "small.yaml"
SHARES = st.floats(0, 1)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load(EXAMPLE)


def vector(*series: tuple[dict[str, str], float | str]) -> bytes:
    result = [{"metric": labels, "value": [1763761234.5, str(value)]} for labels, value in series]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


@given(st.lists(st.tuples(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2), st.floats())))
def test_a_vector_response_is_parsed(series: list[tuple[dict[str, str], float]]) -> None:
    read = read_reply(vector(*series))
    assert [labels for labels, _ in read] == [labels for labels, _ in series]
    assert [repr(value) for _, value in read] == [repr(value) for _, value in series]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "not a vector"),
        (
            b'{"status":"error","errorType":"bad_data","error":"parse error: here"}',
            "the query failed: parse error: here",
        ),
        (b'{"status":"success","data":{"resultType":"matrix","result":[]}}', "not a vector"),
        (
            b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"x"]}]}}',
            "not a vector",
        ),
        (b'{"status":"success"}', "the query failed"),
    ],
    ids=["html", "error", "matrix", "word", "empty"],
)
def test_other_responses_are_errors_with_a_cause(body: bytes, message: str) -> None:
    with pytest.raises(TelemetryError, match=message):
        read_reply(body)


def test_a_scalar_is_a_series_without_labels() -> None:
    body = b'{"status":"success","data":{"resultType":"scalar","result":[1763761234.5,"0.25"]}}'
    assert tier_value("pod", read_reply(body)) == 0.25


@pytest.mark.parametrize(
    ("values", "message"),
    [([], "returns 0 series"), ([0.1, 0.2], "returns 2 series"), ([-0.1], "not a share"), ([37.0], "not a share")],
    ids=["none", "two", "negative", "percent"],
)
def test_a_tier_must_have_exactly_one_share(values: list[float], message: str) -> None:
    with pytest.raises(TelemetryError, match=message):
        tier_value("rack", [({}, value) for value in values])
    with pytest.raises(TelemetryError, match="not a share"):
        tier_value("rack", [({}, float("nan"))])


@given(st.dictionaries(st.sampled_from([f"l{n}" for n in range(12)]), SHARES, min_size=1), st.randoms())
def test_links_have_the_order_of_the_cluster(shares: dict[str, float], shuffle: random.Random) -> None:
    """The order of the series does not matter; links without one read 0, and series of other links are ignored."""
    links = [f"l{n}" for n in range(10)]
    series = [({"link": name, "job": "switch"}, share) for name, share in shares.items()]
    shuffle.shuffle(series)
    reader = LinkReader(links, "link")
    if not set(shares) & set(links):
        with pytest.raises(TelemetryError, match="none of"):
            reader.utilisation(series)
    else:
        assert reader.utilisation(series) == tuple(shares.get(name, 0.0) for name in links)


def test_duplicate_or_invalid_links_are_rejected_and_missing_ones_read_zero() -> None:
    reader = LinkReader(["a", "b"], "name")
    assert reader.utilisation([({"name": "a"}, float("nan")), ({"name": "b"}, 0.5)]) == (0.0, 0.5)
    with pytest.raises(TelemetryError, match="several series for link a"):
        reader.utilisation([({"name": "a"}, 0.1), ({"name": "a"}, 0.2)])
    with pytest.raises(TelemetryError, match="link b is not a share"):
        reader.utilisation([({"name": "b"}, 1e9)])


def test_missing_and_unknown_links_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = LinkReader(["a", "b", "c"], "name")
    for _ in range(3):
        reader.utilisation([({"name": "a"}, 0.1), ({"name": "x"}, 0.2)])
    assert [record.getMessage() for record in caplog.records] == ["telemetry_of_unknown_links", "telemetry_lacks_links"]
    assert [record.__dict__["fields"]["reason"] for record in caplog.records] == ["x", "b, c"]


class Server:
    """A server that answers queries as the test specifies."""

    def __init__(self) -> None:
        self.replies: dict[str, bytes] = {}
        self.content_type = "application/json"
        self.request_count = 0
        self.port = 0
        self._runner = web.AppRunner(self._app())

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/prom/api/v1/query", self._query)
        return app

    async def _query(self, request: web.Request) -> web.Response:
        self.request_count += 1
        query = str((await request.post())["query"])
        return web.Response(body=self.replies[query], content_type=self.content_type)

    async def start(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return f"http://user:secret@127.0.0.1:{self.port}/prom?token=secret"

    async def stop(self) -> None:
        await self._runner.cleanup()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await scenario()

    uvloop.run(bounded())


def source_of(url: str, links: list[str], emitted: asyncio.Queue[Event], **queries: Any) -> PrometheusSource:
    settings = PrometheusSettings(url=url, interval_s=WaitTime(0.005), timeout_s=WaitTime(20.0), **queries)
    return PrometheusSource(settings, links, emitted.put_nowait, lambda: 8.0, random.Random(1))


def test_tiers_are_queried_one_by_one_and_failures_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is emitted while a query fails; after the first good response values are emitted again; no secret is
    logged."""

    async def scenario() -> None:
        server, emitted = Server(), asyncio.Queue[Event]()
        url = await server.start()
        server.replies = {"rack_load": vector(({}, 0.25)), "wan_load": vector(({"a": "b"}, 0.5))}
        source = source_of(url, [], emitted, per_tier={"rack": "rack_load", "wan": "wan_load"})
        source.start()
        expected = CongestionMeasured(8.0, (0.0, 0.25, 0.0, 0.0, 0.5))
        assert await emitted.get() == expected
        server.replies["wan_load"] = vector()
        before = server.request_count
        while server.request_count < before + 8:
            await asyncio.sleep(0.001)
        assert "wan returns 0 series" in source.failure
        while not emitted.empty():
            assert emitted.get_nowait() == expected
        server.replies["wan_load"] = vector(({}, 0.125))
        assert await emitted.get() == CongestionMeasured(8.0, (0.0, 0.25, 0.0, 0.0, 0.125))
        assert source.failure == ""
        source.close()
        await source.closed()
        await server.stop()

    with caplog.at_level("INFO", logger="kvroute"):
        run(scenario)
    events = [record for record in caplog.records if record.name == "kvroute"]
    assert [record.getMessage() for record in events] == ["telemetry_failed", "telemetry_recovered"]
    assert all("secret" not in str(record.__dict__) for record in events)


@pytest.mark.parametrize("fault", ["gone", "html"])
def test_links_are_found_by_label_and_read_again_after_a_failure(fault: str) -> None:
    async def scenario() -> None:
        server, emitted = Server(), asyncio.Queue[Event]()
        url = await server.start()
        good = vector(({"port": "b"}, 0.5), ({"port": "a"}, 0.25))
        server.replies = {"load": good}
        source = source_of(url, ["a", "b", "c"], emitted, per_link=LinkQuery(query="load", label="port"))
        source.start()
        assert await emitted.get() == LinksMeasured(8.0, (0.25, 0.5, 0.0))
        if fault == "gone":
            await server.stop()
        else:
            server.content_type, server.replies["load"] = "text/html", b"<html>"
        while not source.failure:
            await asyncio.sleep(0.001)
        while not emitted.empty():
            emitted.get_nowait()
        if fault == "gone":
            again = Server()
            again.port, again.replies, server = server.port, server.replies, again
            await server.start()
        else:
            server.content_type, server.replies["load"] = "application/json", good
        assert await emitted.get() == LinksMeasured(8.0, (0.25, 0.5, 0.0))
        source.close()
        await source.closed()
        await server.stop()

    run(scenario)


@given(st.dictionaries(st.sampled_from(TIERS), SHARES))
def test_pushed_tiers_have_the_order_of_the_cluster(cluster: Cluster, per_tier: dict[str, float]) -> None:
    body = json.dumps({"per_tier": per_tier}).encode()
    assert read_push(body, cluster, 3.0) == [CongestionMeasured(3.0, tuple(per_tier.get(tier, 0.0) for tier in TIERS))]


def test_pushed_links_and_transfers_are_emitted(cluster: Cluster) -> None:
    """One body contains both; a missing link reads 0."""
    source, target = cluster.instances[0].name, cluster.instances[-1].name
    transfer = {"source": source, "target": target, "kv_bytes": 1e9, "seconds": 0.5, "transfers": 3}
    body = json.dumps({"per_link": {cluster.links[1].name: 0.5}, "transfers": [transfer]}).encode()
    rest = (0.0,) * (len(cluster.links) - 2)
    assert read_push(body, cluster, 3.0) == [
        LinksMeasured(3.0, (0.0, 0.5, *rest)),
        TransferMeasured(3.0, source, target, 1e9, 0.5, 3),
    ]


def wrong_transfer(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    good = {"source": cluster.instances[0].name, "target": cluster.instances[1].name, "kv_bytes": 1, "seconds": 1}
    return {"transfers": [good, good | fields]}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"{", r"^push: "),
        (b"{}", r"^push: the object is empty"),
        (b'{"per_tier": {}, "per_link": {}}', r"^push: both"),
        (b'{"per_tyre": {}}', r"^push: .*per_tyre"),
        (b'{"per_tier": {"row": 0.1}}', r"^per_tier: 'row' does not exist; known: node, rack"),
        (b'{"per_tier": {"rack": -0.1}}', r"^per_tier.rack: -0.1 is not a utilisation"),
        (b'{"per_tier": {"rack": 30}}', r"^per_tier.rack: 30 is not a utilisation"),
        (b'{"per_link": {"nowhere": 0.1}}', r"^per_link: 'nowhere' does not exist"),
        (b'{"per_tier": {"rack": "0.1"}}', r"^push: .*per_tier"),
    ],
    ids=["cut", "empty", "both", "field", "tier", "negative", "percent", "link", "text"],
)
def test_an_invalid_push_is_reported(cluster: Cluster, body: bytes, where: str) -> None:
    with pytest.raises(InputError, match=where):
        read_push(body, cluster, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("source", "unknown"), ("target", "unknown"), ("kv_bytes", 0), ("seconds", -1), ("seconds", 0), ("transfers", 0)],
)
def test_an_invalid_pushed_transfer_is_reported(cluster: Cluster, field: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"^transfers\[1\]\.{field}: "):
        read_push(json.dumps(wrong_transfer(cluster, **{field: value})).encode(), cluster, 0.0)
