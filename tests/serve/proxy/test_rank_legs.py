"""What engines with data-parallel ranks receive: the header of the rank on every leg, and the right remote engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from tests.serve.rig import MODEL, with_section
from tests.serve.stub_engines import (
    HEAD,
    Engine,
    ReceivedRequest,
    completion,
    failing,
    listening,
    run,
    serving,
)
from tests.waiting import becomes_true

from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.types import KvProtocol

HEADER = "x-data-parallel-rank"
IN_TURN = "  policy: round-robin\n  prefill: round-robin\n"
QUICK_BREAKER = "  breaker: {failures: 3, open: 60 s}\n  retries: {attempts: 1}\n  health: {panic: 0}\n"


def ranked(engines: Sequence[Engine], section: str = "") -> Deployment:
    """Return a deployment of engines that already listen, with `dp` for those that have several ranks."""
    lines = [
        f"  - {{name: {engine.name}, role: {engine.role}, tp: 1, gpus: 'node{number}:0-{engine.ranks - 1}', "
        f"dp: {engine.ranks}, model: {MODEL}, endpoint: {engine.endpoint}}}\n"
        for number, engine in enumerate(engines)
    ]
    gateway = "gateway:\n  listen: {port: 0}\n  admin: {port: 0}\n  policy: foresight\n"
    return Deployment.of(with_section(section, f"{HEAD}instances:\n{''.join(lines)}{gateway}"), "stub.yaml")


def pair(protocol: KvProtocol = "vllm", prefill: int = 4, decode: int = 2) -> list[Engine]:
    """Return a prefill and a decode engine with these numbers of ranks."""
    return [
        Engine("p", "prefill", protocol, engine_id="id", ranks=prefill),
        Engine("d", "decode", protocol, ranks=decode),
    ]


def ranks_in(received: Sequence[ReceivedRequest]) -> Counter[str]:
    return Counter(request.headers.get(HEADER, "none") for request in received)


@pytest.mark.parametrize("protocol", ["vllm", "mooncake"])
def test_both_legs_name_their_rank(protocol: KvProtocol) -> None:
    """Each rank is an instance, so policies divide the requests among the ranks as among engines."""

    async def main() -> None:
        prefill, decode = engines = pair(protocol)
        async with listening(engines), serving(ranked(engines, IN_TURN)) as gate:
            for number in range(8):
                assert (await gate.post(completion(prompt=f"{number} " * 200))).status == 200
            assert ranks_in(prefill.received) == {"0": 2, "1": 2, "2": 2, "3": 2}
            assert ranks_in(decode.received) == {"0": 4, "1": 4}
            assert await gate.becomes_idle(), gate.held_resources()

    run(main())


def test_the_remote_engine_of_mooncake_is_the_rank_that_prefills() -> None:
    """The bootstrap server of an engine lists the id of each rank; the decode engine gets that of the prefill leg."""

    async def main() -> None:
        prefill, decode = engines = pair("mooncake")
        async with listening(engines), serving(ranked(engines, IN_TURN)) as gate:
            await asyncio.gather(*[gate.post(completion(prompt=f"{n} " * 200)) for n in range(12)])
        rank = {
            request.json["kv_transfer_params"]["transfer_id"]: request.headers[HEADER] for request in prefill.received
        }
        params = [request.json["kv_transfer_params"] for request in decode.received]
        assert len(params) == 12
        assert {param["transfer_id"]: param["remote_engine_id"] for param in params} == {
            name: f"id_dp{number}" for name, number in rank.items()
        }
        assert set(rank.values()) == {"0", "1", "2", "3"}

    run(main())


def test_the_parameters_of_a_pull_come_from_the_rank_and_are_not_changed() -> None:
    """vLLM's connectors write their own id, host and port into them."""

    async def main() -> None:
        engines = pair()
        async with listening(engines), serving(ranked(engines)) as gate:
            assert (await gate.post(completion())).status == 200
            (decoded,) = engines[1].received
            assert decoded.raw("kv_transfer_params") == bytes(engines[0].params)

    run(main())


def test_an_engine_of_one_rank_gets_no_header() -> None:
    async def main() -> None:
        engines = pair(prefill=1, decode=1)
        async with listening(engines), serving(ranked(engines)) as gate:
            assert (await gate.post(completion())).status == 200
            assert ranks_in([request for engine in engines for request in engine.received]) == {"none": 2}

    run(main())


def test_requests_that_one_instance_serves_alone_name_its_rank() -> None:
    async def main() -> None:
        engines = [Engine("e", "both", ranks=2)]
        async with listening(engines), serving(ranked(engines)) as gate:
            body = {"model": MODEL, "input": "text"}
            replies = await asyncio.gather(*[gate.post(body, "/v1/embeddings") for _ in range(8)])
            assert {reply.status for reply in replies} == {200}
            assert ranks_in(engines[0].received).keys() == {"0", "1"}

    run(main())


def test_failures_of_all_ranks_open_one_breaker() -> None:
    """As many errors as open that of one engine; then no rank gets a request."""

    async def main() -> None:
        engine = Engine("e", "both", ranks=2, serve=failing(503))
        async with listening([engine]), serving(ranked([engine], QUICK_BREAKER)) as gate:
            runtime = gate.gateway.runtime

            def up() -> list[bool]:
                return [client.availability.up for client in runtime.engines.values()]

            assert await becomes_true(lambda: up() == [True, True])
            while len(engine.received) < 12:
                assert any(up())
                await gate.post(completion())
            assert up() == [False, False]
            assert (await gate.post(completion())).status == 503
            assert len(engine.received) == 12

    run(main())


def test_a_rank_that_the_bootstrap_server_does_not_know_fails_the_prefill() -> None:
    """The decode engine must not fetch from another rank."""

    async def main() -> None:
        engines = pair("mooncake", prefill=2)
        async with listening(engines):
            made = ranked(engines, IN_TURN + "  retries: {attempts: 1}\n")
            engines[0].ranks = 1
            engines[0].engine_id = "only"
            async with serving(made) as gate:
                replies = await asyncio.gather(*[gate.post(completion(prompt=f"{n} " * 200)) for n in range(8)])
                assert {reply.status for reply in replies} == {200, 502}
                fetched = [request.json["kv_transfer_params"]["remote_engine_id"] for request in engines[1].received]
                assert set(fetched) == {"only"}
                assert ranks_in(engines[0].received).keys() == {"0"}

    run(main())
