"""Two datacenters end to end: `kvroute serve --embedded` under load while the link between them is cut and repaired."""

from __future__ import annotations

import pytest
import uvloop
from bench.gateway.two_datacenters import Course, run

pytestmark = pytest.mark.live


@pytest.mark.parametrize("layerwise", [False, True], ids=["serial", "layerwise"])
def test_a_link_cut_under_load_loses_no_request(layerwise: bool) -> None:
    """Long prompts are offloaded by a searched threshold, prefilled at home while the link is down, and offloaded
    again. Every client gets each of its tokens once, and nothing is held at the end."""
    outcome = uvloop.run(run(Course(speed=8.0, cut_s=16.0, layerwise=layerwise)))
    assert outcome.requests > 150
    assert (outcome.lost, outcome.errors) == (0, ())
    assert outcome.left == {}
    assert outcome.offloaded_share["before"] > 0.1
    assert outcome.fallen_back > 0
    assert outcome.offloaded_share["after"] > 0.1
