"""Engines with data-parallel ranks join and leave a running gateway as a whole."""

from __future__ import annotations

from pathlib import Path

from tests.serve.lifecycle.membership_rig import discovering
from tests.serve.proxy.test_rank_legs import IN_TURN, ranks_in
from tests.serve.stub_engines import Engine, completion, listening, run
from tests.waiting import until

RANKS = [f"{name}_dp{rank}" for name in ("decode0", "prefill0") for rank in (0, 1)]


def test_all_ranks_of_an_engine_join_and_leave(tmp_path: Path) -> None:
    """One entry of the file with `dp`; each rank is an instance, and health checks are those of the engine."""

    async def main() -> None:
        engines = [Engine("prefill0", "prefill", ranks=2), Engine("decode0", "decode", ranks=2)]
        other = Engine("decode1", "decode")
        async with listening([*engines, other]):
            entries = {
                engine.name: {
                    "name": engine.name,
                    "role": engine.role,
                    "url": f"http://127.0.0.1:{engine.port}",
                    "node": f"node-{engine.name}",
                    "dp": engine.ranks,
                }
                for engine in [*engines, other]
            }
            async with discovering(tmp_path, entries, [], IN_TURN) as rig:
                rig.list(["prefill0", "decode0"])
                await rig.becomes_up(*RANKS)
                for _ in range(4):
                    assert (await rig.post(completion())).status == 200
                assert [ranks_in(engine.received) for engine in engines] == [{"0": 2, "1": 2}] * 2
                rig.list(["prefill0", "decode1"])
                await rig.becomes_up("prefill0_dp0", "prefill0_dp1", "decode1")
                await until(lambda: rig.members == {"prefill0_dp0", "prefill0_dp1", "decode1"})
                assert (await rig.post(completion())).status == 200
                assert ranks_in(other.received) == {"none": 1}
                rig.list(["prefill0", "decode0"])
                await rig.becomes_up(*RANKS)
                assert (await rig.post(completion())).status == 200
                assert await rig.becomes_idle(), rig.held_resources()

    run(main())
