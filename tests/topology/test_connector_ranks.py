"""The name of a data-parallel rank in the connector's metrics is that of its instance in the cluster file."""

from __future__ import annotations

import pytest

from kvroute.topology.reading.data_parallel import rank_name
from kvroute_engine.connector.options import ConnectorSettings, of_rank


@pytest.mark.parametrize("rank", [0, 1, 12])
def test_a_rank_has_the_name_that_the_cluster_file_gives_it(rank: int) -> None:
    assert of_rank(ConnectorSettings(instance="decode0"), rank).instance == rank_name("decode0", rank)


def test_an_engine_of_one_rank_and_one_without_a_name_keep_theirs() -> None:
    assert of_rank(ConnectorSettings(instance="decode0"), None).instance == "decode0"
    assert of_rank(ConnectorSettings(), 3).instance == ""
