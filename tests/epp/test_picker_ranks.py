"""The picker in front of engines with data-parallel ranks: the header is part of its choice."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.epp.envoy_rig import address, completion_body, picking
from tests.serve.proxy.test_rank_legs import HEADER, IN_TURN, pair, ranked, ranks_in
from tests.serve.rig import MODEL
from tests.serve.stub_engines import Engine, listening, run

from kvroute.epp.addresses import check_addresses
from kvroute.types import InputError


def test_a_choice_names_the_rank_in_a_header_for_the_engine() -> None:
    """The client's own header is replaced; engines that would need another header are no fallbacks."""

    async def main() -> None:
        engines = [Engine("a", "both", ranks=2), Engine("b", "both", ranks=2)]
        async with listening(engines), picking(ranked(engines)) as rig:
            seen = set()
            for number in range(8):
                stream = rig.stream()
                answer = await stream.ask(completion_body(prompt=f"{number} " * 90), headers=[(HEADER, "7")])
                assert answer.added[HEADER] in ("0", "1")
                assert set(answer.endpoints) <= {address(engine) for engine in engines}
                assert len(set(answer.endpoints)) == len(answer.endpoints) == 2
                (name,) = rig.booked()
                assert name.endswith(f"_dp{answer.added[HEADER]}")
                seen.add(answer.endpoints[0])
                await stream.respond(200, answer.endpoints[0])
                await stream.end()
                assert await rig.becomes_idle()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


def test_a_fallback_counts_for_the_same_rank_of_the_other_engine() -> None:
    async def main() -> None:
        engines = [Engine("a", "both", ranks=2), Engine("b", "both", ranks=2)]
        async with listening(engines), picking(ranked(engines)) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            await stream.respond(200, answer.endpoints[1])
            (name,) = rig.booked()
            assert address(engines["ab".index(name[0])]) == answer.endpoints[1]
            assert name.endswith(f"_dp{answer.added[HEADER]}")
            await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


def test_an_engine_that_envoy_was_not_told_counts_for_the_same_rank() -> None:
    """Envoy has sent the header of the rank that was chosen."""

    async def main() -> None:
        engines = [Engine("a", "both", ranks=2), Engine("b", "both", ranks=2)]
        section = IN_TURN + "  retries: {attempts: 1}\n"
        async with listening(engines), picking(ranked(engines, section)) as rig:
            names = []
            for number in range(4):
                stream = rig.stream()
                answer = await stream.ask(completion_body(prompt=f"{number} " * 90))
                (other,) = {address(engine) for engine in engines} - set(answer.endpoints)
                await stream.respond(200, other)
                (name,) = rig.booked()
                assert name == f"{'ba'[other == address(engines[0])]}_dp{answer.added[HEADER]}"
                names.append(name)
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
            assert sorted(names) == ["a_dp0", "a_dp1", "b_dp0", "b_dp1"]

    run(main())


def test_engines_without_ranks_are_no_fallback_for_a_rank() -> None:
    """Envoy sends the same header to all endpoints, and rank 1 does not exist there."""

    async def main() -> None:
        engines = [Engine("a", "both", ranks=2), Engine("b", "both")]
        async with listening(engines), picking(ranked(engines)) as rig:
            for number in range(6):
                stream = rig.stream()
                answer = await stream.ask(completion_body(prompt=f"{number} " * 90))
                assert len(answer.endpoints) == 1
                assert (HEADER in answer.added) is (answer.endpoints == [address(engines[0])])
                await stream.end()

    run(main())


def test_both_legs_name_their_rank() -> None:
    """The picker sends the prefill leg itself."""

    async def main() -> None:
        prefill, _ = engines = pair()
        async with listening(engines), picking(ranked(engines, IN_TURN)) as rig:
            asks = [rig.stream().ask(completion_body(prompt=f"{number} " * 90)) for number in range(8)]
            answers = await asyncio.gather(*asks)
            assert {answer.added[HEADER] for answer in answers} == {"0", "1"}
            assert ranks_in(prefill.received).keys() == {"0", "1", "2", "3"}
            assert all("kv_transfer_params" in msgspec.json.decode(answer.body) for answer in answers)

    run(main())


def test_a_sidecar_cannot_name_the_rank_of_the_prefill() -> None:
    async def main() -> None:
        engines = pair()
        async with listening(engines):
            made = ranked(engines)
            check_addresses(made.cluster.instances, "x.yaml")
            with pytest.raises(InputError, match="a sidecar cannot tell the prefill engine its data-parallel rank"):
                check_addresses(made.cluster.instances, "x.yaml", sidecar=True)

    run(main())


def test_other_requests_go_to_each_server_once() -> None:
    """Ranks of one server have one address."""

    async def main() -> None:
        engines = [Engine("a", "both", ranks=2), Engine("b", "both", ranks=2)]
        async with listening(engines), picking(ranked(engines)) as rig:
            body = msgspec.json.encode({"model": MODEL, "input": "text"})
            stream = rig.stream()
            answer = await stream.ask(body, path="/v1/embeddings")
            assert sorted(answer.endpoints) == sorted(address(engine) for engine in engines)
            await stream.end()

    run(main())
