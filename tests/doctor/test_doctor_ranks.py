"""The doctor examines each data-parallel rank: its metrics, its KV events, and its pairs."""

from __future__ import annotations

import uvloop
from tests.doctor.rig import HEAD, OPTIONS

from kvroute import topology
from kvroute.doctor import examine
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.lifecycle.deployment import Deployment

TEXT = (
    HEAD
    + """  - {name: p, role: prefill, gpus: "node0:0-3", dp: 2}
  - {name: d, role: decode, gpus: "node1:0-3", dp: 2}
"""
)


def test_each_rank_and_each_pair_of_ranks_is_examined() -> None:
    """Without the header, prompts would go to any rank: KV events and transfers would be missing on the right one."""

    async def main() -> None:
        cluster = topology.parse(TEXT)
        async with EmulatedCluster(cluster, EmulatedClusterSpec()) as fleet:
            made = Deployment.of(TEXT, "ranks.yaml", endpoints=fleet.ready().instances)
            report = await examine(made, OPTIONS)
            assert [finding.sentence for finding in report.findings] == []
            assert sorted((pair.prefill, pair.decode) for pair in report.pairs) == [
                (f"p_dp{source}", f"d_dp{target}") for source in (0, 1) for target in (0, 1)
            ]
            assert {pair.moved for pair in report.pairs} == {"yes"}

    uvloop.run(main())
