"""The whole gateway with engines whose connector does not name the other engine of a transfer, as NIXL."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.serve.rig import RunningGateway
from tests.serve.stub_engines import Engine, completion, run, stub_rig
from tests.waiting import until

SETTINGS = "  scrape: {interval: 20 ms}\n"


def nixl(kv_bytes: float, seconds: float, transfers: int, failed: int = 0, expired: int = 0) -> str:
    """Return the lines of vLLM's metrics page about NIXL."""
    labels = '{engine="0",model_name="m"}'
    return (
        f"vllm:nixl_xfer_time_seconds_sum{labels} {seconds}\nvllm:nixl_bytes_transferred_count{labels} {transfers}\n"
        f"vllm:nixl_bytes_transferred_sum{labels} {kv_bytes}\nvllm:nixl_num_failed_transfers_total{labels} {failed}\n"
        f"vllm:nixl_num_kv_expired_reqs_total{labels} {expired}\n"
    )


async def paths(front: RunningGateway) -> list[dict[str, Any]]:
    """Return the measured paths that the dashboard shows."""
    async with front.session.get(f"{front.admin}/state") as response:
        shown: list[dict[str, Any]] = (await response.json())["tick"]["paths"]
    return shown


@pytest.mark.parametrize("counting", ["prefill0", "decode0"], ids=["push", "pull"])
def test_what_an_engine_counts_belongs_to_the_pair_that_the_gateway_has_used(counting: str) -> None:
    """A pull is counted by the target, a push by the source. The counts are of all ranks of the engine (TP 2)."""

    async def main() -> None:
        engines = [Engine("prefill0", "prefill"), Engine("decode0", "decode")]
        (counts,) = (engine for engine in engines if engine.name == counting)
        counts.metrics = nixl(5e9, 7.0, 30)
        async with stub_rig(engines, SETTINGS) as front:
            scraped = front.gateway.runtime.measured
            await until(lambda: counting in scraped)
            assert (await front.post(completion(stream=True))).status == 200
            ranks = front.gateway.runtime.engines[counting].instance.tp
            assert ranks == 2
            counts.metrics = nixl(5e9 + 8e9, 7.0 + ranks * 4.0, 30 + ranks)
            decode = front.gateway.runtime.engines["decode0"]
            await until(lambda: not decode.measures)
            (path,) = await paths(front)
            assert (path["source"], path["target"], path["measured_by"]) == ("prefill0", "decode0", "nixl")
            assert (path["transfers"], path["bytes_per_s"]) == (1, 2e9)
            assert path["ratio"] == pytest.approx(2e9 / path["map_bytes_per_s"], rel=1e-4)

    run(main())


def test_failures_and_expired_kv_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The first page is the baseline; a counter that has decreased was reset."""

    async def main() -> None:
        prefill, decode = Engine("prefill0", "prefill"), Engine("decode0", "decode")
        prefill.metrics, decode.metrics = nixl(0, 0, 0, expired=5), nixl(0, 0, 0, failed=7)
        async with stub_rig([prefill, decode], SETTINGS) as front:
            scraped = front.gateway.runtime.measured
            await until(lambda: {"prefill0", "decode0"} <= set(scraped))
            prefill.metrics, decode.metrics = nixl(0, 0, 0, expired=6), nixl(0, 0, 0, failed=2)
            wanted = (
                'kvroute_engine_kv_expired_total{engine="prefill0"} 1',
                'kvroute_engine_transfer_failures_total{engine="decode0"} 2',
            )
            page = ""
            while not all(line in page for line in wanted):
                page = await front.metrics()

    with caplog.at_level(logging.WARNING, "kvroute"):
        run(main())
    lost = [record.__dict__["fields"] for record in caplog.records if record.message == "kv_lost"]
    assert {"instance": "prefill0", "expired": 1} in lost
    assert {"instance": "decode0", "failed": 2} in lost
